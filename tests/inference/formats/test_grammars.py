"""Reply formats: what a matcher allows, when it lets a reply end, and what becomes of formats made to do harm."""

import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvasir.errors import InvalidArgument, ResourceExhausted, Unavailable
from llguidance import LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import load as load_tokenizer

from inference_svc.formats import grammar_trial
from inference_svc.formats import grammars as module
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.formats.grammar_trial import GrammarTrial, too_complex
from inference_svc.formats.grammar_trial_process import Trial, try_format
from inference_svc.formats.grammars import GrammarMatcher, Grammars
from inference_svc.formats.reply_formats import ReplyFormats
from inference_svc.model import kvasir_tiny

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
    ("json_schema", "true"),
    ("json_schema", "[" * 60_000),
    ("json_schema", '{"$ref": "http://127.0.0.1:9/schema.json"}'),
    ("json_schema", '{"$ref": "file:///etc/passwd"}'),
    ("json_schema", '{"type": "array", "uniqueItems": true}'),
    ("json_schema", '{"$ref": "#"}'),
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
    value = json.loads(wandered(grammars.matcher("ns", schema(PLACE)), tokenizer, seed))
    assert set(value) == {"place", "count"}
    assert value["place"] in {"Oslo", "Žilina"}
    assert 0 <= value["count"] <= 99


@pytest.mark.parametrize("pattern", [r"[a-f]{3,6}-[0-9]{2}(é|ü)", "yes|no|perhaps", r"([a-z]{1,4} ){2}end\.", "漢?字"])
def test_any_way_through_a_regex_matches_all_of_it(pattern: str, grammars: Grammars, tokenizer: Any) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, wandered(grammars.matcher("ns", regex(pattern)), tokenizer, seed))


def test_an_end_is_allowed_once_the_reply_matches_and_nothing_else_once_it_cannot_go_on(
    grammars: Grammars, tokenizer: Any
) -> None:
    other_end = tokenizer.encode("z", add_special_tokens=False)[0]
    matcher = grammars.matcher("ns", regex("ab?"), [other_end])
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
    matcher, count = grammars.matcher("ns", schema(PLACE)), 0
    matcher.accept(tokenizer.encode("{", add_special_tokens=False)[0])
    while spaces := [token for token in allowed(matcher) if not tokenizer.decode([token]).strip() and token != END]:
        matcher.accept(spaces[0])
        count += 1
    assert count < 30


def test_a_reply_does_not_advance_another_one(grammars: Grammars, tokenizer: Any) -> None:
    """LESSONS 2: what is compiled once is shared, what was said is not."""
    first, second = (grammars.matcher("ns", regex("abc")) for _ in range(2))
    before = allowed(second)
    first.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert allowed(second) == before == allowed(grammars.matcher("ns", regex("abc")))


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
            allowed(grammars.matcher("ns", regex(pattern)))
    assert (len(built), compiled) == (1, ["a+", "b+"])


def test_only_the_formats_used_last_are_kept(grammars: Grammars) -> None:
    for number in range(40):
        grammars.compile("ns", regex(f"x{{{number + 1}}}"))
    assert not grammars.knows("ns", regex("x{1}"))
    assert grammars.knows("ns", regex("x{40}"))
    assert allowed(grammars.matcher("ns", regex("x{1}")))


def test_a_turn_has_the_format_that_the_cache_dropped_while_it_waited(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled again it would hold up every stream."""
    format_of_turn = grammars.compile("ns", regex("x{1}"))
    for number in range(1, 40):
        grammars.compile("ns", regex(f"x{{{number + 1}}}"))
    assert not grammars.knows("ns", format_of_turn)
    monkeypatch.setattr(module, "grammar_of", lambda *_given: pytest.fail("it is compiled again"))
    assert allowed(grammars.matcher("ns", format_of_turn))


@pytest.mark.parametrize(("kind", "text"), INVALID)
def test_a_format_that_is_none_is_refused_by_name_and_at_once(kind: str, text: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument) as refused:
        grammars.compile("ns", Constraint(ConstraintKind(kind), text))
    assert refused.value.field == kind
    assert len(refused.value.message) < 400


def test_a_namespace_keeps_formats_of_its_own_and_drops_no_others(grammars: Grammars) -> None:
    grammars.compile("other", regex("x{1}"))
    for number in range(40):
        grammars.compile("ns", regex(f"x{{{number + 1}}}"))
    assert grammars.knows("other", regex("x{1}"))
    assert not grammars.knows("other", regex("x{40}"))  # how fast it is answered would tell that another asked


def small_objects(count: int) -> Constraint:
    one = [{"type": "object", "properties": {f"k{number}": {"type": "string"}}} for number in range(count)]
    return schema({"anyOf": one})


def many_properties(count: int) -> Constraint:
    return schema({"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(count)}})


@pytest.mark.long(2)
@pytest.mark.parametrize("constraint", [small_objects(200), many_properties(800), many_properties(2000)], ids=str)
def test_a_plain_schema_with_many_ways_on_is_followed_to_the_end(
    constraint: Constraint, grammars: Grammars, tokenizer: Any, loop: asyncio.AbstractEventLoop
) -> None:
    """Every reply died at its first token: the library's own limit is 2,000 ways on from one place."""
    trial = GrammarTrial(timeout_s=20)
    loop.run_until_complete(trial.check(constraint))
    loop.run_until_complete(trial.close())
    matcher = grammars.matcher("ns", constraint)
    for token in tokenizer.encode('{"k7": "door"}', add_special_tokens=False):
        assert token in allowed(matcher)
        matcher.accept(token)
    assert END in allowed(matcher)


def test_a_matcher_that_gives_up_while_a_reply_runs_reports_that_the_format_is_too_complex(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "limits", lambda: LLParserLimits(verbose_errors=False))
    monkeypatch.setattr(module, "begin_replies", lambda matcher, clock: Trial())
    matcher = grammars.matcher("ns", small_objects(200))
    [brace] = tokenizer.encode("{", add_special_tokens=False)
    assert brace in allowed(matcher)
    with pytest.raises(InvalidArgument) as refused:
        matcher.accept(brace)
    assert (refused.value.field, refused.value.reason) == ("json_schema", "FORMAT_TOO_COMPLEX")


@pytest.mark.long(3)
def test_a_format_whose_every_step_takes_long_is_refused_with_numbers(
    grammars: Grammars, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty kilobytes of one text compile at once, and each token of each reply took 20 ms of everybody's step.

    How long it takes is the machine's to say, so the bound stands to what this one needs: half of it refuses, four
    times as much does not.
    """
    dear, trial = schema({"const": "a" * 60_000}), GrammarTrial(timeout_s=20)
    needed_s = try_format("json_schema", dear.text, LLTokenizer("byte"), time.thread_time).step_s

    def compiled() -> None:
        grammars.compile("ns", dear)

    def asked() -> None:
        loop.run_until_complete(trial.check(dear))

    monkeypatch.setattr(grammar_trial, "MAX_STEP_S", needed_s / 2)
    for asking in (asked, compiled):
        with pytest.raises(InvalidArgument) as refused:
            asking()
        assert refused.value.reason == "FORMAT_TOO_COMPLEX"
        assert int(refused.value.metadata["step_us"]) > int(refused.value.metadata["max_step_us"])
        assert refused.value.metadata["step_us"] in refused.value.message
    monkeypatch.setattr(grammar_trial, "MAX_STEP_S", needed_s * 4)
    for asking in (asked, compiled):
        asking()
    loop.run_until_complete(trial.close())


def test_bytes_tell_what_a_step_costs_with_the_models_own_tokens(tokenizer: Any) -> None:
    """What the trial measures is what a reply will take, within a factor."""
    bytes_, tokens = LLTokenizer("byte"), from_tokenizer(tokenizer._tokenizer, n_vocab=VOCABULARY, eos_token=[END])
    text = json.dumps({"const": "a" * 30_000})
    one, other = (try_format("json_schema", text, each, time.thread_time).step_s for each in (bytes_, tokens))
    assert 0.25 < one / other < 4


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.long(5)
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
                await formats.compiled("ns", schema(hostile), grammars)
            assert (refused.value.field, refused.value.reason) == ("json_schema", "FORMAT_TOO_COMPLEX")
            assert not grammars.knows("ns", schema(hostile))
            await formats.compiled("ns", schema(PLACE), grammars)
            assert grammars.knows("ns", schema(PLACE))
        finally:
            await formats.close()

    loop.run_until_complete(ask())


def test_the_trial_refuses_what_compiling_refuses(loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> None:
        trial = GrammarTrial(timeout_s=60)
        for kind, text in INVALID:
            with pytest.raises(InvalidArgument) as refused:
                await trial.check(Constraint(ConstraintKind(kind), text))
            assert (refused.value.field, refused.value.reason) == (kind, "FORMAT_INVALID")
            assert "NoExtensionBias" not in refused.value.message
        await trial.close()

    loop.run_until_complete(ask())


def test_a_refusal_of_a_large_tool_gives_the_reason_and_not_its_schema(loop: asyncio.AbstractEventLoop) -> None:
    properties = {
        f"p{number}": {"type": "string", "enum": [f"v{each}" for each in range(20)]} for number in range(5000)
    }
    text = f'start: "a" %json {json.dumps({"type": "object", "properties": properties})}'

    async def refused() -> None:
        trial = GrammarTrial(timeout_s=60)
        try:
            with pytest.raises(
                InvalidArgument, match=r"^tool_choice: failed to compile JSON schema: schema too large$"
            ):
                await trial.check(Constraint(ConstraintKind.TOOL_CHOICE, text))

        finally:
            await trial.close()

    loop.run_until_complete(refused())


@pytest.mark.parametrize("start", ["slow", "dead"])
def test_no_format_is_too_complex_because_its_process_starts_slowly(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: str
) -> None:
    script = f"import runpy, time; time.sleep(0.6); runpy.run_path({str(grammar_trial._SCRIPT)!r}, run_name='__main__')"
    (tmp_path / "start.py").write_text(script if start == "slow" else "")
    monkeypatch.setattr(grammar_trial, "_SCRIPT", tmp_path / "start.py")

    async def ask() -> None:
        trial = GrammarTrial(timeout_s=0.5)
        with pytest.raises(Unavailable) if start == "dead" else contextlib.nullcontext():
            await trial.check(regex("a+"))
        await trial.close()

    loop.run_until_complete(ask())


class UsedUp(GrammarTrial):
    """Some formats use up their time, which is short here, as no process could be on a busy machine."""

    async def check(self, constraint: Constraint) -> None:
        if constraint == regex("a"):
            return await super().check(constraint)
        await asyncio.sleep(0.01)
        raise too_complex(constraint)


def test_formats_that_use_up_their_time_hold_up_anothers_by_one_of_them(
    loop: asyncio.AbstractEventLoop, grammars: Grammars
) -> None:
    """Thirty-two of them refused every other namespace's format, for a minute."""

    async def ask() -> None:
        formats, ended = ReplyFormats(UsedUp(timeout_s=30), max_waiting=32), list[str]()

        async def check(namespace: str, constraint: Constraint) -> None:
            try:
                await formats.compiled(namespace, constraint, grammars)
            finally:
                ended.append(namespace)

        asked = [asyncio.create_task(check("a", regex(f"a{{{number}}}"))) for number in range(2, 34)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ended == ["a"] * 8  # of 32 places one namespace gets 24
        await check("b", regex("a"))
        assert ended.count("a") <= 8 + 2
        results = await asyncio.gather(*asked, return_exceptions=True)
        busy = [error for error in results if isinstance(error, ResourceExhausted)]
        assert [(error.reason, error.metadata["waiting"]) for error in busy] == [("FORMATS_BUSY", "24")] * 8
        await formats.close()

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


def test_tokens_that_are_taken_back_leave_no_trace(grammars: Grammars, tokenizer: Any) -> None:
    """Drafts: what is not allowed is not followed, and what was followed is forgotten."""
    matcher = grammars.matcher("ns", regex("abc(d|e)f"))
    a, b, c, e = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abce")
    matcher.accept(a)
    before = allowed(matcher)
    assert [matcher.follow(token) for token in (b, a, END, c, e)] == [True, False, False, True, True]
    assert allowed(matcher) != before
    matcher.go_back(3)
    assert allowed(matcher) == before
    matcher.accept(b)
    assert c in allowed(matcher)


def test_a_draft_that_is_too_complex_leaves_no_trace(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matcher that gave up never comes back: the reply goes on with another, and follows no more drafts."""
    monkeypatch.setattr(module, "limits", lambda: LLParserLimits(verbose_errors=False))
    monkeypatch.setattr(module, "begin_replies", lambda matcher, clock: Trial())
    either = {"anyOf": [{"type": "string"}, json.loads(small_objects(200).text)]}
    matcher = grammars.matcher("ns", schema({"type": "array", "items": either}))
    bracket, brace, quote, letter = (tokenizer.encode(each, add_special_tokens=False)[0] for each in '[{"a')
    matcher.accept(bracket)
    before = allowed(matcher)
    assert brace in before
    assert not matcher.follow(brace)
    matcher.go_back(0)
    assert allowed(matcher) == before
    assert not matcher.follow(quote)
    matcher.accept(quote)
    assert letter in allowed(matcher)


@pytest.mark.parametrize("constraint", [regex("(xylophone|xyz[0-9]){3}end"), schema(PLACE)], ids=str)
def test_each_forced_token_is_the_only_one_allowed(grammars: Grammars, constraint: Constraint) -> None:
    """And all that is: behind it another may come, or the end. To ask for it changes nothing."""
    forced, plain, rng = (*(grammars.matcher("ns", constraint) for _ in range(2)), random.Random(3))
    runs = 0
    while (tokens := allowed(plain)) != [END]:
        run = forced.forced(64)
        assert forced.forced(2) == run[:2]
        assert allowed(forced) == tokens
        for token in run:
            assert allowed(plain) == [token]
            plain.accept(token)
            forced.accept(token)
        ahead = allowed(plain)
        assert len(ahead) > 1 or ahead == [END]
        runs += bool(run)
        if ahead == [END]:
            break
        token = rng.choice([each for each in ahead if each != END])
        plain.accept(token)
        forced.accept(token)
    assert runs > 1


@pytest.mark.parametrize(
    "constraint", [regex("(a|bc|[d-f]{2,5}){3,9}"), schema(PLACE), schema({"type": "array"})], ids=str
)
def test_a_reply_is_allowed_the_same_tokens_behind_drafts_as_without(
    grammars: Grammars, constraint: Constraint
) -> None:
    tried, plain, rng = (*(grammars.matcher("ns", constraint) for _ in range(2)), random.Random(7))
    for _ in range(60):
        tokens = allowed(plain)
        followed = 0
        for _ in range(rng.randint(0, 9)):
            ahead = [token for token in (allowed(tried) if followed else tokens) if token != END]
            if not ahead or not tried.follow(rng.choice(ahead)):
                break
            followed += 1
        tried.go_back(followed)
        assert allowed(tried) == tokens
        if tokens == [END]:
            break
        token = rng.choice([token for token in tokens if token != END])
        for matcher in (tried, plain):
            matcher.accept(token)
