"""Prompts held against memories of models with states: back to a point, or to nothing, and what that loses is said."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.block_file import FileBytes
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Cold, Hot, Restored
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.recall import Recollection
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_plan import Prepared
from inference_svc.memory.reuse_planning import Avoid, ComparedPrompt, ReusePlanner
from inference_svc.memory.store.answers import NO_HEAD
from inference_svc.memory.store.patience import Budget
from inference_svc.model.prompting import Tokenized
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.turns.parts import Opened, opened
from tests.made_models.synthetic import MIXED

TEXT = "x" * 700
POINTS = (300, 650, 700)


class Surroundings:
    """A store that has files by their digests, an engine of a model with states, and a tokenizer of characters."""

    is_reachable = True
    clock = staticmethod(time.monotonic)
    model = SimpleNamespace(
        kv_identity=MIXED,
        kv_identity_hash="x",
        tokenizer_digest="t",
        cell_tokens=256,
        has_states=True,
        has_rewind_points=True,
        state_bytes=9,
    )

    def __init__(self) -> None:
        self.connection = self.blobs = self
        self.missing: set[Digest] = set()
        self.asked: list[Digest] = []
        self.has_cached = True  # the page cache has all files
        self.looks = 0  # whether it has them

    async def are_cached(self, digests: Sequence[Digest]) -> bool:
        self.looks += 1
        return self.has_cached

    async def read_blobs(self, digests: Sequence[Digest], budget: object) -> tuple[list[FileBytes], Miss | None]:
        found: list[FileBytes] = []

        async def take(data: FileBytes) -> None:
            found.append(data)

        return found, await self.give_blobs(digests, budget, take)

    async def give_blobs(
        self, digests: Sequence[Digest], budget: object, take: Callable[[FileBytes], Awaitable[None]]
    ) -> Miss | None:
        self.asked += digests
        for digest in digests:
            if digest in self.missing:
                return Miss(MissReason.BLOB_MISSING, "gone")
            await take(digest.hash.encode())
        return None

    async def find_prefix(self, *_: object) -> list[Digest]:
        raise AssertionError("blocks of others have no states")

    async def run(self, namespace: str, work: Any) -> Any:
        return work()

    def ends_whole(self, ids: Sequence[int]) -> bool:
        return True

    def tokenize(self, text: str, _last: int | None = None) -> Tokenized:
        return Tokenized(TokenIds(map(ord, text)), TokenChars((1,) * len(text)))


BLOCKS = [Digest.of(b"block 0"), Digest.of(b"block 1")]
TAIL = Digest.of(b"tail")
STATES = {point: Digest.of(b"state %d" % point) for point in POINTS}


def memory(points: Sequence[int] = POINTS) -> AgentMemory:
    transcript = RememberedText(TEXT, TokenIds(map(ord, TEXT)), TokenChars((1,) * len(TEXT)))
    states = {point: STATES[point] for point in points}
    publication, files = Publication(Standing(NO_HEAD, Stage.STORED)), StoredFiles(list(BLOCKS), TAIL, states=states)
    return AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "t", publication, files, tuple(points))


def planned(
    text: str, source: Source, around: Surroundings, points: Sequence[int] = POINTS, **usable: int | None
) -> Opened:
    parts: Any = around
    planner = ReusePlanner(parts, parts, {"ns": parts}, RestoreCosts(lambda: 0.0))

    async def hold(size_bytes: int) -> None:
        assert size_bytes > 0

    async def plan() -> Prepared:
        recollection = Recollection(memory(points), source, NO_HEAD)
        budget: Any = None
        return await planner.plan(recollection, ComparedPrompt("ns", text), budget, hold, **usable)

    return opened(asyncio.run(plan()))


@pytest.mark.parametrize(
    ("text", "keep", "says"),
    [
        (TEXT + "y" * 300, 700, ""),
        (TEXT[:690] + "y" * 300, 650, "no_state_point"),
        (TEXT[:650] + "y" * 20, 650, ""),
        (TEXT[:649] + "y" * 20, 300, "no_state_point"),
        (TEXT[:299] + "y" * 600, 0, "no_state_point"),
        (TEXT, 650, "no_state_point"),
    ],
    ids=["extended", "in the reply", "from the reply on", "in the prompt", "before all", "the same"],
)
@pytest.mark.parametrize("source", [Source.HOT, Source.WARM])
def test_a_prompt_goes_back_to_the_last_point_that_it_covers(text: str, keep: int, says: str, source: Source) -> None:
    around = Surroundings()
    found = planned(text, source, around)
    assert len(found.tokens.ids) == len(text)
    if not keep:
        assert (found.reuse, found.source) == (Cold(), Source.COLD)
    elif source is Source.HOT:
        assert found.reuse == Hot(keep)
    else:
        state = STATES[keep].hash.encode()
        files = tuple(digest.hash.encode() for digest in (*BLOCKS, TAIL)[: -(-keep // 256)])
        covered = min(256 * len(files), 700)
        assert found.reuse == Restored(files, TokenIds(map(ord, TEXT[:covered])), keep, 0, state)
        assert around.asked.count(STATES[keep]) == 1
    assert len(found.stored_blocks) == keep // 256
    if says and found.match.value != "diverge":
        assert found.miss is not None
        assert found.miss.reason.value == says


def test_a_state_that_cannot_be_had_is_a_miss_and_the_one_before_serves() -> None:
    around = Surroundings()
    around.missing = {STATES[700]}
    found = planned(TEXT + "y", Source.WARM, around)
    assert isinstance(found.reuse, Restored)
    assert (found.reuse.keep_tokens, len(found.reuse.blobs)) == (650, 3)
    assert found.miss is not None
    assert found.miss.reason is MissReason.BLOB_MISSING
    around.missing = set(STATES.values())
    assert planned(TEXT + "y", Source.WARM, around).reuse == Cold()


def test_a_missing_block_takes_what_lies_behind_it_from_the_states_too() -> None:
    """A missing middle block is not skipped (LESSONS 9)."""
    around = Surroundings()
    around.missing = {BLOCKS[1]}
    assert planned(TEXT + "y", Source.WARM, around).reuse == Cold(), "the first point lies behind block 1"
    assert STATES[700] not in around.asked
    around.missing = {TAIL}
    found = planned(TEXT + "y", Source.WARM, around)
    assert isinstance(found.reuse, Restored)
    assert found.reuse.keep_tokens == 300


def test_what_the_engine_refused_is_not_read_again() -> None:
    around = Surroundings()
    found = planned(TEXT + "y", Source.WARM, around, avoid=Avoid(last_rewind_point=699))
    assert isinstance(found.reuse, Restored)
    assert found.reuse.keep_tokens == 650
    assert STATES[700] not in around.asked
    assert planned(TEXT + "y", Source.WARM, Surroundings(), avoid=Avoid(files=1)).reuse == Cold()


def test_a_memory_without_points_is_words_only() -> None:
    assert planned(TEXT + "y", Source.HOT, Surroundings(), points=()).reuse == Cold()


async def test_turns_that_read_files_and_a_state_never_wait_for_each_other() -> None:
    """Each asks for all of its room at once: two that hold some and wait for more would wait for ever."""
    around: Any = Surroundings()
    planner = ReusePlanner(around, around, {"ns": around}, RestoreCosts(lambda: 0.0))
    room = SharedRoom(sum(digest.size_bytes for digest in (*BLOCKS, TAIL)) + 1)

    async def turn() -> None:
        taken = 0

        async def hold(size_bytes: int) -> None:
            nonlocal taken
            await room.wait_for("ns", size_bytes)
            taken += size_bytes

        recollection, budget = Recollection(memory(), Source.WARM, NO_HEAD), Budget(1.0, 1.0, lambda: 0.0)
        found = await planner.plan(recollection, ComparedPrompt("ns", TEXT + "y"), budget, hold)
        assert isinstance(found.kv.take(), Restored)
        assert taken == sum(digest.size_bytes for digest in (*BLOCKS, TAIL, STATES[700]))
        room.give_back("ns", taken)

    async with asyncio.timeout(60):
        await asyncio.gather(turn(), turn())
    assert room.held_units == 0
