"""A played model's replies show what is in the pages: a wrong page, an old one or one at another place changes them."""

from pathlib import Path
from random import Random

import mlx.core as mx
import pytest
from kvasir.errors import Cancelled, InvalidArgument
from kvasir_bench.played import __main__ as played_engine
from kvasir_bench.played.played_model import PlayedRunner, open_played

from inference_svc.engine.engine import Engine
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.open_model import ModelArguments

SHAPE = "llama-3.1-8b-6l"
WHICH = ModelArguments(cache_dir=Path("unused"))
TOKENS = Random(7).choices(range(1000), k=3 * PAGE_TOKENS + 40)
REPLY_TOKENS = 12


@pytest.fixture(scope="module")
def runner() -> PlayedRunner:
    return open_played(SHAPE, WHICH)[1]


@pytest.fixture
def pool(runner: PlayedRunner) -> KvPool:
    policy = open_played(SHAPE, WHICH)[0].info.kv_identity.policy
    return runner.new_pool(policy, 40 << 20)


def prefilled(runner: PlayedRunner, pool: KvPool, tokens: list[int], cut: int = PAGE_TOKENS) -> SequenceKV:
    kv = SequenceKV(pool)
    for start in range(0, len(tokens), cut):
        runner.prefill(kv, tokens[start : start + cut])
    return kv


def replies(runner: PlayedRunner, pool: KvPool, *sequences: SequenceKV) -> list[list[int]]:
    """What each of the sequences goes on with, in one batch."""
    batch, said = runner.new_batch(pool, 0), [[1] for _ in sequences]
    for kv in sequences:
        batch.join(kv)
    for _ in range(REPLY_TOKENS):
        for tokens, token in zip(
            said, mx.argmax(batch.step([each[-1] for each in said]), axis=-1).tolist(), strict=True
        ):  # type: ignore[arg-type]
            tokens.append(token)
    for kv in sequences:
        batch.leave(kv)
    return said


def test_an_engine_of_it_ends_as_any_other() -> None:
    opened, made = open_played(SHAPE, WHICH)
    made.new_batch(made.new_pool(opened.info.kv_identity.policy, 40 << 20), 0).close()
    made.close()


def test_no_token_is_tried_ahead_as_its_row_would_be_written(runner: PlayedRunner, pool: KvPool) -> None:
    assert runner.new_batch(pool, 0).most_drafted_rows(1) == 0


def test_a_reply_is_the_same_however_the_prompt_was_cut_and_whoever_is_beside_it(
    runner: PlayedRunner, pool: KvPool
) -> None:
    [alone] = replies(runner, pool, prefilled(runner, pool, TOKENS))
    other = prefilled(runner, pool, TOKENS[::-1])
    cut = prefilled(runner, pool, TOKENS, cut=100)
    beside, _ = replies(runner, pool, cut, other)
    assert beside == alone
    assert len(set(alone)) > REPLY_TOKENS // 2


@pytest.mark.parametrize("place", [0, PAGE_TOKENS, len(TOKENS) - 1])
def test_a_reply_depends_on_every_token_of_the_prompt(runner: PlayedRunner, pool: KvPool, place: int) -> None:
    changed = [*TOKENS[:place], TOKENS[place] + 1, *TOKENS[place + 1 :]]
    one, other = replies(runner, pool, prefilled(runner, pool, TOKENS), prefilled(runner, pool, changed))
    assert one != other


def test_two_blocks_that_changed_places_change_the_reply(runner: PlayedRunner, pool: KvPool) -> None:
    right, wrong = prefilled(runner, pool, TOKENS), prefilled(runner, pool, TOKENS)
    pages = wrong.tables[0].pages
    pages[0], pages[1] = pages[1], pages[0]
    one, other = replies(runner, pool, right, wrong)
    assert one[:2] != other[:2]


@pytest.mark.parametrize("block", range(4))
def test_another_agents_block_changes_the_reply(runner: PlayedRunner, pool: KvPool, block: int) -> None:
    right, wrong = prefilled(runner, pool, TOKENS), prefilled(runner, pool, TOKENS)
    foreign = prefilled(runner, pool, TOKENS[::-1])
    pool.copy_pages([foreign.tables[0].pages[block]], [wrong.tables[0].pages[block]])
    one, other = replies(runner, pool, right, wrong)
    assert one[:2] != other[:2]


def test_one_layer_of_a_block_that_was_not_restored_changes_the_reply(runner: PlayedRunner, pool: KvPool) -> None:
    right, wrong = prefilled(runner, pool, TOKENS), prefilled(runner, pool, TOKENS)
    page = wrong.tables[0].pages[1]
    pool.arrays[5][page : page + 1] = mx.zeros((1, pool.arrays[5].shape[1]), dtype=mx.uint16)
    one, other = replies(runner, pool, right, wrong)
    assert one != other


def test_a_cancelled_prefill_changes_nothing(runner: PlayedRunner, pool: KvPool) -> None:
    kv = prefilled(runner, pool, TOKENS)
    used = pool.allocator.used
    with pytest.raises(Cancelled):
        runner.prefill(kv, TOKENS, lambda: True)
    assert (kv.length, pool.allocator.used) == (len(TOKENS), used)


def test_pages_have_the_shapes_own_size_and_an_identity_of_their_own() -> None:
    info = open_played("llama-3.1-8b", WHICH)[0].info
    tiny = open_played(SHAPE, WHICH)[0].info
    assert (info.kv_bytes_per_token, info.layer_count, info.context_tokens) == (36_864, 32, 131_072)
    assert info.kv_identity.weights_digest != tiny.kv_identity.weights_digest


@pytest.mark.parametrize("shape", ["gemma-3-4b", "kvasir-tiny", "nobody-1b"])
def test_a_shape_that_cannot_be_played_is_refused(shape: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        open_played(shape, WHICH)
    assert refused.value.field in ("shape", "geometry")


def test_only_the_program_of_benches_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="neither a directory nor a repository"):
        Engine.open("played-llama-3.1-8b", cache_dir=tmp_path, memory_budget_bytes=1 << 20)
    with pytest.raises(SystemExit):
        played_engine.main(["serve", "--listen", "unix:/nowhere"])
    assert "--shape" in capsys.readouterr().err
