"""The eviction policy: what may go, and that it goes in the right order, whatever there is."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cachestore_svc.index.eviction import Candidate, order

LINES = st.lists(
    st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 100)),  # versions, is_pinned, used
    max_size=8,
).map(
    lambda lines: [
        Candidate(line, version, version == count, is_pinned, used)
        for line, (count, is_pinned, used) in enumerate(lines)
        for version in range(1, count + 1)
    ]
)
UNUSED_SINCE = st.integers(0, 101)


@given(LINES, st.booleans(), UNUSED_SINCE)
def test_the_head_of_a_pinned_agent_never_goes(lines: list[Candidate], evict_heads: bool, since: int) -> None:
    assert not [each for each in order(lines, evict_heads, since) if each.is_head and each.is_pinned]


@given(LINES, UNUSED_SINCE)
def test_no_head_goes_unless_it_was_configured(lines: list[Candidate], since: int) -> None:
    assert not [each for each in order(lines, False, since) if each.is_head]


@given(LINES, UNUSED_SINCE)
def test_heads_that_go_were_not_used_since(lines: list[Candidate], since: int) -> None:
    for each in order(lines, True, since):
        assert not each.is_head or each.line_used_unix_ms < since


@given(LINES, st.booleans(), UNUSED_SINCE)
def test_every_old_version_may_go_and_each_once(lines: list[Candidate], evict_heads: bool, since: int) -> None:
    ordered = order(lines, evict_heads, since)
    assert len(set(ordered)) == len(ordered)
    assert {each for each in lines if not each.is_head} <= set(ordered) <= set(lines)


@given(LINES, UNUSED_SINCE)
def test_a_line_goes_oldest_first_and_its_head_last(lines: list[Candidate], since: int) -> None:
    ordered = order(lines, True, since)
    for line in {each.line_id for each in ordered}:
        own = [each.version for each in ordered if each.line_id == line]
        assert own == sorted(own)


@given(LINES, UNUSED_SINCE)
def test_all_old_versions_go_before_any_head_and_unpinned_before_pinned(lines: list[Candidate], since: int) -> None:
    ranks = [(each.is_head, each.is_pinned) for each in order(lines, True, since)]
    assert ranks == sorted(ranks)


@given(LINES, UNUSED_SINCE)
def test_among_equals_the_line_unused_longest_goes_first(lines: list[Candidate], since: int) -> None:
    ordered = order(lines, True, since)
    for first, second in itertools.pairwise(ordered):
        if (first.is_head, first.is_pinned) == (second.is_head, second.is_pinned):
            assert first.line_used_unix_ms <= second.line_used_unix_ms


@given(LINES, st.booleans(), UNUSED_SINCE, st.randoms())
def test_the_order_does_not_depend_on_the_order_of_asking(
    lines: list[Candidate], evict_heads: bool, since: int, chance: object
) -> None:
    shuffled = list(lines)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert order(shuffled, evict_heads, since) == order(lines, evict_heads, since)
