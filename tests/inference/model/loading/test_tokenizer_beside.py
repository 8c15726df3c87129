"""A model's tokenizer is read while its weights come: of 128,256 tokens each takes a second or two."""

import threading
from typing import Any

import mlx_lm.utils
import pytest
from kvasir.errors import FailedPrecondition

from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.model import kvasir_tiny, loading
from inference_svc.model.weights.placing import Placement, place_weights


def test_the_tokenizer_is_begun_before_the_weights_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, load_tokenizer = threading.Event(), mlx_lm.utils.load_tokenizer

    def read(*given: Any, **named: Any) -> Any:
        begun.set()
        plain: Any = load_tokenizer
        return plain(*given, **named)

    def placed(*given: Any, **named: Any) -> Placement:
        assert begun.wait(5)
        return place_weights(*given, **named)

    monkeypatch.setattr(mlx_lm.utils, "load_tokenizer", read)
    monkeypatch.setattr(loading, "place_weights", placed)
    assert loading.load(kvasir_tiny.path(), None).tokenizer.eos_token_ids


def test_a_model_is_loaded_before_its_tokenizer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, load_tokenizer = threading.Event(), mlx_lm.utils.load_tokenizer

    def read(*given: Any, **named: Any) -> Any:
        assert may_go_on.wait(60)
        plain: Any = load_tokenizer
        return plain(*given, **named)

    monkeypatch.setattr(mlx_lm.utils, "load_tokenizer", read)
    loaded = loading.load(kvasir_tiny.path(), None)
    assert not loaded.reading.done()
    may_go_on.set()
    assert loaded.tokenizer.eos_token_ids


def test_a_tokenizer_that_cannot_be_read_is_refused_as_a_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any, **_named: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr(mlx_lm.utils, "load_tokenizer", fail)
    loaded = loading.load(kvasir_tiny.path(), None)
    with pytest.raises(FailedPrecondition, match="no such thing"):
        _ = loaded.token_text


@pytest.mark.parametrize("decodes", [True, False])
def test_kernels_of_decoding_are_checked_for_a_model_that_decodes(
    decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, the check of a step's attention takes seconds, which a model of embeddings has no use for."""
    checked = list[bool | None]()
    monkeypatch.setattr(KernelChoice, "takes_few_rows", lambda _: True)
    monkeypatch.setattr(KernelChoice, "joins_steps", lambda _: True)
    monkeypatch.setattr(KernelChoice, "takes_layers", lambda _, is_packed: checked.append(is_packed))
    monkeypatch.setattr(loading, "take_own_operations", lambda *_, **__: None)
    loading.load(kvasir_tiny.path(), None, decodes=decodes)
    assert checked == ([None] if decodes else [])
