"""Siblings with one prefix: it is prefilled once, and nobody waits longer for it than the gate allows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.prefix_sharing import prefix_source_of
from inference_svc.engine.scheduling.schedulable import Rules
from tests.inference.scheduling.scheduling_world import BACKGROUND, CELL, Job, World, chain_of, key_of
from tests.made_models.sampling import sampled

blocks = st.lists(st.integers(0, 1), max_size=6)


def sibling(*content: object, rest: int = 9, **fields: object) -> Job:
    """A turn whose prompt is these blocks and `rest` tokens."""
    plan = {"namespace": "home", "chain": chain_of(*content), "reply_tokens": 3}
    return Job(len(content) * CELL + rest, **(plan | fields))  # type: ignore[arg-type]


def cells_computed(world: World) -> int:
    return len(world.prefilled)


def test_siblings_that_come_together_prefill_their_prefix_once() -> None:
    world = World()
    world.submit(*(sibling("a", "b", "c", "d", agent) for agent in range(5)))
    world.run()
    assert cells_computed(world) == 4 + 5 * 2
    assert [job.cells.cached for job in world.ended].count(4 * CELL) == 4


def test_a_sibling_that_comes_late_waits_only_for_what_is_not_computed_yet() -> None:
    world = World()
    first, late = sibling("a", "b", "c", "d"), sibling("a", "b", "x")
    world.arrivals = {3: [late]}
    world.submit(first)
    world.run()
    assert late.begun_s == late.submitted_s
    assert (late.began_from, late.cells.cached) == (first, 2 * CELL)


def test_a_sibling_begins_with_the_hot_memory_of_one_that_is_over() -> None:
    world = World()
    first = sibling("a", "b", "c", key=key_of("first"))
    world.submit(first)
    world.run()
    second = sibling("a", "b", "y", key=key_of("second"))
    world.submit(second)
    world.run()
    assert second.began_from is world.memories.get(key_of("first"))
    assert second.cells.cached == 2 * CELL


def test_who_decodes_already_still_gives_its_prefix_away() -> None:
    world = World()
    decoding = sibling("a", "b", reply_tokens=50)
    world.submit(decoding)
    world.step()
    second = sibling("a", "b")
    world.submit(second)
    world.step()
    assert (second.began_from, second.cells.cached) == (decoding, 2 * CELL)


def test_a_sibling_begins_as_soon_as_what_it_shares_is_computed() -> None:
    """Not when the other's whole prompt is."""
    world = World()
    long, short = sibling(*range(16)), sibling(0, 1)
    world.submit(long, short)
    world.run()
    assert (short.begun_s, short.cells.cached) == (2 * world.cell_s, 2 * CELL)


def test_the_last_prompt_token_is_always_computed() -> None:
    world = World()
    world.submit(sibling("a", "b", rest=0), sibling("a", "b", rest=0))
    world.run()
    assert sorted(job.cells.cached for job in world.ended) == [0, CELL]


def test_nobody_shares_across_namespaces_or_without_one() -> None:
    world = World()
    world.submit(
        sibling("a", "b"),
        sibling("a", "b", namespace="elsewhere"),
        sibling("a", "b", namespace=None),
        sibling("a", "b", namespace=None),
    )
    world.step()
    assert not world.scheduler.waiting, "one of them waits for another"
    world.run()
    assert [job.began_from for job in world.ended] == [None] * 4


def test_one_block_is_waited_for_also_where_cells_are_longer() -> None:
    """A prompt of 1,000 tokens that others share is worth it on every device."""
    world = World(rules=Rules(cell_tokens=2 * CELL))
    late = sibling("a", "x", "y")
    world.submit(sibling("a", "b", "c"), late)
    world.step()
    assert world.scheduler.waiting == [late]


def test_a_turn_whose_own_memory_reaches_as_far_waits_for_nobody() -> None:
    world = World()
    world.submit(sibling("a", "b", "c", "d"))
    warm = sibling("a", "b", "c", "x", reusable_tokens=3 * CELL - 1, key=key_of("a"))
    world.memories.remember(key_of("a"), 3 * CELL)
    world.submit(warm)
    world.step()
    assert warm.begun_s == 0.0
    assert (warm.began_from, warm.cells.cached) == (None, 3 * CELL - 1)


def test_only_rows_on_the_grid_are_given_away() -> None:
    """Who began with a memory that ends inside a cell computes other cells than a cold turn does."""
    world = World()
    world.memories.remember(key_of("off"), 100)
    off_grid = sibling("a", "b", "c", "d", reusable_tokens=100, key=key_of("off"))
    world.submit(off_grid)
    world.step()
    late = sibling("a", "b", "c", "d")
    world.submit(late)
    world.step()
    assert (late.began_from, late.begun_s is not None) == (None, True)


def test_a_sibling_waits_no_longer_than_the_prefix_wait_allows() -> None:
    world = World(rules=Rules(prefix_wait_s=1.0, longest_gap_s=0.0), cell_s=0.4)
    world.submit(Job(1, 1000, namespace="home"), sibling(*range(20)), sibling(*range(20)))
    second = world.scheduler.waiting[-1]
    while second.begun_s is None:
        world.step()
    assert 1.0 <= second.begun_s <= 1.5
    assert second.cells.cached >= 2 * CELL, "what was computed by then is used"


def test_a_sibling_begins_when_the_one_that_it_waits_for_is_cancelled() -> None:
    world = World(rules=Rules(prefix_wait_s=100.0, longest_gap_s=0.0))
    first, second = sibling(*range(20)), sibling(*range(20))
    world.submit(Job(1, 1000, namespace="home"), first, second)  # beside a reply, a cell a step
    for _ in range(3):
        world.step()
    assert second.begun_s is None
    first.is_cancelled = True
    for _ in range(2):
        world.step()
    assert second.begun_s is not None


def test_a_turn_that_comes_from_another_engine_waits_for_no_sibling() -> None:
    """It brings its own KV, and its giver does not wait for long."""
    world = World(rules=Rules(longest_gap_s=0.0))
    taken = sibling(*range(20), preemptions=1)
    world.submit(Job(1, 1000, namespace="home"), sibling(*range(20)))
    world.step()
    world.submit(taken)
    world.step()
    assert taken.begun_s is not None


def test_the_prefix_wait_can_be_off() -> None:
    world = World(rules=Rules(prefix_wait_s=0.0))
    world.submit(sibling("a", "b"), sibling("a", "b"))
    world.step()
    assert not world.scheduler.waiting


def test_background_work_that_an_interactive_sibling_waits_for_is_not_put_off() -> None:
    world = World(rules=Rules(longest_gap_s=0.0, ageing_s=1e9))
    background = sibling(*range(4), priority=BACKGROUND)
    world.submit(Job(1, 1000, namespace="home"), background)
    world.step()
    other, person = Job(8 * CELL, namespace="home"), sibling(*range(4), "mine")
    world.submit(other, person)
    world.run()
    assert (person.began_from, person.cells.cached) == (background, 4 * CELL)
    assert person.cells_s[-1] < other.cells_s[-1]


@given(st.lists(st.tuples(blocks, st.integers(1, 300)), min_size=1, max_size=6), st.data())
@settings(max_examples=sampled(16, of=100), deadline=None)
def test_a_waiting_sibling_always_goes_on(prompts: list[tuple[list[int], int]], data: st.DataObject) -> None:
    """Whichever turn is cancelled, and whenever; and within the prefix wait, if there is room."""
    world = World(rules=Rules(prefix_wait_s=1.0, longest_gap_s=0.0))
    jobs = [sibling(*content, rest=rest) for content, rest in prompts]
    doomed = data.draw(st.dictionaries(st.integers(0, 12), st.sampled_from(jobs), max_size=3))
    world.submit(*jobs)
    for step in range(13):
        if step in doomed:
            doomed[step].is_cancelled = True
        world.step()
    world.run(200)
    for job in jobs:
        assert job.is_cancelled or job.begun_s is not None
        assert job.is_cancelled or job.begun_s - job.submitted_s <= 1.0 + world.cell_s + world.token_s
    whole = [job for job in jobs if not job.is_cancelled]
    if len(whole) == len(jobs):
        distinct = {name for job in jobs for name in job.chain}
        rests = sum(2 for _ in jobs)  # a rest of up to 300 tokens; a prompt's last token is computed by itself
        assert cells_computed(world) <= len(distinct) + rests


@given(
    st.lists(st.tuples(blocks, st.integers(0, 6)), max_size=5),
    blocks,
    st.integers(0, 6 * CELL),
)
@settings(max_examples=sampled(16, of=100), deadline=None)
def test_the_prefix_source_is_the_one_that_has_most(
    sources: list[tuple[list[int], int]], wanted: list[int], own: int
) -> None:
    running = [sibling(*content) for content, _ in sources]
    for each, (content, done) in zip(running, sources, strict=True):
        each.cells.prefilled(min(done, len(content)) * CELL)
    turn = sibling(*wanted, reusable_tokens=min(own, len(wanted) * CELL + 8))
    best = 0
    for other in running:
        same = [mine == its for mine, its in zip(turn.chain, other.chain, strict=False)]
        common = (*same, False).index(False) * CELL
        best = max(best, min(common, other.cells.shareable // CELL * CELL))
    prefix = prefix_source_of(turn, running)
    assert (prefix.shared_tokens if prefix else 0) == (best if best >= turn.reusable_tokens + CELL else 0)
