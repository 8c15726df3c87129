"""Prompts held against memories of models with windows: what is read of each window, and when it does not reach."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2, manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Cold, Hot, Restored, RestoredWindow, Started
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.outcomes import MissReason, Source
from inference_svc.memory.recall import Recollection
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_plan import Prepared
from inference_svc.memory.reuse_planning import Avoid, ComparedPrompt, ReusePlanner
from inference_svc.memory.store.answers import NO_HEAD, found_prefix
from inference_svc.memory.stored_windows import FoundPrefix, StoredWindow, listed_windows, stored_windows
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.memory.test_points import Surroundings
from tests.inference.turns.parts import Opened, opened
from tests.made_models.synthetic import WINDOWED

TEXT = "x" * 1100
BLOCKS = [Digest.of(b"block %d" % index) for index in range(4)]
TAIL = Digest.of(b"tail")


def window(name: str, *blocks: int) -> StoredWindow:
    """These full blocks, and the tail behind block 3."""
    return StoredWindow({index: Digest.of(f"{name} {index}".encode()) for index in (*blocks, 4)}, 4)


STORED = {300: window("300", 2, 3), 512: window("512", 1, 2, 3)}


class Windowed(Surroundings):
    model = SimpleNamespace(
        kv_identity=WINDOWED,
        kv_identity_hash="0" * 64,
        tokenizer_digest="t",
        cell_tokens=256,
        has_states=False,
        has_rewind_points=True,
    )

    held = 0

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[Digest] = []

    def expect(self, digests: Sequence[Digest], room: SharedRoom) -> None:
        self.expected += digests
        room.take("ns", room.max_units // 8)

    async def find_prefix(self, *_: object) -> Any:
        return FoundPrefix()


def remembered(stored: Mapping[int, StoredWindow]) -> AgentMemory:
    publication, files = Publication(Standing(NO_HEAD, Stage.STORED)), StoredFiles(list(BLOCKS), TAIL, dict(stored))
    transcript = RememberedText(TEXT, TokenIds(map(ord, TEXT)), TokenChars((1,) * len(TEXT)))
    return AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "t", publication, files)


def planned(
    text: str, source: Source, around: Windowed, stored: Mapping[int, StoredWindow] = STORED, **usable: Any
) -> Opened:
    parts: Any = around
    planner = ReusePlanner(parts, parts, {"ns": parts}, RestoreCosts(lambda: 0.0))

    async def hold(size_bytes: int) -> None:
        around.held += size_bytes

    async def plan() -> Prepared:
        recollection, budget = Recollection(remembered(stored), source, NO_HEAD), None
        return await planner.plan(recollection, ComparedPrompt("ns", text), budget, hold, **usable)  # type: ignore[arg-type]

    return opened(asyncio.run(plan()))


def read(name: str, first: int, stop: int) -> tuple[bytes, ...]:
    found = window(name, *range(first, 4))
    return tuple(found.files[block].hash.encode() for block in range(first, stop))


@pytest.mark.parametrize(("keep", "first_300", "first_512"), [(1100, 3, 2), (1050, 2, 2), (1024, 2, 2), (900, 2, 1)])
def test_of_each_window_exactly_what_the_next_token_sees_is_read(keep: int, first_300: int, first_512: int) -> None:
    around = Windowed()
    found = planned(TEXT[:keep] + "y" * 300, Source.WARM, around)
    stop = -(-keep // 256)
    blobs = tuple(digest.hash.encode() for digest in [*BLOCKS, TAIL][:stop])
    windows = (
        RestoredWindow(300, first_300, read("300", first_300, stop)),
        RestoredWindow(512, first_512, read("512", first_512, stop)),
    )
    assert found.reuse == Restored(blobs, TokenIds(map(ord, TEXT[: 256 * stop])), keep, 0, windows=windows)
    assert len(around.asked) == len(blobs) + sum(len(each.blobs) for each in windows)
    assert around.held == sum(digest.size_bytes for digest in around.asked), "room is held for what is read"
    assert {name: stored.full for name, stored in found.stored_windows.items()} == {
        300: {*range(2, keep // 256)},
        512: {*range(1, keep // 256)},
    }


def test_files_are_begun_before_a_plan_unless_it_takes_room_for_many_at_once() -> None:
    around, memory = Windowed(), remembered(STORED)
    parts: Any = around
    planner = ReusePlanner(parts, parts, {"ns": parts}, RestoreCosts(lambda: 0.0))
    windows = [digest for each in STORED.values() for digest in each.files.values()]
    size_bytes = sum(digest.size_bytes for digest in [*BLOCKS, TAIL, *windows])
    for namespace, source in (("ns", Source.HOT), ("ns", Source.COLD), ("another", Source.WARM)):
        planner.expect(namespace, Recollection(memory, source, NO_HEAD), SharedRoom(1 << 30))
    planner.expect("ns", Recollection(memory, Source.WARM, NO_HEAD), SharedRoom(2 * size_bytes - 2))
    assert not around.expected, "its plan would wait for the room of these files"
    room = SharedRoom(2 * size_bytes)
    planner.expect("ns", Recollection(memory, Source.WARM, NO_HEAD), room)
    assert around.expected == [*BLOCKS, TAIL]
    assert room.take_if_fits("ns", size_bytes), "the plan's own"


def test_a_length_that_the_stored_blocks_do_not_cover_is_a_miss_with_its_reason() -> None:
    text = TEXT[:800] + "y" * 300  # behind 800 tokens window 300 sees block 1
    warm = planned(text, Source.WARM, Windowed())
    assert (warm.reuse, warm.source) == (Cold(), Source.COLD)
    assert warm.miss is not None
    # The engine knows by itself how far its pages reach.
    assert planned(text, Source.HOT, Windowed()).reuse == Hot(800)


def test_what_the_store_has_of_a_turn_ends_where_the_engine_truly_began() -> None:
    found = planned(TEXT[:1050] + "y" * 300, Source.HOT, Windowed())
    assert found.reuse == Hot(1050)

    def stored(started: Started) -> tuple[int, dict[int, set[int]]]:
        begun = found.begun(started)
        return len(begun.stored_blocks), {window: {*each.full} for window, each in begun.stored_windows.items()}

    assert stored(Started(1050)) == (4, {300: {2, 3}, 512: {1, 2, 3}})
    assert stored(Started(512)) == (2, {300: set(), 512: {1}})
    # Another agent's rows are prefilled, and this memory's are its replies: nothing of it may be shared.
    assert stored(Started(1280, is_shared=True)) == (0, {300: set(), 512: set()})
    assert [len(replace(found, shareable_tokens=768).begun(Started(1280, is_shared=True)).stored_blocks)] == [3]


def test_the_last_window_file_missing_or_refused_makes_the_turn_cold() -> None:
    around = Windowed()
    around.missing = {STORED[512].files[2]}
    found = planned(TEXT + "y", Source.WARM, around)
    assert found.reuse == Cold()
    assert found.miss is not None
    assert found.miss.reason is MissReason.BLOB_MISSING
    around = Windowed()
    assert planned(TEXT + "y", Source.WARM, around, avoid=Avoid(has_windows=False)).reuse == Cold()
    assert around.asked == []


def test_a_missing_block_leaves_what_the_windows_cover_behind_the_ones_before_it() -> None:
    around = Windowed()
    around.missing = {TAIL}
    found = planned(TEXT + "y", Source.WARM, around)
    assert isinstance(found.reuse, Restored)
    assert (found.reuse.keep_tokens, [each.first_block for each in found.reuse.windows]) == (1024, [2, 2])
    around.missing = {BLOCKS[3]}
    assert planned(TEXT + "y", Source.WARM, around).reuse == Cold()


def test_a_missing_window_file_leaves_the_border_before_it() -> None:
    around = Windowed()
    around.missing = {STORED[300].files[4]}
    found = planned(TEXT + "y", Source.WARM, around)
    assert isinstance(found.reuse, Restored)
    assert (found.reuse.keep_tokens, found.reuse.windows[0]) == (1024, RestoredWindow(300, 2, read("300", 2, 4)))
    assert found.miss is not None
    assert found.miss.reason is MissReason.BLOB_MISSING
    most = [*BLOCKS, TAIL, *(STORED[300].files[block] for block in (2, 3)), *(STORED[512].files[b] for b in (2, 3, 4))]
    assert around.held == sum(digest.size_bytes for digest in most), "one length's files are held at a time"


def test_a_prompt_that_differs_within_a_long_reply_goes_on_from_an_earlier_run() -> None:
    stored = {300: window("300", 0, 1, 3), 512: window("512", 0, 1, 2, 3)}
    found = planned(TEXT[:900] + "y" * 300, Source.WARM, Windowed(), stored)
    assert isinstance(found.reuse, Restored)
    assert (found.reuse.keep_tokens, [len(each.blobs) for each in found.reuse.windows]) == (512, [2, 2])


def test_a_manifest_lists_runs_and_gives_them_back() -> None:
    windows = {300: window("300", 0, 1, 3), 512: StoredWindow(dict(enumerate(BLOCKS)))}
    listed = listed_windows(windows)
    assert [(run.window, run.first_block, len(run.blocks), run.HasField("tail")) for run in listed] == [
        (300, 0, 2, False),
        (300, 3, 1, True),
        (512, 0, 4, False),
    ]
    assert stored_windows(listed) == windows


def answer(tokens: int, blocks: int, first: int, count: int, name: int = 300) -> cachestore_pb2.FindPrefixResponse:
    listed = manifest_pb2.WindowBlocks(window=name, first_block=first, blocks=[TAIL.to_proto()] * count)
    return cachestore_pb2.FindPrefixResponse(tokens=tokens, blocks=[TAIL.to_proto()] * blocks, windows=[listed])


def test_an_answer_that_is_no_prefix_of_what_was_asked_is_refused() -> None:
    assert found_prefix(answer(1024, 4, 2, 2), (0, 300), 4).tokens == 1024
    assert found_prefix(answer(0, 0, 0, 0), (0, 300), 4) == FoundPrefix()
    for wrong in (answer(1280, 5, 3, 2), answer(1024, 3, 2, 2), answer(1024, 4, 3, 1), answer(1024, 4, 2, 2, 301)):
        with pytest.raises(ValueError, match="FindPrefix"):
            found_prefix(wrong, (0, 300), 4)
