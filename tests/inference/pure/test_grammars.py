"""Reply formats: what a matcher allows, when it lets a reply end, and what becomes of formats made to do harm."""

import asyncio
import json
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvasir.errors import InvalidArgument
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import load as load_tokenizer

from inference_svc import grammars as module
from inference_svc.grammar_trial import GrammarTrial
from inference_svc.grammars import GrammarMatcher, Grammars
from inference_svc.models import kvasir_tiny
from inference_svc.plan import Constraint, ConstraintKind
from inference_svc.reply_formats import ReplyFormats

END, VOCABULARY = 2, 1040  # padded beyond the tokenizer's 1024
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Žilina"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "count"],
    "additionalProperties": False,
}
# What they do, and how long they may: those that only need memory would be taken in the end.
HOSTILE: dict[str, tuple[object, float]] = {
    "time": ({"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(1, 40)]}, 3.0),
}
if sys.platform == "linux":  # elsewhere a process cannot be told how much memory it may take
    remainders = [{"type": "integer", "multipleOf": 997}, {"type": "integer", "multipleOf": 991}]
    HOSTILE["memory"] = ({"type": "integer", "multipleOf": 1_000_003}, 60.0)
    HOSTILE["memory, twice"] = ({"allOf": remainders}, 60.0)
INVALID = (
    ("json_schema", '{"type":'),
    ("json_schema", '{"type": "objekt"}'),
    ("json_schema", "3"),
    ("json_schema", "[" * 60_000),
    ("json_schema", '{"$ref": "http://127.0.0.1:9/schema.json"}'),
    ("json_schema", '{"$ref": "file:///etc/passwd"}'),
    ("json_schema", '{"type": "array", "uniqueItems": true}'),
    ("regex", "(["),
    ("regex", "(" * 16_000),
    ("regex", "(?=a)b"),
    ("regex", r"[^\s\S]"),
)


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(kvasir_tiny.path())


@pytest.fixture
def grammars(tokenizer: Any) -> Grammars:
    return Grammars.of_tokenizer(tokenizer, VOCABULARY, [END])


def allowed(matcher: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def wandered(matcher: GrammarMatcher, tokenizer: Any, seed: int) -> str:
    """A reply of tokens drawn from those that are allowed, to its end."""
    rng, reply = random.Random(seed), []
    while (token := rng.choice(allowed(matcher))) != END:
        matcher.accept(token)
        reply.append(token)
        assert len(reply) < 400
    return str(tokenizer.decode(reply))


@pytest.mark.parametrize("seed", range(10))
def test_any_way_through_a_schema_is_json_that_it_describes(seed: int, grammars: Grammars, tokenizer: Any) -> None:
    value = json.loads(wandered(grammars.matcher(schema(PLACE)), tokenizer, seed))
    assert set(value) == {"place", "count"}
    assert value["place"] in {"Oslo", "Žilina"}
    assert 0 <= value["count"] <= 99


@pytest.mark.parametrize("pattern", [r"[a-f]{3,6}-[0-9]{2}(é|ü)", "yes|no|perhaps", r"([a-z]{1,4} ){2}end\.", "漢?字"])
def test_any_way_through_a_regex_matches_all_of_it(pattern: str, grammars: Grammars, tokenizer: Any) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, wandered(grammars.matcher(regex(pattern)), tokenizer, seed))


def test_an_end_is_allowed_once_the_reply_matches_and_nothing_else_once_it_cannot_go_on(
    grammars: Grammars, tokenizer: Any
) -> None:
    other_end = tokenizer.encode("z", add_special_tokens=False)[0]
    matcher = grammars.matcher(regex("ab?"), [other_end])
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    assert a in allowed(matcher)
    assert not {END, other_end} & set(allowed(matcher))
    matcher.accept(a)
    assert set(allowed(matcher)) == {b, END, other_end}
    matcher.accept(b)
    assert set(allowed(matcher)) == {END, other_end}
    matcher.accept(other_end)


def test_white_space_ends(grammars: Grammars, tokenizer: Any) -> None:
    """A model that is always allowed one more space takes it, until max_tokens."""
    matcher, count = grammars.matcher(schema(PLACE)), 0
    matcher.accept(tokenizer.encode("{", add_special_tokens=False)[0])
    while spaces := [token for token in allowed(matcher) if not tokenizer.decode([token]).strip() and token != END]:
        matcher.accept(spaces[0])
        count += 1
    assert count < 30


def test_a_reply_does_not_advance_another_one(grammars: Grammars, tokenizer: Any) -> None:
    """LESSONS 2: what is compiled once is shared, what was said is not."""
    first, second = (grammars.matcher(regex("abc")) for _ in range(2))
    before = allowed(second)
    first.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert allowed(second) == before == allowed(grammars.matcher(regex("abc")))


def test_the_tokenizer_is_built_once_and_a_format_compiled_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What costs tens of milliseconds is done per model or per format, not per request (LESSONS 26)."""
    built: list[object] = []
    compiled: list[str] = []

    def build() -> Any:
        built.append(None)
        return from_tokenizer(tokenizer._tokenizer, n_vocab=VOCABULARY, eos_token=[END])

    def compile_grammar(kind: str, text: str) -> str:
        compiled.append(text)
        return original(kind, text)

    original = module.grammar_of
    monkeypatch.setattr(module, "grammar_of", compile_grammar)
    grammars = Grammars(build, VOCABULARY, [END])
    assert built == []
    for _ in range(50):
        for pattern in ("a+", "b+"):
            allowed(grammars.matcher(regex(pattern)))
    assert (len(built), compiled) == (1, ["a+", "b+"])


def test_only_the_formats_used_last_are_kept(grammars: Grammars) -> None:
    for number in range(40):
        grammars.compile(regex(f"x{{{number + 1}}}"))
    assert not grammars.knows(regex("x{1}"))
    assert grammars.knows(regex("x{40}"))
    assert allowed(grammars.matcher(regex("x{1}")))


@pytest.mark.parametrize(("kind", "text"), INVALID)
def test_a_format_that_is_none_is_refused_by_name_and_at_once(kind: str, text: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument) as refused:
        grammars.compile(Constraint(ConstraintKind(kind), text))
    assert refused.value.field == kind
    assert len(refused.value.message) < 400


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_format_made_to_take_all_memory_or_time_costs_a_process_not_the_service(
    name: str, loop: asyncio.AbstractEventLoop, grammars: Grammars
) -> None:
    """The next format is compiled as if nothing had been."""

    async def ask() -> None:
        hostile, timeout_s = HOSTILE[name]
        formats = ReplyFormats(GrammarTrial(timeout_s))
        try:
            with pytest.raises(InvalidArgument) as refused:
                await formats.check(schema(hostile), grammars)
            assert (refused.value.field, refused.value.reason) == ("json_schema", "FORMAT_TOO_COMPLEX")
            assert not grammars.knows(schema(hostile))
            await formats.check(schema(PLACE), grammars)
            assert grammars.knows(schema(PLACE))
        finally:
            await formats.close()

    loop.run_until_complete(ask())


def test_the_trial_refuses_what_compiling_refuses(loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> None:
        trial = GrammarTrial()
        for kind, text in INVALID:
            with pytest.raises(InvalidArgument) as refused:
                await trial.check(Constraint(ConstraintKind(kind), text))
            assert (refused.value.field, refused.value.reason) == (kind, "FORMAT_INVALID")
        await trial.close()

    loop.run_until_complete(ask())


def test_a_trial_that_ended_meanwhile_refuses_nobody(loop: asyncio.AbstractEventLoop) -> None:
    async def ask_a_dead_one() -> None:
        trial = GrammarTrial(timeout_s=30)
        await trial.check(Constraint(ConstraintKind.REGEX, "a+"))
        process = trial._process
        assert process is not None
        process.kill()
        await process.wait()
        await trial.check(Constraint(ConstraintKind.REGEX, "b+"))
        await trial.close()

    loop.run_until_complete(ask_a_dead_one())


def test_who_gives_up_waiting_leaves_no_answer_for_the_next(loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> None:
        trial = GrammarTrial(timeout_s=30)
        gone = asyncio.create_task(trial.check(schema(HOSTILE["time"][0])))
        await asyncio.sleep(0.05)
        gone.cancel()
        with pytest.raises(InvalidArgument) as refused:
            await trial.check(regex("(["))
        assert "unclosed character class" in refused.value.message
        await trial.check(regex("a"))
        await trial.close()

    loop.run_until_complete(ask())
