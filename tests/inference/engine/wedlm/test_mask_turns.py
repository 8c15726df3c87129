"""Turns of a WeDLM model: token for token the reference's, in a batch as alone, and whatever comes between."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import Cancelled, FailedPrecondition

from inference_svc.engine import engine
from inference_svc.engine.api import AgentKey, FinishReason, Hot, Preempted, Priority, Resumed, Tokens
from inference_svc.engine.engine import Engine
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.kv.batch import decode_batch
from inference_svc.kv.policy import Rung, policy_of
from tests.inference.engine.conftest import leaked_pages
from tests.inference.engine.drafts.many_drafts import reported
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.turns.test_preempted_turns import Keeper
from tests.inference.engine.wedlm.reference import Reference
from tests.inference.engine.wedlm.tiny_wedlm import MASK, WEDLM, plain_model, write_wedlm
from tests.made_models.sampling import first_and_in_turn

POLICIES = {"q4": policy_of(Rung.Q4, "float16"), "exact": policy_of(Rung.FP, "float16")}
NEXT = "q4, next token"  # of a model that gives the next token without a mask
IN_ORDER = "q4, next token, left to right"
AGAIN = pytest.mark.cpu_only("a GPU computes what is not brought in other passes, whose sums round otherwise")
END = int(WEDLM["eos_token_id"])
LENGTHS = (5, 20, 250)  # a reply of the last one crosses a block's border
TOKENS = 24
ANY_CASE = Constraint(ConstraintKind.REGEX, "([a-z]{1,5} ){3}end")
CHANGES: tuple[dict[str, Any], ...] = (
    {"model_type": "qwen3"},
    {"wedlm_window_size": 16},
    {"mask_token_id": MASK - 1},
    {"wedlm_next_token": True},
    {"wedlm_left_to_right": True},
)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "logit_bias": ((50, 4.0), (60, -100.0))},
    {"repetition_penalty": 1.4, "repetition_tokens": 8, "frequency_penalty": 0.5},
    {"constraint": ANY_CASE, "logprobs": 1},
    {"most_drafts": 3},
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wedlm(tmp_path_factory.mktemp("wedlm"))


@pytest.fixture(scope="module")
def next_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wedlm(tmp_path_factory.mktemp("next"), wedlm_next_token=True)


@pytest.fixture(scope="module")
def ordered_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wedlm(tmp_path_factory.mktemp("ordered"), wedlm_next_token=True, wedlm_left_to_right=True)


@pytest.fixture(scope="module")
def opened(
    directory: Path, next_directory: Path, ordered_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Driver]]:
    """By the name of a policy, an engine; none leaks a page."""
    drivers: dict[str, Driver] = {}

    def get(name: str) -> Driver:
        if name not in drivers:
            served = {NEXT: next_directory, IN_ORDER: ordered_directory}.get(name, directory)
            policy = POLICIES.get(name, POLICIES["q4"])
            drivers[name] = Driver(open_engine(served, tmp_path_factory.mktemp("cache"), policy))
        return drivers[name]

    yield get
    for driver in drivers.values():
        leaked = driver.engine._thread.post(leaked_pages).result(60)
        driver.engine.close()
        assert leaked == 0


@pytest.fixture
def masks(opened: Callable[[str], Driver]) -> Driver:
    return opened("q4")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return plain_model(directory)


def open_engine(
    directory: Path, cache_dir: Path, policy: identity_pb2.KvPolicy | None = None, budget_bytes: int = 64 << 20
) -> Engine:
    return Engine.open(directory, cache_dir=cache_dir, memory_budget_bytes=budget_bytes, policy=policy, longest_gap_s=0)


def reference(driver: Driver, model: Any, end: int = END) -> Reference:
    window = driver.engine.model.mask_window
    assert window is not None
    return Reference(model, window, driver.engine.model.kv_identity.policy, end)


def drawn(listener: Listener) -> list[int]:
    """All tokens of the reply; a memory has none that ends in the middle of a character."""
    listener.end()
    return [token for event in listener.events if isinstance(event, Tokens) for token in event.ids]


def until_end(reply: list[int]) -> list[int]:
    return reply[: reply.index(END) + 1] if END in reply else reply


@pytest.mark.long(11)
@pytest.mark.parametrize("policy", [*POLICIES, NEXT, IN_ORDER])
@pytest.mark.parametrize("length", LENGTHS)
def test_two_turns_are_those_of_the_reference(
    opened: Callable[[str], Driver], model: Any, policy: str, length: int
) -> None:
    """The second goes on behind rows that passes over windows computed."""
    driver = opened(policy)
    key, text = driver.key(), tuple[int, ...]()
    for turn in range(2):
        expected = reference(driver, model)
        text = (*text, *tokens_of(9 if text else length, length + turn))
        reply = expected.generate(text, TOKENS)
        kept = Hot(len(text) - 9) if turn else None
        listener = driver.submit(text, kept, key=key, max_tokens=TOKENS)
        assert drawn(listener) == until_end(reply)
        ended = listener.end()
        assert (ended.mask_passes.passes, ended.mask_passes.rows) == (expected.passes, expected.processed)
        text = tuple(ended.state.token_ids)


def test_a_checkpoint_as_published_is_served_without_its_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a head of its own, and the names of Python files that are not there. Its type is no reason to warn."""
    code = {"AutoConfig": "configuration_wedlm.WeDLMConfig", "AutoModelForCausalLM": "modeling_wedlm.WeDLMForCausalLM"}
    published = {"architectures": ["WeDLMForCausalLM"], "auto_map": code, "tie_word_embeddings": False}
    directory = write_wedlm(tmp_path / "model", **published)
    driver = Driver(open_engine(directory, tmp_path, POLICIES["q4"]))
    try:
        expected = reference(driver, plain_model(directory)).generate(tokens_of(20, 1), TOKENS)
        assert drawn(driver.submit(tokens_of(20, 1), max_tokens=TOKENS)) == until_end(expected)
    finally:
        driver.engine.close()
    assert "model of type" not in caplog.text


def test_a_reply_takes_fewer_passes_than_tokens(masks: Driver) -> None:
    passes = [masks.turn(tokens_of(30, seed), max_tokens=TOKENS).mask_passes for seed in range(4)]
    assert min(each.passes for each in passes) < TOKENS - 2
    assert all(each.rows > TOKENS for each in passes)


def test_a_window_of_one_is_that_of_the_reference(masks: Driver, model: Any) -> None:
    prompt = tokens_of(20, 3)
    reply = reference(masks, model).generate(prompt, TOKENS, size=1)
    listener = masks.submit(prompt, max_tokens=TOKENS, most_drafts=0)
    assert drawn(listener) == until_end(reply)
    assert listener.end().mask_passes.passes == listener.end().completion_tokens


def test_the_next_token_takes_no_mask_and_is_that_of_decoding_token_by_token(
    opened: Callable[[str], Driver], model: Any
) -> None:
    """One row a token behind the first, and the replies of mlx-lm's model alone; also where a draw depends on the last
    token."""
    driver, prompt = opened(NEXT), tokens_of(20, 3)
    listener = driver.submit(prompt, max_tokens=TOKENS, most_drafts=0)
    plain = reference(driver, model)
    reply, text = list[int](), list(prompt)
    for _ in range(TOKENS):
        plain.extend(text)
        assert plain.following is not None
        text = [int(plain.following[0, :MASK].argmax().item())]
        reply += text
    assert drawn(listener) == until_end(reply)
    in_order = driver.turn(prompt, max_tokens=TOKENS, constraint=ANY_CASE)
    for ended in (listener.end(), in_order):
        assert ended.mask_passes.rows == ended.mask_passes.passes == ended.completion_tokens - 1
    usual = driver.turn(prompt, max_tokens=TOKENS).mask_passes
    assert usual.passes < TOKENS - 2


@pytest.mark.long(3)
@pytest.mark.parametrize("policy", ["q4", NEXT, IN_ORDER])
def test_nothing_is_computed_behind_a_kept_token_that_ends_the_reply(
    opened: Callable[[str], Driver], model: Any, policy: str
) -> None:
    """Each token that ends a reply is one that windows draw, before a gap and behind one."""
    driver, prompt = opened(policy), tokens_of(20, 4)
    for end in {*reference(driver, model).generate(prompt, TOKENS)[4:]} - {END}:
        expected = reference(driver, model, end)
        reply = expected.generate(prompt, TOKENS)
        listener = driver.submit(prompt, max_tokens=TOKENS, stop_token_ids=(end,))
        assert drawn(listener) == reply
        passes = listener.end().mask_passes
        assert (passes.passes, passes.rows) == (expected.passes, expected.processed)


@pytest.mark.cpu_only("a GPU's sums depend on how many rows a pass has: --batch-invariant refuses such a model")
@pytest.mark.parametrize("policy", first_and_in_turn([NEXT, "q4", IN_ORDER], seconds=3))
def test_turns_of_all_kinds_are_in_a_batch_what_they_are_alone(opened: Callable[[str], Driver], policy: str) -> None:
    masks = opened(policy)
    prompts = [tokens_of(length, seed) for seed, length in enumerate((5, 250, 30, 511, 20, 100))]
    turns = list(zip(prompts, KINDS, strict=True))

    def submitted(prompt: Sequence[int], how: dict[str, Any]) -> tuple[AgentKey, Listener]:
        key = masks.key()
        return key, masks.submit(prompt, key=key, max_tokens=TOKENS, **how)

    def found(key: AgentKey, listener: Listener) -> object:
        passes = listener.end().mask_passes
        return reported(listener), passes, masks.files(key)

    alone = [found(*submitted(*turn)) for turn in turns]
    together = [submitted(*turn) for turn in turns]
    assert [found(*each) for each in together] == alone


@pytest.mark.long(1)
def test_settings_that_depend_on_the_last_token_fill_one_mask_a_pass(masks: Driver) -> None:
    for how in ({"constraint": ANY_CASE}, {"repetition_penalty": 1.5}, {"presence_penalty": 0.5}):
        ended = masks.turn(tokens_of(20, 4), max_tokens=TOKENS, **how)
        assert ended.mask_passes.passes == ended.completion_tokens
    assert masks.turn(tokens_of(20, 4), max_tokens=60, constraint=ANY_CASE).text.endswith("end")
    banned = masks.turn(tokens_of(20, 4), max_tokens=TOKENS)
    biases = tuple((token, -100.0) for token in {*masks.reply(banned)})
    assert not {*masks.reply(masks.turn(tokens_of(20, 4), max_tokens=TOKENS, logit_bias=biases))} & dict(biases).keys()


@pytest.mark.parametrize("policy", ["q4", NEXT])
def test_the_mask_is_in_no_reply_however_likely_it_is(opened: Callable[[str], Driver], policy: str) -> None:
    driver = opened(policy)
    reply = drawn(driver.submit(tokens_of(20, 6), max_tokens=TOKENS, logit_bias=((MASK, 100.0),)))
    assert len(reply) == TOKENS
    assert MASK not in reply


@pytest.mark.long(3)
def test_a_sampled_reply_depends_on_its_seed_alone(masks: Driver) -> None:
    def reply(seed: int) -> tuple[int, ...]:
        return masks.reply(masks.turn(tokens_of(20, 6), max_tokens=TOKENS, temperature=1.0, seed=seed, key=masks.key()))

    assert reply(1) == reply(1) != reply(2)
    assert MASK not in {*reply(3), *reply(4), *reply(5)}


@pytest.mark.long(3)
@pytest.mark.parametrize("ending", ["stop", "token", "limit"])
def test_a_reply_ends_within_the_tokens_of_a_pass(masks: Driver, model: Any, ending: str) -> None:
    """Tokens that were committed together with the last one are nobody's: the next turn goes on as the reference."""
    prompt = tokens_of(30, 5)
    listener = masks.submit(prompt, max_tokens=TOKENS, key=masks.key())
    whole, reply = listener.end(), drawn(listener)
    at = next(place for place in range(5, TOKENS) if reply[place] not in reply[:place])
    how: dict[str, Any] = {
        "stop": {"stop": (whole.text[at : at + 2],)},
        "token": {"stop_token_ids": (reply[at],)},
        "limit": {"max_tokens": at + 1},
    }[ending]
    key, computed = masks.key(), [masks.engine.computed_tokens]
    ending_turn = masks.submit(prompt, key=key, **{"max_tokens": TOKENS, **how})
    ended = ending_turn.end()
    computed.append(masks.engine.computed_tokens)
    forgotten = masks.turn(prompt, **{"max_tokens": TOKENS, **how})
    computed.append(masks.engine.computed_tokens)
    assert computed[1] - computed[0] > computed[2] - computed[1], "the last token got no row of a pass"
    assert ended.mask_passes == forgotten.mask_passes, "the passes of the reply, and none for its memory"
    if ending == "token":
        assert drawn(ending_turn) == reference(masks, model, reply[at]).generate(prompt, TOKENS)
    assert ended.completion_tokens < TOKENS
    text, more = tuple(ended.state.token_ids), tokens_of(9, 8)
    expected = reference(masks, model)
    expected.extend(text)
    assert drawn(masks.submit((*text, *more), Hot(len(text)), key=key)) == until_end(expected.generate(more, 16))


@pytest.mark.long(3)
def test_a_memory_goes_on_restored_forked_and_in_another_process_as_one_that_never_left(
    masks: Driver, directory: Path, tmp_path: Path
) -> None:
    prompt, more = tokens_of(250, 9), tokens_of(9, 10)
    key = masks.key()
    text = tuple(masks.turn(prompt, key=key, max_tokens=TOKENS).state.token_ids)
    restored, fork = masks.restored(key), masks.fork(key)
    never_left = masks.turn((*text, *more), Hot(len(text)), key=key, max_tokens=TOKENS)
    back = masks.key()
    again = [
        masks.turn((*text, *more), restored, key=back, max_tokens=TOKENS),
        masks.turn((*text, *more), Hot(len(text)), key=fork, max_tokens=TOKENS),
    ]
    assert [masks.reply(each) for each in again] == [masks.reply(never_left)] * 2
    assert masks.files(key) == masks.files(back) == masks.files(fork)
    # An engine that ends in mid-window leaves what it remembered before; another one does the turn again.
    ending = Driver(open_engine(directory, tmp_path))
    cut = Listener()
    ending.submit((*text, *more), restored, key=ending.key(), listener=cut, max_tokens=TOKENS)
    cut.wait_for(Tokens, 2)
    ending.engine.close()
    other = Driver(open_engine(directory, tmp_path))
    try:
        ended = other.turn((*text, *more), restored, max_tokens=TOKENS)
    finally:
        other.engine.close()
    assert masks.reply(ended) == masks.reply(never_left)


@pytest.mark.parametrize("place", [1, 4])
def test_a_cancel_in_mid_window_keeps_the_committed_tokens_alone(masks: Driver, place: int) -> None:
    prompt, key = tokens_of(40, 11), masks.key()
    whole = masks.reply(masks.turn(prompt, max_tokens=TOKENS, key=masks.key()))
    assert len(whole) > 12
    listener = Listener().cancel_at(Tokens, place)
    ended = masks.submit(prompt, key=key, listener=listener, keep_partial=True, max_tokens=TOKENS).end()
    kept = masks.reply(ended)
    assert ended.finish_reason is FinishReason.CANCELLED
    assert place <= len(kept) < TOKENS
    assert kept == whole[: len(kept)]
    with pytest.raises(Cancelled):
        masks.submit(prompt, listener=Listener().cancel_at(Tokens, place), max_tokens=TOKENS).end()


@pytest.mark.long(4)
@pytest.mark.parametrize(
    ("brought", "decoding"),
    [
        ("all", ""),
        pytest.param("nothing", "", marks=AGAIN),
        pytest.param("nothing", NEXT, marks=AGAIN),
        ("all", IN_ORDER),
    ],
)
def test_a_turn_that_was_preempted_in_mid_window_goes_on_to_the_bit(
    directory: Path, next_directory: Path, ordered_directory: Path, tmp_path: Path, brought: str, decoding: str
) -> None:
    directory = {NEXT: next_directory, IN_ORDER: ordered_directory}.get(decoding, directory)
    unit = open_engine(directory, tmp_path, budget_bytes=1 << 20)
    budget_bytes = 800 * unit.model.kv_bytes_per_token
    unit.close()
    driver = Driver(open_engine(directory, tmp_path, budget_bytes=budget_bytes))
    prompt, settings = tokens_of(300, 12), {"max_tokens": 48, "temperature": 0.8, "seed": 3, "logprobs": 1}
    try:
        key, other = driver.key(), driver.key()
        undisturbed = Keeper()
        driver.submit(prompt, key=key, listener=undisturbed, **settings).end()
        files = driver.files(key)
        assert driver.engine.memories.drop(key).result(60)
        keeper = Keeper(lambda kept: kept if brought == "all" else ())
        people: list[Listener] = []
        keeper.at(Tokens, 5, lambda: people.append(driver.submit(tokens_of(400, 13), max_tokens=2)))
        how: dict[str, Any] = {"priority": Priority.BACKGROUND, "can_be_preempted": True}
        driver.submit(prompt, key=other, listener=keeper, **settings, **how).end()
        assert [each.end().completion_tokens for each in people] == [2]
        assert keeper.count(Preempted) == 1
        assert (keeper.one(Resumed).lost_tokens >= 300) == (brought == "nothing")
        assert reported(keeper) == reported(undisturbed)
        assert driver.files(other) == files
    finally:
        driver.engine.close()


@pytest.mark.long(3)
def test_rows_that_are_decoded_on_read_are_those_of_the_copies(
    masks: Driver, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight windows have more rows than one pass may have, so that some turns have none in it."""
    prompts = [tokens_of(length, 20 + length) for length in (5, 250, 30, 100, 40, 60, 80, 700)]
    monkeypatch.setattr(engine, "_DECODED_PART", 1 << 40)
    monkeypatch.setattr(decode_batch, "_WINDOW_ROWS", 64)
    on_read = Driver(open_engine(directory, tmp_path, POLICIES["q4"]))
    try:
        found = [
            [drawn(each) for each in [driver.submit(prompt, max_tokens=TOKENS) for prompt in prompts]]
            for driver in (masks, on_read)
        ]
    finally:
        on_read.engine.close()
    assert found[0] == found[1] == [drawn(masks.submit(prompt, max_tokens=TOKENS)) for prompt in prompts]


def test_a_prompt_that_is_there_before_its_turn_changes_nothing(masks: Driver) -> None:
    prompt, key = tokens_of(300, 15), masks.key()
    cold = drawn(masks.submit(prompt, max_tokens=TOKENS))
    masks.turn(prompt, key=key, max_tokens=0)
    hot = masks.submit(prompt, Hot(len(prompt)), key=key, max_tokens=TOKENS)
    assert drawn(hot) == cold
    assert hot.end().cached_tokens == len(prompt) - 1


@pytest.mark.long(2)
def test_more_masks_than_a_window_may_have_are_as_many_as_it_may_have(masks: Driver) -> None:
    prompt = tokens_of(20, 16)
    most, usual = masks.engine.model.mask_window, drawn(masks.submit(prompt, max_tokens=40))
    assert most is not None
    found = [drawn(masks.submit(prompt, max_tokens=40, most_drafts=ahead)) for ahead in (64, 31, most.size - 1)]
    assert found[0] == found[1]
    assert found[2] == usual


def test_a_decoding_turn_is_not_handed_over(masks: Driver) -> None:
    """Its window would stay behind. The turn goes on here."""
    held: list[object] = []
    listener = Listener()
    listener.at(Tokens, 2, lambda: held.append(listener.handle.result(60).hold()))
    expected = masks.turn(tokens_of(20, 14), max_tokens=TOKENS)
    ended = masks.submit(tokens_of(20, 14), listener=listener, max_tokens=TOKENS).end()
    assert masks.reply(ended) == masks.reply(expected)
    assert [each.result(60) for each in held] == [None]
    assert not listener.handle.result(60).can_be_held


def test_the_kv_identity_includes_the_decoding(masks: Driver, tmp_path: Path) -> None:
    """Of the same weights as another type, and of another window: neither takes the other's memories."""
    names = {masks.engine.model.kv_identity_hash}
    for number, change in enumerate(CHANGES):
        other = open_engine(write_wedlm(tmp_path / str(number), **change), tmp_path, POLICIES["q4"])
        names.add(other.model.kv_identity_hash)
        assert (other.model.mask_window is None) == ("model_type" in change)
        other.close()
    assert len(names) == 1 + len(CHANGES)


@pytest.mark.parametrize(("field", "value"), [("mask_token_id", None), ("qk_norm", False), ("wedlm_window_size", 64)])
def test_a_model_that_cannot_be_served_is_refused_by_its_field(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(FailedPrecondition, match=field) as refused:
        open_engine(write_wedlm(tmp_path / "model", **{field: value}), tmp_path)
    assert refused.value.reason == "MODEL_NOT_LOADABLE"
    assert WEDLM[field] != value
