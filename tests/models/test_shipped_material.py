"""What ships of kvasir-tiny's world is what the world makes, in the language of the tokenizer that ships."""

from inference_svc.model import kvasir_tiny
from inference_svc.model.model_identity import tokenizer_digest
from inference_svc.model.quality.conversations import Conversations
from inference_svc.model.quality.material import AT_LOAD, FULL, QUICK
from tools.kvasir_tiny import ship


def test_the_files_that_ship_are_what_the_world_makes() -> None:
    """`python -m tools.kvasir_tiny.ship` writes them."""
    assert kvasir_tiny.conversations_path().read_text(encoding="utf-8") == ship.text_of(ship.conversations())
    assert ship.STORIES_PATH.read_text(encoding="utf-8") == ship.text_of(ship.stories())


def test_every_extent_finds_its_conversations() -> None:
    shipped = Conversations.read(kvasir_tiny.conversations_path())
    for extent in (FULL, QUICK, AT_LOAD):
        for place in enumerate(extent.lengths):
            talk = shipped.by_number[place]
            assert len(talk.tool_calls) >= extent.tools_each
            assert talk.recall


def test_only_a_model_with_the_same_tokenizer_is_asked() -> None:
    file = kvasir_tiny.conversations_path()
    assert Conversations.read_for(file, tokenizer_digest(kvasir_tiny.path())) is not None
    assert Conversations.read_for(file, "0" * 64) is None
    assert Conversations.read_for(None, tokenizer_digest(kvasir_tiny.path())) is None
