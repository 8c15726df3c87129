"""A turn says, tells and remembers with drafts what it does without, whatever is tried: right, wrong or half right."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from kvasir.errors import Cancelled
from llguidance import LLParserLimits
from mlx_lm.models import llama

from inference_svc.engine.api import Hot, Tokens
from inference_svc.engine.drafting import drafter
from inference_svc.formats import grammars
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.formats.grammar_trial_process import Trial
from inference_svc.kv.batch import decode_batch, decoded_layer
from inference_svc.kv.batch.drafted_attention import attend_by_slot
from inference_svc.kv.model_hooks import attention_hook
from tests.inference.engine.drafts.many_drafts import KINDS, reported
from tests.inference.engine.drafts.planted_drafts import Told, Tries, every_draft, wrong_at
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.made_models.sampling import first_and_in_turn

TRIES: dict[str, Tries] = {
    "half right": wrong_at(3),
    "right": lambda rest, _: rest,
    "wrong": wrong_at(1),
    "one": lambda rest, _: rest[:1],
}

BRACKET, BRACE, BRACE_QUOTE = 61, 93, 452  # tokens of kvasir-tiny that begin a list, and an object
LENGTHS = (5, 250, 300, 511, 20, 100)


@pytest.mark.batch_as_alone
@pytest.mark.parametrize("tries", first_and_in_turn(list(TRIES), seconds=3))
def test_drafts_change_neither_reply_nor_memory(driver: Driver, told: type[Told], tries: str) -> None:
    """Rows of all kinds in one batch, over a block's border too: nobody's draft is another's."""
    prompts = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
    turns = list(zip(prompts, KINDS, strict=True))
    plain_keys, keys = [driver.key() for _ in turns], [driver.key() for _ in turns]
    plain = [
        driver.submit(prompt, key=key, max_tokens=24, most_drafts=0, **kind)
        for key, (prompt, kind) in zip(plain_keys, turns, strict=True)
    ]
    for listener in plain:
        listener.end()
    told.replies = {prompt: driver.reply(each.end()) for prompt, each in zip(prompts, plain, strict=True)}
    told.tries = staticmethod(TRIES[tries])
    tried = [
        driver.submit(prompt, key=key, max_tokens=24, **kind) for key, (prompt, kind) in zip(keys, turns, strict=True)
    ]
    ends = [listener.end() for listener in tried]
    assert [reported(listener) for listener in tried] == [reported(listener) for listener in plain]
    assert [driver.files(key) for key in keys] == [driver.files(key) for key in plain_keys]
    assert all(end.drafted_tokens for end in ends)
    accepted = [end.accepted_draft_tokens for end in ends]
    assert not any(accepted) if tries == "wrong" else all(accepted)


@pytest.fixture
def too_complex_behind_a_brace(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A turn whose reply stays in its format, which cannot be followed behind a token that the format allows."""
    monkeypatch.setattr(grammars, "limits", lambda: LLParserLimits(verbose_errors=False))
    monkeypatch.setattr(grammars, "begin_replies", lambda matcher, clock: Trial())
    objects = [{"type": "object", "properties": {f"k{number}": {"type": "string"}}} for number in range(200)]
    text = json.dumps({"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, *objects]}})
    biases = ((BRACKET, 100.0), (BRACE, -100.0), (BRACE_QUOTE, -100.0))
    return {"max_tokens": 12, "constraint": Constraint(ConstraintKind.JSON_SCHEMA, text), "logit_bias": biases}


def test_a_draft_that_a_format_cannot_follow_ends_no_turn(
    driver: Driver, told: type[Told], too_complex_behind_a_brace: dict[str, Any]
) -> None:
    """Neither its own nor its neighbour's: the draft is too complex, and the reply is not."""
    how, prompt, beside = too_complex_behind_a_brace, tokens_of(30, 1), tokens_of(40, 2)
    plain = [driver.turn(prompt, most_drafts=0, **how), driver.turn(beside, most_drafts=0, max_tokens=40)]
    told.replies = {prompt: (BRACE,) * 12, beside: driver.reply(plain[1])}
    both = [driver.submit(prompt, **how), driver.submit(beside, max_tokens=40)]
    assert [each.end().text for each in both] == [each.text for each in plain]
    assert plain[0].text.startswith("[")


def test_right_drafts_behind_one_that_a_format_cannot_follow_leave_the_reply_in_its_format(
    driver: Driver, told: type[Told], too_complex_behind_a_brace: dict[str, Any]
) -> None:
    """From then on no draft is followed: what is drawn behind a right one was drawn without the format."""
    how, prompt, wrong = too_complex_behind_a_brace, tokens_of(30, 1), list[int]()
    plain = driver.turn(prompt, most_drafts=0, **how)
    told.replies = {prompt: driver.reply(plain)}

    def tries(rest: tuple[int, ...], known: int) -> tuple[int, ...]:
        if known != len(prompt) + 1:
            return rest
        wrong.append(known)
        return (BRACE, *rest[1:])

    told.tries = staticmethod(tries)
    assert driver.reply(driver.turn(prompt, **how)) == driver.reply(plain)
    assert wrong


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
@pytest.mark.parametrize("ending", ["stop", "token", "limit"])
def test_a_reply_that_ends_among_right_drafts_ends_where_it_would(
    driver: Driver, told: type[Told], ending: str
) -> None:
    """Drafts behind the end were computed, and are nobody's: the next turn goes on as after a plain one."""
    prompt = tokens_of(300, 7)
    whole = driver.turn(prompt, max_tokens=24, most_drafts=0, key=driver.key())
    reply = driver.reply(whole)
    how: dict[str, Any] = {
        "stop": {"stop": (whole.text[9:11],)},
        "token": {"stop_token_ids": (reply[9],)},
        "limit": {"max_tokens": 10},
    }[ending]
    how = {"max_tokens": 24, **how}
    plain_key, key = driver.key(), driver.key()
    plain = driver.submit(prompt, key=plain_key, most_drafts=0, **how)
    plain.end()
    told.replies = {prompt: reply}
    tried = driver.submit(prompt, key=key, **how)
    assert 0 < tried.end().accepted_draft_tokens < tried.end().completion_tokens, "those behind the end are no reply's"
    assert ending != "limit" or tried.end().drafted_tokens < 10  # rows behind it have no room
    assert reported(tried) == reported(plain)
    assert driver.files(key) == driver.files(plain_key)
    text = tuple(tried.end().state.token_ids)
    told.replies = {}
    nexts = [
        driver.turn((*text, *tokens_of(9, 8)), Hot(len(text)), key=each, most_drafts=0) for each in (key, plain_key)
    ]
    assert driver.reply(nexts[0]) == driver.reply(nexts[1])


@pytest.mark.batch_as_alone
@pytest.mark.parametrize("place", [3, 4, 8])
def test_a_cancel_among_drafts_keeps_the_reply_so_far(driver: Driver, told: type[Told], place: int) -> None:
    prompt, key, plain_key = tokens_of(200, 3), driver.key(), driver.key()
    reply = driver.reply(driver.turn(prompt, max_tokens=24, most_drafts=0, key=driver.key()))
    told.replies, told.tries = {prompt: reply}, staticmethod(wrong_at(4))
    listener = Listener().cancel_at(Tokens, place)
    said = driver.reply(driver.submit(prompt, key=key, listener=listener, keep_partial=True, max_tokens=24).end())
    assert said == reply[: len(said)]
    driver.turn(prompt, max_tokens=len(said), most_drafts=0, key=plain_key)
    assert driver.files(key) == driver.files(plain_key)


@pytest.mark.cpu_only("a GPU attends over pages")
@pytest.mark.parametrize("model", ["calls the hook", "calls MLX itself", "changes values first"])
def test_rows_of_a_turn_share_its_keys_and_values_where_the_model_lets_them(
    driver: Driver, told: type[Told], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Else each row reads a copy of its own, and the reply is the same."""
    shared: list[list[int]] = []

    def attend(queries: Any, keys: Any, values: Any, counts: list[int], *how: Any) -> Any:
        shared.append(counts)
        return attend_by_slot(queries, keys, values, counts, *how)

    monkeypatch.setattr(decoded_layer, "attend_by_slot", attend)
    others = {
        "calls MLX itself": attention_hook._upstream,
        "changes values first": lambda q, k, v, *args, **how: attention_hook.attention(q, k, v + 0, *args, **how),
    }
    if model in others:
        monkeypatch.setattr(llama, "scaled_dot_product_attention", others[model])
    prompt = tokens_of(70, 2)
    plain = driver.reply(driver.turn(prompt, most_drafts=0))
    told.replies = {prompt: plain}
    assert driver.reply(tried := driver.turn(prompt)) == plain
    assert tried.accepted_draft_tokens
    assert any(max(counts) > 1 for counts in shared) == (model == "calls the hook")


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_models_that_cannot_go_back_try_nothing(family: Callable[[str], Driver], name: str) -> None:
    """A window's page has lost what a wrong draft's row took the place of; a state has seen the draft."""
    driver = family(name)
    assert driver.turn(tokens_of(8) * 20, max_tokens=8).drafted_tokens == 0


def test_a_text_that_repeats_itself_is_tried_and_right(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no reply planted: the turn's own past says what may come."""
    monkeypatch.setattr(drafter.DraftCosts, "lengths", every_draft)
    how: dict[str, Any] = {"max_tokens": 60, "constraint": Constraint(ConstraintKind.REGEX, "(abcdefgh-){40}")}
    tried, plain = (driver.turn(tokens_of(30), most_drafts=most, **how) for most in (16, 0))
    assert tried.text == plain.text
    assert 20 < tried.accepted_draft_tokens <= tried.drafted_tokens
    assert plain.drafted_tokens == 0


def test_a_turn_that_finds_nothing_looks_now_and_then_and_tries_what_comes_later(
    driver: Driver, told: type[Told]
) -> None:
    """Its text begins to repeat another behind 70 tokens of the reply."""
    prompt, looks = tokens_of(30, 5), list[int]()
    how: dict[str, Any] = {
        "max_tokens": 96,
        "logit_bias": tuple((each, -100.0) for each in driver.engine.model.stop_token_ids),
    }
    told.replies = {prompt: driver.reply(driver.turn(prompt, most_drafts=0, **how))}

    def later(rest: tuple[int, ...], known: int) -> tuple[int, ...]:
        looks.append(known)
        return rest if known >= 100 else ()

    told.tries = staticmethod(later)
    tried = driver.turn(prompt, **how)
    assert driver.reply(tried) == told.replies[prompt]
    in_vain = [known for known in looks if known < 100]
    assert len(in_vain) < 25
    assert max(after - before for before, after in pairwise(looks) if before < 100) <= 8
    assert tried.accepted_draft_tokens > 12


@pytest.mark.batch_as_alone
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 4, "logprobs": 1}], ids=["greedy", "sampled"])
def test_forced_tokens_are_tried_where_the_past_has_none(driver: Driver, how: dict[str, Any]) -> None:
    """Several tokens in one step, none of them wrong; the reply and its KV are those without."""
    letters = "".join(random.Random(1).choices("bcdfghjklmnpqrstvwxz", k=24))
    how = {"max_tokens": 60, "constraint": Constraint(ConstraintKind.REGEX, f"[0-9]{letters}[aeiou]"), **how}
    plain_key, key = driver.key(), driver.key()
    plain = driver.submit(tokens_of(30), key=plain_key, most_drafts=0, **how)
    plain.end()
    tried = driver.submit(tokens_of(30), key=key, **how)
    tried.end()
    assert reported(tried) == reported(plain)
    assert driver.files(key) == driver.files(plain_key)
    assert letters in tried.end().text
    assert tried.end().accepted_draft_tokens == tried.end().drafted_tokens >= len(letters) // 2


def test_no_draft_is_tried_beside_another_namespace(driver: Driver, told: type[Told]) -> None:
    """Rows of drafts would take its time."""
    prompt = tokens_of(40, 2)
    told.replies = {prompt: driver.reply(driver.turn(prompt, max_tokens=60, most_drafts=0))}
    beside = driver.submit(tokens_of(40, 1), namespace="b", max_tokens=400)
    beside.wait_for(Tokens, 2)
    assert driver.turn(prompt, namespace="a", max_tokens=60).drafted_tokens == 0
    beside.handle.result(60).cancel()
    with pytest.raises(Cancelled):
        beside.end()


@pytest.mark.cpu_only("a GPU attends over pages, of which rows share the reads")
def test_no_draft_is_tried_behind_a_long_text(
    driver: Driver, told: type[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its rows would read all of it."""
    monkeypatch.setattr(decode_batch, "_DRAFTED_VALUES", 2 * 512 * 256)
    prompts = {length: tokens_of(length, length) for length in (100, 600)}
    told.replies = {prompt: driver.reply(driver.turn(prompt, most_drafts=0)) for prompt in prompts.values()}
    drafted = {length: driver.turn(prompt).drafted_tokens for length, prompt in prompts.items()}
    assert drafted[100]
    assert not drafted[600]
