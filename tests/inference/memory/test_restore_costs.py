"""Restored or computed: the cheaper way by what was measured, and a steady answer while nothing changes."""

import asyncio
import json
import math
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import assume, given
from hypothesis import strategies as st

from inference_svc.memory.costs_file import CostsFile
from inference_svc.memory.outcomes import MissReason
from inference_svc.memory.restore_costs import FORGOTTEN_S, LEAST_BYTES, MARGIN, LearnedCost, RestoreCosts

TOKEN_BYTES = 36_000  # of Llama 3.1 8B under Q4
LENGTHS = st.integers(512, 131_072)


class World:
    """A store and a device whose speeds are known, and what an engine learns of them."""

    def __init__(self, bytes_per_s: float, overhead_s: float, token_s: float, depth_s: float) -> None:
        self.now = 1_000.0
        self.bytes_per_s, self.overhead_s, self.token_s, self.depth_s = bytes_per_s, overhead_s, token_s, depth_s
        self.costs = RestoreCosts(lambda: self.now)

    def restore_s(self, tokens: int) -> float:
        return self.overhead_s + tokens * TOKEN_BYTES / self.bytes_per_s

    def compute_s(self, start: int, stop: int) -> float:
        return (stop - start) * self.token_s + self.depth_s * (stop**2 - start**2) / 2

    def computes(self, tokens: int) -> bool:
        return self.costs.reason_to_compute("store", tokens, tokens * TOKEN_BYTES) is not None

    def turn(self, tokens: int) -> bool:
        """A turn that restores or computes so many tokens, and is measured. Returns whether it computes."""
        if computes := self.computes(tokens):
            self.costs.computed(0, tokens, self.compute_s(0, tokens))
        else:
            self.costs.restored("store", tokens * TOKEN_BYTES, self.restore_s(tokens))
        return computes


WORLDS = st.builds(World, st.floats(1e6, 3e10), st.floats(0.0, 0.5), st.floats(1e-5, 1e-2), st.floats(0.0, 1e-7))


def h200(bytes_per_s: float = 1e10) -> World:
    """Computes 2,048 tokens in 75 ms and 32,768 in 1.5 s."""
    return World(bytes_per_s, 0.02, 3.5e-5, 6.5e-10)


@given(WORLDS, LENGTHS)
def test_before_both_are_known_everything_is_restored(world: World, tokens: int) -> None:
    assert not world.computes(tokens)
    world.costs.restored("store", tokens * TOKEN_BYTES, 100.0)
    assert not world.computes(tokens)
    world.costs.computed(0, 100, 1e-6)  # too few to tell anything
    assert not world.computes(tokens)
    world.costs.computed(0, 8_192, 1e-6)
    assert world.computes(tokens) is (tokens * TOKEN_BYTES >= LEAST_BYTES)
    assert world.costs.reason_to_compute("another store", tokens, tokens * TOKEN_BYTES) is None


@given(WORLDS, st.lists(LENGTHS, max_size=4), st.lists(LENGTHS, max_size=4), st.floats(0, 2 * FORGOTTEN_S), LENGTHS)
def test_a_restarted_engine_chooses_as_the_one_before_it_would(
    world: World, restored: list[int], computed: list[int], away_s: float, tokens: int
) -> None:
    for each in restored:
        world.costs.restored("store", each * TOKEN_BYTES, world.restore_s(each))
        world.now += 1
    for each in computed:
        world.costs.computed(0, each, world.compute_s(0, each))
    restarted = RestoreCosts(lambda: world.now)  # its clock stands where the other's stood, and begins there
    restarted.begin_with(json.loads(json.dumps(world.costs.kept())), away_s)
    asked = "store", tokens, tokens * TOKEN_BYTES
    found = restarted.reason_to_compute(*asked)
    world.now += away_s
    assert found == world.costs.reason_to_compute(*asked)


def test_of_agents_that_come_at_once_after_a_restart_none_waits_for_a_slow_link() -> None:
    slow = h200(1.25e8)
    slow.turn(8_192)
    slow.costs.computed(0, 8_192, slow.compute_s(0, 8_192))
    kept, slow.costs = slow.costs.kept(), RestoreCosts(lambda: slow.now)
    assert not slow.computes(2_048)
    slow.costs.begin_with(kept, 9.0)
    assert [slow.computes(2_048) for _ in range(64)] == [True] * 64
    fast = h200()
    fast.turn(8_192)
    fast.costs.computed(0, 8_192, fast.compute_s(0, 8_192))
    kept, fast.costs = fast.costs.kept(), RestoreCosts(lambda: fast.now)
    fast.costs.begin_with(kept, 9.0)
    assert not fast.computes(2_048)


READS = st.lists(st.tuples(st.booleans(), LENGTHS), max_size=8)


@given(WORLDS, st.floats(0.1, 100), READS, st.lists(LENGTHS, max_size=4), LENGTHS, st.booleans())
def test_the_prices_of_a_disk_and_of_the_page_cache_are_learned_apart(
    world: World, slower: float, reads: list[tuple[bool, int]], computed: list[int], tokens: int, from_disk: bool
) -> None:
    alone = RestoreCosts(lambda: world.now)
    for costs in (world.costs, alone):
        for each in computed:
            costs.computed(0, each, world.compute_s(0, each))
    for disk, each in reads:
        seconds = world.restore_s(each) * (slower if disk else 1.0)
        world.costs.restored("store", each * TOKEN_BYTES, seconds, from_disk=disk)
        if disk is from_disk:
            alone.restored("store", each * TOKEN_BYTES, seconds)
    expected = alone.reason_to_compute("store", tokens, tokens * TOKEN_BYTES)
    assert world.costs.reason_to_compute("store", tokens, tokens * TOKEN_BYTES, from_disk=from_disk) == expected
    restarted = RestoreCosts(lambda: world.now)
    restarted.begin_with(json.loads(json.dumps(world.costs.kept())), 0.0)
    assert restarted.reason_to_compute("store", tokens, tokens * TOKEN_BYTES, from_disk=from_disk) == expected


def test_after_a_slow_disk_files_of_the_page_cache_are_restored_all_the_same() -> None:
    world = h200()
    world.costs.computed(0, 2_048, world.compute_s(0, 2_048))
    size_bytes = 2_048 * TOKEN_BYTES
    world.costs.restored("store", size_bytes, 0.03)
    world.costs.restored("store", size_bytes, 0.15, from_disk=True)
    assert not world.computes(2_048)
    assert world.costs.reason_to_compute("store", 2_048, size_bytes, from_disk=True) is not None


GOOD: dict[str, Any] = {"computing": [1, 2.0, 3, 4, 5], "restoring": {"ab": [[1, 2, 3, 4, 5], 9.0]}}


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {},
        {**GOOD, "computing": [1, 2, 3, 4]},
        {**GOOD, "computing": [1, 2, 3, 4, "5"]},
        {**GOOD, "computing": [1, 2, 3, 4, -5]},
        {**GOOD, "computing": [1, 2, 3, 4, math.nan]},
        {**GOOD, "computing": [1, 2, 3, 4, 10**400]},
        {**GOOD, "restoring": [1]},
        {**GOOD, "restoring": {"ab": [1, 2, 3, 4, 5]}},
        {**GOOD, "restoring": {"ab": [[1, 2, 3, 4, 5], -1]}},
        {**GOOD, "restoring": {"ab": [[1, 2, 3, 4, math.inf], 9]}},
    ],
)
def test_costs_that_no_engine_kept_are_not_believed(damaged: Any) -> None:
    costs = RestoreCosts(lambda: 1_000.0)
    costs.begin_with(GOOD, 1.0)
    before = costs.kept()
    with pytest.raises(ValueError):
        costs.begin_with(damaged, 1.0)
    assert costs.kept() == before


def test_costs_that_are_learned_while_they_are_kept_leave_a_file_that_is_believed() -> None:
    """Another thread may learn at any moment: here, as the clock is read."""
    times, meanwhile = count(1_000.0), list[Callable[[], None]]()

    def clock() -> float:
        now_s = next(times)
        if meanwhile:
            meanwhile.pop()()
        return now_s

    costs = RestoreCosts(clock)
    costs.computed(0, 8_192, 0.1)
    meanwhile.append(lambda: costs.restored("store", LEAST_BYTES, 9.0))
    kept = costs.kept()
    assert not meanwhile
    RestoreCosts(clock).begin_with(kept, 0.0)
    assert len(costs.kept()["restoring"]) == 1


def test_a_source_that_is_forgotten_is_not_kept() -> None:
    world = h200()
    world.costs.restored("an old one", LEAST_BYTES, 9.0)
    world.now += FORGOTTEN_S / 2
    world.costs.restored("store", LEAST_BYTES, 9.0)
    assert len(world.costs.kept()["restoring"]) == 2
    world.now += FORGOTTEN_S / 2
    assert len(world.costs.kept()["restoring"]) == 1


class Files:
    """Restarts of an engine, in a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir, self.now_ms = state_dir, 5_000_000

    def start(self, conditions: str = "llama cuda") -> CostsFile:
        file = CostsFile(self.state_dir, conditions, RestoreCosts(lambda: 1_000.0), lambda: self.now_ms)
        file.read()
        return file

    @staticmethod
    def knows(file: CostsFile) -> bool:
        return file.costs.reason_to_compute("a namespace", 2_048, 2_048 * TOKEN_BYTES) is not None


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    file = files.start()
    assert not files.knows(file)
    file.costs.restored("a namespace", 2_048 * TOKEN_BYTES, 9.0)
    file.costs.computed(0, 2_048, 0.1)
    file.write()
    return files


def test_costs_are_known_again_on_the_same_device_with_the_same_model_alone(files: Files) -> None:
    assert files.knows(files.start())
    assert not files.knows(files.start("llama cpu"))
    files.now_ms += round(FORGOTTEN_S * 1e3)
    assert not files.knows(files.start()), "the store may be faster by now"


def test_a_file_of_a_later_time_than_now_is_not_believed(files: Files) -> None:
    files.now_ms -= 1
    assert not files.knows(files.start())


_LONG_AGO = f'{{"conditions": "llama cuda", "unix_ms": -{10**400}, "costs": {{}}}}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"conditions": "llama cuda", "unix_ms": "x"}', _LONG_AGO, "[" * 100_000, "null", "\udc80"],
    ids=range(8),
)
def test_a_damaged_file_is_replaced_by_the_next_costs(files: Files, text: str) -> None:
    (path,) = files.state_dir.iterdir()
    path.write_text(text, errors="surrogateescape")
    file = files.start()
    assert not files.knows(file)
    file.costs.restored("a namespace", 2_048 * TOKEN_BYTES, 9.0)
    file.costs.computed(0, 2_048, 0.1)
    file.write()
    assert files.knows(files.start())


def test_a_file_that_cannot_be_written_fails_nothing(files: Files) -> None:
    file = files.start()
    file.costs.computed(0, 2_048, 0.1)
    (path,) = files.state_dir.iterdir()
    path.unlink()
    path.mkdir()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):  # as every five seconds
            file.write()
    assert [line["event"] for line in logs] == ["restore_costs.not_kept"]
    assert not files.knows(files.start())
    path.rmdir()
    file.write()
    assert files.knows(files.start()), "it is tried again"


def test_a_file_shows_no_namespace_and_nobody_else_may_read_it(files: Files) -> None:
    (path,) = files.state_dir.iterdir()
    assert "a namespace" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_an_end_keeps_the_newest_costs(files: Files) -> None:
    file = files.start("another")
    keeping = asyncio.create_task(file.keep())
    await asyncio.sleep(0)
    file.costs.restored("a namespace", 2_048 * TOKEN_BYTES, 9.0)
    file.costs.computed(0, 2_048, 0.1)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert files.knows(files.start("another"))


@given(WORLDS, st.lists(LENGTHS, min_size=2, max_size=6, unique=True), LENGTHS)
def test_the_cheaper_way_is_taken_wherever_it_is_clearly_cheaper(world: World, seen: list[int], tokens: int) -> None:
    for each in seen:
        world.costs.restored("store", each * TOKEN_BYTES, world.restore_s(each))
        world.costs.computed(0, each, world.compute_s(0, each))
    assume(max(seen) > 1.5 * min(seen))
    restore_s, compute_s = world.restore_s(tokens), world.compute_s(0, tokens)
    if compute_s > 1.05 * MARGIN * restore_s:
        assert not world.computes(tokens)
    if compute_s < 0.95 * MARGIN * restore_s and tokens * TOKEN_BYTES >= LEAST_BYTES:
        assert world.computes(tokens)


@given(WORLDS, st.lists(LENGTHS, min_size=1, max_size=4), LENGTHS)
def test_while_nothing_changes_the_choice_for_a_prefix_does_not_either(
    world: World, seen: list[int], tokens: int
) -> None:
    """Each turn is measured and learned from. What was learned of other lengths may be wrong for this one, of each way:
    its first measurement corrects that, so the choice may change twice, and no more.
    """
    for each in seen:
        world.costs.restored("store", each * TOKEN_BYTES, world.restore_s(each))
        world.costs.computed(0, each, world.compute_s(0, each))
    made = [world.turn(tokens) for _ in range(20)]
    changes = sum(one != other for one, other in pairwise(made))
    assert changes <= 2


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e3)), max_size=6), st.data())
def test_more_is_never_expected_to_take_less(samples: list[tuple[float, float, float]], data: st.DataObject) -> None:
    cost = LearnedCost()
    for sample in samples:
        cost.learn(*sample)
    first, second, more = (data.draw(st.floats(0, 1e9)) for _ in range(3))
    small, large = cost.estimate(first, second), cost.estimate(first + more, second + more)
    assert (small is None) == (large is None)
    if small is not None and large is not None:
        assert 0 <= small <= large


def test_an_h200_restores_from_its_disk_and_computes_what_lies_behind_a_slow_link() -> None:
    near, far = h200(), h200(50e6)
    for world in (near, far):
        for tokens in (1_024, 4_096, 8_192):
            world.costs.restored("store", tokens * TOKEN_BYTES, world.restore_s(tokens))
            world.costs.computed(0, tokens, world.compute_s(0, tokens))
    assert [near.computes(tokens) for tokens in (2_048, 8_192, 32_768)] == [False] * 3
    assert [far.computes(tokens) for tokens in (2_048, 8_192, 32_768)] == [True] * 3
    miss = far.costs.reason_to_compute("store", 2_048, 2_048 * TOKEN_BYTES)
    assert miss is not None
    assert miss.reason is MissReason.COMPUTED
    assert miss.detail == "restoring 2048 tokens was expected to take 1495 ms, computing them 73 ms"


@pytest.mark.parametrize(("waited_s", "computes"), [(FORGOTTEN_S - 1, True), (FORGOTTEN_S, False)])
def test_a_store_that_became_faster_is_tried_again(waited_s: float, computes: bool) -> None:
    world = h200(50e6)
    world.costs.computed(0, 8_192, world.compute_s(0, 8_192))
    assert [world.turn(8_192) for _ in range(3)] == [False, True, True]
    world.bytes_per_s = 1e10
    world.now += waited_s
    assert world.turn(8_192) is computes
