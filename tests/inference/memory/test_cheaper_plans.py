"""Plans of prompts whose KV is stored: read, or computed where that is cheaper and gives the same bits."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.engine.api import Cold, Restored, Started
from inference_svc.memory import reuse_planning
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.recall import Recollection
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_planning import ComparedPrompt, ReusePlanner
from inference_svc.memory.store import reading
from inference_svc.memory.store.answers import NO_HEAD
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.stored_windows import FoundPrefix
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.memory.test_points import Surroundings
from tests.inference.turns.parts import Opened, opened
from tests.made_models.synthetic import SMALL, kv_identity, window_layer

TEXT = "x" * 1_100
BLOB_BYTES = 2 << 20
BLOCKS = [replace(Digest.of(b"block %d" % index), size_bytes=BLOB_BYTES) for index in range(4)]
TAIL = Digest.of(b"tail")


class Plain(Surroundings):
    """Of a model whose layers keep all tokens."""

    model = SimpleNamespace(
        kv_identity=SMALL,
        kv_identity_hash="0" * 64,
        tokenizer_digest="t",
        cell_tokens=256,
        has_states=False,
        has_rewind_points=False,
    )
    found = FoundPrefix()

    async def find_prefix(self, *_: object) -> Any:
        return self.found


def costs(compute_s: float) -> RestoreCosts:
    """Of a store that takes a second for the blocks, beside so many seconds of computing."""
    known = RestoreCosts(lambda: 0.0)
    known.restored("ns", 4 * BLOB_BYTES, 1.0)
    known.computed(0, 1_024, compute_s)
    return known


def plan(around: Plain, known: RestoreCosts, text: str, shareable: int | None, most_held: int = 1 << 30) -> Opened:
    """`shareable`: tokens of the agent's memory that any prefill makes; None: it remembers nothing."""
    publication, files = Publication(Standing(NO_HEAD, Stage.STORED)), StoredFiles(list(BLOCKS), TAIL)
    transcript = RememberedText(TEXT, TokenIds(map(ord, TEXT)), TokenChars((1,) * len(TEXT)))
    memory = AgentMemory(transcript, (), manifest_pb2.Turn(), shareable or 0, "t", publication, files)

    async def hold(size_bytes: int) -> None:
        assert 0 < size_bytes <= most_held

    async def planned() -> Opened:
        parts: Any = around
        recollection = Recollection(memory if shareable is not None else None, Source.WARM, NO_HEAD)
        planner, budget = ReusePlanner(parts, parts, {"ns": parts}, known), Budget(1.0, 1.0, lambda: 0.0)
        found = opened(await planner.plan(recollection, ComparedPrompt("ns", text), budget, hold))
        if isinstance(found.reuse, Restored) and found.reuse.incoming is not None:
            assert found.reuse.incoming.has_ended
            assert found.reuse.incoming.expected == -(-found.reuse.keep_tokens // 256)
        return found

    return asyncio.run(planned())


@pytest.mark.parametrize(("compute_s", "computes"), [(0.7, True), (0.9, False)])
def test_a_common_prefix_is_computed_where_that_is_clearly_cheaper(compute_s: float, computes: bool) -> None:
    around = Plain()
    around.found = FoundPrefix(1_024, tuple(BLOCKS))
    found = plan(around, costs(compute_s), TEXT, None)
    if computes:
        assert (found.reuse, found.source, found.stored_blocks) == (Cold(), Source.COLD, ())
        assert found.miss == Miss(
            MissReason.COMPUTED,
            "restoring 1024 tokens was expected to take 1000 ms, computing them 700 ms",
        )
        assert around.asked == [], "nothing is read in vain"
    else:
        assert isinstance(found.reuse, Restored)
        assert (found.reuse.keep_tokens, found.source, found.miss) == (1_024, Source.SHARED, None)


@pytest.mark.parametrize("has_cached", [True, False])
def test_files_of_a_slow_disk_are_computed_instead_and_those_of_the_page_cache_are_not(has_cached: bool) -> None:
    around, known = Plain(), RestoreCosts(lambda: 0.0)
    around.has_cached = has_cached
    known.computed(0, 1_024, 0.5)
    known.restored("ns", 4 * BLOB_BYTES, 0.1)
    known.restored("ns", 4 * BLOB_BYTES, 1.0, from_disk=True)
    around.found = FoundPrefix(1_024, tuple(BLOCKS))
    found = plan(around, known, TEXT, None)
    assert isinstance(found.reuse, Restored if has_cached else Cold)
    assert around.looks == 1 + has_cached, "one for the choice, and one of what is read"
    unknown = plan(around, RestoreCosts(lambda: 0.0), TEXT + "y", 0)
    assert unknown.reading is not None
    assert unknown.reading.is_from_disk is not has_cached
    assert around.looks == 2 + has_cached, "no price is known: a look would decide nothing"


@pytest.mark.parametrize(("shareable", "computes"), [(1_024, True), (768, False), (0, False)])
def test_rows_that_a_reply_got_token_by_token_are_never_computed_in_cells(shareable: int, computes: bool) -> None:
    """The prompt goes back to the fourth block's end, which may be behind what the first prompt's prefill made."""
    found = plan(Plain(), costs(0.01), TEXT[:1_024] + "y" * 9, shareable)
    assert isinstance(found.reuse, Cold if computes else Restored)
    assert (found.miss is not None and found.miss.reason is MissReason.COMPUTED) is computes


def test_a_file_that_does_not_come_is_the_miss_of_a_turn_that_began_with_those_before_it() -> None:
    around = Plain()
    around.missing = {BLOCKS[2]}
    found = plan(around, RestoreCosts(lambda: 0.0), TEXT + "y", 1_024)
    assert isinstance(found.reuse, Restored)
    assert (found.reuse.keep_tokens, len(found.stored_blocks), found.miss) == (1_100, 4, None)
    begun = found.begun(Started(512))
    assert (begun.miss, begun.stored_blocks) == (Miss(MissReason.BLOB_MISSING, "gone"), tuple(BLOCKS[:2]))


def test_of_another_turns_kv_only_blocks_that_every_prefill_makes_count_as_stored() -> None:
    """Rows of a reply, which this memory got one by one, have other bits in another's prefill."""
    found = plan(Plain(), RestoreCosts(lambda: 0.0), TEXT + "y", 512)
    assert found.begun(Started(1_024)).stored_blocks == tuple(BLOCKS)
    assert found.begun(Started(1_024, is_shared=True)).stored_blocks == tuple(BLOCKS[:2])


@pytest.mark.parametrize(("digest", "is_ours"), [("t", True), ("another", False)])
async def test_token_ids_of_another_tokenizer_are_never_taken_for_this_ones(digest: str, is_ours: bool) -> None:
    parts: Any = Plain()
    parts.vocabulary_size = 1 << 20
    transcript = RememberedText(TEXT, TokenIds([7] * len(TEXT)), TokenChars((1,) * len(TEXT)))
    publication = Publication(Standing(NO_HEAD, Stage.ELSEWHERE))
    known = AgentMemory(transcript, (), manifest_pb2.Turn(), 0, digest, publication)
    recollection = Recollection(known, Source.COLD, NO_HEAD, Miss(MissReason.KV_IDENTITY_DIFFERS, "weights"))

    async def hold(_size_bytes: int) -> None: ...

    planner = ReusePlanner(parts, parts, {}, RestoreCosts(lambda: 0.0))
    budget = Budget(1.0, 1.0, lambda: 0.0)
    found = await planner.plan(recollection, ComparedPrompt("ns", TEXT + "y"), budget, hold)
    assert set(found.tokens.ids[: len(TEXT)]) == ({7} if is_ours else {ord("x")})


def test_without_a_first_file_nothing_is_reused() -> None:
    around = Plain()
    around.missing = {BLOCKS[0]}
    found = plan(around, RestoreCosts(lambda: 0.0), TEXT + "y", 1_024)
    assert (found.reuse, found.reading, found.miss) == (Cold(), None, Miss(MissReason.BLOB_MISSING, "gone"))


async def test_files_are_read_no_further_ahead_of_the_engine_than_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from another thread, which is the engine's."""
    monkeypatch.setattr(reading, "AHEAD_BYTES", 100)  # a file of the double has 64
    around: Any = Plain()
    passed_s = 0.0
    budget = Budget(1.0, 1.0, lambda: passed_s)
    async with asyncio.timeout(20):
        background = reading.BackgroundRead(around, [*BLOCKS, TAIL], budget)
        assert await background.begun()
        incoming, seen = background.incoming, []
        for index in range(5):
            await asyncio.sleep(0.02)
            seen.append(incoming.ready)
            passed_s += 1.0  # while nothing but the engine keeps the reader waiting
            await asyncio.to_thread(incoming.take, index)
        await asyncio.sleep(0.02)
        assert (seen, incoming.has_ended, background.came_bytes) == ([2, 3, 4, 5, 5], True, 5 * 64)
        background.stop()
    assert budget.spent_s == 0.0, "the store is not to blame"


def test_a_large_memory_takes_no_more_room_than_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_planning, "MOST_BYTES", BLOB_BYTES)
    found = plan(Plain(), RestoreCosts(lambda: 0.0), TEXT + "y", 1_024, most_held=BLOB_BYTES)
    assert isinstance(found.reuse, Restored)


@pytest.mark.parametrize(
    "identity", [SMALL, kv_identity("windows alone", [window_layer(512)])], ids=["all tokens", "windows alone"]
)
async def test_an_agent_that_is_asleep_and_was_not_woken_has_no_kv_and_its_miss_has_that_reason(identity: Any) -> None:
    """It fell asleep in an engine with more room. Its prompt here is a beginning of what it remembers."""
    parts: Any = Plain()
    parts.model = SimpleNamespace(**{**vars(Plain.model), "kv_identity": identity, "has_rewind_points": True})
    files = StoredFiles(runs=(), asleep=manifest_pb2.Asleep(wake_ms=1))
    transcript = RememberedText(TEXT, TokenIds(map(ord, TEXT)), TokenChars((1,) * len(TEXT)))
    publication = Publication(Standing(NO_HEAD, Stage.STORED))
    memory = AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "t", publication, files)

    async def hold(_size_bytes: int) -> None:
        pass

    planner = ReusePlanner(parts, parts, {"ns": parts}, RestoreCosts(lambda: 0.0))
    recollection, budget = Recollection(memory, Source.WARM, NO_HEAD), Budget(1.0, 1.0, lambda: 0.0)
    found = opened(await planner.plan(recollection, ComparedPrompt("ns", TEXT[:700]), budget, hold))
    assert (found.reuse, found.source) == (Cold(), Source.COLD)
    assert found.miss is not None
    assert found.miss.reason is MissReason.BLOB_MISSING
    assert "asleep" in found.miss.detail
