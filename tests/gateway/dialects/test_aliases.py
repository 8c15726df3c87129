"""Names that stand for models: they answer, answers name the model, and one that stands for none is refused clearly."""

from pathlib import Path
from typing import Any

import httpx2 as httpx
import kvasir_gateway.__main__
import pytest
from kvasir import volatile
from kvasir.errors import InvalidArgument, NotFound
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway.engine import CallerAtEngine
from kvasir_gateway.models import Aliases, listed
from kvasir_gateway.turn import Turn

from tests.gateway.conftest import ENCODER, Front
from tests.gateway.serving import MODEL

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
NAMES = ["kvasir-tiny", "gpt-4o", "claude-sonnet"]


def test_an_alias_answers_for_its_model_and_is_listed(strict: Front) -> None:
    for name in NAMES:
        answer = strict.openai().chat.completions.create(model=name, messages=HELLO, max_tokens=4)
        assert answer.model == MODEL
        message = strict.anthropic().messages.create(model=name, messages=HELLO, max_tokens=4)
        assert message.model == MODEL
        assert strict.anthropic().messages.count_tokens(model=name, messages=HELLO).input_tokens > 0
        assert strict.openai().models.retrieve(name).id == name
    assert [model.id for model in strict.openai().models.list()] == [MODEL, ENCODER, *NAMES[1:]]
    shown = {model.id: model.display_name for model in strict.anthropic().models.list()}
    assert shown == {**dict.fromkeys(NAMES, MODEL), ENCODER: ENCODER}
    lists = [httpx.get(f"{strict.gateway.url}/v1/models{end}", headers=strict.bearer()).json() for end in ("", "/")]
    assert lists[0] == lists[1]


def test_one_conversation_under_two_names_has_one_memory(strict: Front) -> None:
    told = [{"role": "user", "content": "Under two names. My dog is called Rex."}]
    first = strict.openai().chat.completions.create(model="gpt-4o", messages=told, max_tokens=24)
    told += [{"role": "assistant", "content": first.choices[0].message.content}, *HELLO]
    second = strict.openai().chat.completions.create(model=MODEL, messages=told, max_tokens=24)
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens


def test_an_alias_of_no_model_ends_the_start_with_the_models_names(
    front: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(front.keys["ada"])
    common = ("--listen", "127.0.0.1:9", "--engine", front.house.engine.address, "--state-dir", str(tmp_path))
    options = (*common, "--no-keys", "--token-file", str(token), "--alias", "gpt-4o=gpt-4")
    assert kvasir_gateway.__main__.main(options) == 2
    assert "--alias: gpt-4o=gpt-4: the engine's models are kvasir-tiny" in capsys.readouterr().err


def test_an_alias_whose_model_is_missing_later_is_refused_with_both_names() -> None:
    class WithoutModels:
        async def count_tokens(self, **_: Any) -> int:
            raise NotFound("no such model", reason="MODEL_NOT_FOUND")

    turn = Aliases({"a": "b"}).applied(Turn(model="a", any_model=True))
    counting = CallerAtEngine(WithoutModels()).count(turn, ())  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="'a' stands for 'b'"):
        counting.send(None)


def test_aliases_that_cannot_be_are_refused() -> None:
    for models in (["c"], ["a", "b"]):
        with pytest.raises(InvalidArgument) as refused:
            Aliases({"a": "b"}).check(models)
        assert refused.value.field == "--alias"
    assert [name for name, _ in Aliases({"a": "b", "d": "e"}).beside([pb.Model(name="b")])] == ["b", "a"]


def test_a_name_that_stands_for_nothing_stays_unknown(strict: Front) -> None:
    asked = {"model": "gpt-4", "messages": HELLO}
    answer = httpx.post(f"{strict.gateway.url}/v1/chat/completions", json=asked, headers=strict.bearer())
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("options", "answers_for_any", "side_calls", "rules"),
    [
        ((), True, ["title", "summary", "probe"], volatile.DEFAULT),
        (("--host", "mac.local"), False, ["title", "summary", "probe"], volatile.DEFAULT),
        (("--host", "mac.local", "--any-model"), True, ["title", "summary", "probe"], volatile.DEFAULT),
        (("--no-any-model", "--side-calls", "none"), False, [], volatile.DEFAULT),
        (("--strict", "--side-calls", "probe,title"), False, ["probe", "title"], volatile.DEFAULT),
        (("--volatile", "none"), True, ["title", "summary", "probe"], frozenset()),
    ],
)
def test_switches_choose_how_requests_are_read(
    options: tuple[str, ...], answers_for_any: bool, side_calls: list[str], rules: frozenset[str]
) -> None:
    needed = ("--listen", "127.0.0.1:9", "--engine", "unix:/tmp/none.sock", "--state-dir", "/tmp/none", "--no-keys")
    settings = kvasir_gateway.__main__._settings((*needed, *options))
    reading = kvasir_gateway.__main__._tolerance(settings, bytes(32)).reading(None)
    assert (reading.any_model, reading.is_strict) == (answers_for_any, "--strict" in options)
    assert [rule.name for rule in reading.side_rules] == side_calls
    assert reading.rules.names == rules


def test_openais_list_has_the_context_of_a_loaded_model() -> None:
    found = [pb.Model(name="a", context_tokens=4096), pb.Model(name="b", state=pb.MODEL_STATE_NOT_LOADED)]
    loaded, other = listed(found, Aliases(), for_anthropic=False)["data"]
    assert (loaded["max_model_len"], loaded["context_length"]) == (4096, 4096)
    assert "max_model_len" not in other
