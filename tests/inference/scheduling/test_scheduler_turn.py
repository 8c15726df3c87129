"""What a turn says of itself to the scheduler: its prefix, its cells, and how it catches up after it gave way."""

from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1.identity_pb2 import KvIdentity
from kvasir.formats.block_hash import chain_hash

from inference_svc.engine.api import (
    AgentKey,
    BlocksFull,
    Cold,
    Hot,
    Keeps,
    Pace,
    Priority,
    Restored,
    Reuse,
    SamplingParams,
    TurnPlan,
)
from inference_svc.engine.scheduling.schedulable import Status
from inference_svc.engine.sequence import Sequence
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.token_ids import TokenChars, TokenIds
from inference_svc.text.token_text import TokenText

TEXT = TokenText.of_bytes([b"a", b"b", b"c"].__getitem__)
CELL = 512
MODEL = ModelInfo(
    KvIdentity(),
    name="m",
    tokenizer_digest="",
    template_digest="",
    context_tokens=4096,
    policy_applied_layers=1,
    cell_tokens=CELL,
    compute_type="float32",
    stop_token_ids=(),
)
IDENTITY = MODEL.kv_identity_hash


def turn(tokens: int, reuse: Reuse | None = None, **fields: object) -> Sequence:
    plain = {"sampling": SamplingParams(1000), "reuse": reuse or Cold(), "key": AgentKey("home", "a")}
    plan = TurnPlan(TokenIds((1,) * tokens), TokenChars((1,) * tokens), **(plain | fields))  # type: ignore[arg-type]
    return Sequence(plan, MODEL, TEXT, lambda: 0.0)


def prefill(one: Sequence, *, draws: bool = True) -> list[int]:
    """Every cell of the rest of its prompt; the last one draws, or none does."""
    cells = []
    while one.cells.rest_tokens:
        assert one.draws_after(one.cells.next_tokens) is (draws and one.cells.next_tokens == one.cells.rest_tokens)
        cells.append(one.cells.next_tokens)
        assert one.next_tokens(cells[-1]) == one.token_ids[one.cells.computed : one.cells.computed + cells[-1]].tolist()
        one.prefilled(cells[-1])
    return cells


def test_a_turn_extends_a_hot_memory_only_if_its_plan_does() -> None:
    key = AgentKey("home", "a")
    assert turn(9, Hot(5)).memory_key == key
    assert turn(9, Restored((), TokenIds(), 5)).memory_key is None
    assert turn(9).memory_key is None
    assert [turn(9, reuse).reusable_tokens for reuse in (Hot(5), Hot(9), Restored((), TokenIds(), 6), Cold())] == [
        5,
        8,
        6,
        0,
    ]
    paced = turn(9, pace=Pace(Priority.BACKGROUND, 0.2))
    assert (paced.priority, paced.longest_gap_s) == (Priority.BACKGROUND, 0.2)


def test_a_turn_that_began_holds_no_files_but_still_knows_what_it_reused() -> None:
    one = turn(9, Restored((b"x" * 100,), TokenIds((1,) * 9), 6))
    one.began(6, 0)
    assert one.plan.reuse == Restored((), TokenIds((1,) * 9), 6)
    assert (one.reusable_tokens, one.memory_key) == (6, None)


def test_a_turn_that_was_preempted_extends_no_hot_memory_any_more() -> None:
    one = turn(9, Hot(5), can_be_preempted=True)
    one.began(5, 0)
    assert one.can_be_preempted
    one.preempted(())
    assert one.memory_key is None
    one.ask_for_files()
    assert one.status is Status.RESTORING
    one.resumed(5)
    assert one.status is Status.PREFILLING
    assert not turn(9, Hot(5), can_be_preempted=True, keeps=Keeps.PARTIAL).can_be_preempted
    assert not turn(9, Hot(5)).can_be_preempted


def test_a_prompts_chain_says_what_its_files_will_say_and_nothing_without_a_namespace() -> None:
    first = chain_hash(IDENTITY, "", [1] * 256)
    assert turn(600, namespace="home").chain == (first, chain_hash(IDENTITY, first, [1] * 256))
    assert turn(600).chain == ()


@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 8))
def test_what_will_be_shareable_is_what_is_in_the_end(tokens: int, cached: int, shareable_blocks: int) -> None:
    """Known while the prompt is computed: siblings wait for it."""
    one = turn(tokens)
    one.began(min(cached, tokens - 1), shareable_blocks * 256)
    foretold = one.cells.final_shareable
    while one.cells.rest_tokens:
        assert one.cells.final_shareable == foretold
        one.prefilled(one.cells.next_tokens)
    assert one.cells.shareable == one.cells.final_shareable == foretold


@given(st.integers(300, 2000), st.sampled_from([0, 256, 300]))
def test_cells_that_are_cut_within_a_block_share_what_whole_ones_do(tokens: int, cached: int) -> None:
    """Beside decoding, where cells are longer than blocks. A memory's half block is still no part of the grid."""
    one, whole = turn(tokens), turn(tokens)
    for each in (one, whole):
        each.began(min(cached, tokens - 1), cached)
    while one.cells.rest_tokens:
        assert one.cells.final_shareable == whole.cells.final_shareable
        one.prefilled(min(128, one.cells.next_tokens))
        assert one.cells.shareable == (min(one.cells.computed, one.cells.final_shareable) // 256 * 256)
    prefill(whole)
    assert one.cells.shareable == whole.cells.shareable == (tokens // 256 * 256 if cached % 256 == 0 else 256)


@given(st.integers(300, 2000), st.integers(0, 12), st.booleans())
def test_a_turn_that_was_preempted_within_a_block_shares_its_later_blocks_all_the_same(
    tokens: int, cuts: int, is_lost: bool
) -> None:
    one = turn(tokens)
    one.began(0, 0)
    for _ in range(cuts):
        if one.cells.rest_tokens:
            one.prefilled(min(128, one.cells.next_tokens))
    one.preempted(())
    one.resumed(one.cells.computed // CELL * CELL if is_lost else one.cells.computed)
    assert one.cells.final_shareable == tokens // 256 * 256
    prefill(one)
    assert one.cells.shareable == tokens // 256 * 256


def test_the_cell_that_ends_the_prompt_draws_the_first_token_and_no_other_does() -> None:
    one = turn(CELL + 10)
    one.began(0, 0)
    assert (one.cells.rest_tokens, one.cells.next_tokens, one.cells.cached) == (CELL + 10, CELL, 0)
    assert not one.draws_after(CELL)
    one.prefilled(CELL)
    assert (one.cells.rest_tokens, one.cells.next_tokens, one.draws_after(10)) == (10, 10, True)


@given(st.integers(1, 1500), st.integers(1, 600), st.booleans())
def test_a_turn_that_gave_way_computes_what_it_had_as_it_did_before(prompt: int, generated: int, is_lost: bool) -> None:
    """The prompt in its cells, the reply token by token; nothing is drawn twice, and no block is told twice."""
    one = turn(prompt)
    one.began(0, 0)
    cells = prefill(one)
    one.accept(2)
    for index in range(generated):
        assert one.cells.computed == len(one.token_ids) - 1
        one.decoded()
        one.accept(index % 3)
    computed, shareable, tokens = one.cells.computed, one.cells.shareable, one.token_ids[:]
    told = [event.count for event in one.take_events() if isinstance(event, BlocksFull)]
    one.resumed(0 if is_lost else computed)
    if is_lost:
        assert one.cells.rest_tokens == prompt
        assert prefill(one, draws=False) == cells
        while one.cells.computed < len(tokens) - 1:
            one.decoded()
    assert (one.cells.computed, one.cells.shareable, one.token_ids) == (computed, shareable, tokens)
    again = [event.count for event in one.take_events() if isinstance(event, BlocksFull)]
    assert again == []
    assert told == sorted(set(told))
