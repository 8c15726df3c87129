"""What stood behind the longest earlier place of a text's last tokens is proposed; how many of it pay is learned."""

from array import array
from collections.abc import Sequence
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from inference_svc.engine.drafting import past_text, texts_beside
from inference_svc.engine.drafting.draft_lengths import DraftCosts, Proposal, Trust
from inference_svc.engine.drafting.past_text import PastText
from inference_svc.engine.drafting.pauses import LONGEST_WAIT, Pauses
from inference_svc.engine.drafting.texts_beside import TextsByNamespace
from inference_svc.text.token_ids import TokenIds

TEXTS = st.lists(st.integers(0, 1), max_size=60)  # which repeat themselves


def equal_before(text: Sequence[int], place: int) -> int:
    """How many tokens up to `place` equal the text's last ones."""
    count = 0
    while count <= place and text[place - count] == text[len(text) - 1 - count]:
        count += 1
    return min(count, 32)


@given(TEXTS, st.integers(0, 60), st.integers(1, 9))
@example([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], 0, 2)  # the newest place is not the longest
@example([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], 14, 2)
def test_the_longest_place_is_found_however_the_text_came(text: list[int], cut: int, most: int) -> None:
    past = PastText(text[:cut])
    past.extend(text)
    tokens, equal = past.next(most)
    counts = [equal_before(text, place) for place in range(len(text) - 1)]
    newest = [place for place, count in enumerate(counts) if count >= 3][-16:]  # so many are compared
    if not newest:
        assert (tokens, equal) == ((), 0)
        return
    assert equal == max(counts[place] for place in newest)
    place = max(place for place in newest if counts[place] == equal)
    growing = list(text)
    for token in tokens:
        assert token == growing[place + 1]
        growing.append(token)
        place += 1
    assert len(tokens) == most


def test_only_the_newest_tokens_of_a_long_text_are_kept() -> None:
    past = PastText([7, 8, 9, 1] + [0] * (past_text._MOST_TOKENS - 1) + [7, 8, 9])
    assert past.next(1) == ((), 0)
    past.extend([7, 8, 9, 1] + [0] * (past_text._MOST_TOKENS - 1) + [7, 8, 9, 2, 7, 8, 9])
    assert past.next(2) == ((2, 7), 3)


def learned(row_s: float, plain_s: float = 1.0) -> DraftCosts:
    costs = DraftCosts()
    for rows in range(1, 40):
        costs.learn(rows, 1.0 + row_s * (rows - 1), is_drafted=True)
        costs.learn(1, plain_s, is_drafted=False)
    return costs


def proposed(**chances: float) -> dict[str, Proposal]:
    return {row: Proposal(16, chance) for row, chance in chances.items()}


def test_drafts_are_as_many_as_pay() -> None:
    assert learned(row_s=0.01).lengths(1, proposed(a=0.9), 64) == {"a": 16}
    few = learned(row_s=0.2).lengths(1, proposed(a=0.7), 64)["a"]
    assert 1 <= few <= 4
    assert learned(row_s=1.0).lengths(1, proposed(a=0.5), 64) == {}
    assert learned(row_s=0.01).lengths(1, {"a": Proposal(3, 0.9), "b": Proposal(0, 0.9)}, 64) == {"a": 3}


PROPOSALS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(Proposal, st.integers(0, 4), st.floats(0.05, 0.95), st.integers(0, 3)),
    min_size=1,
)


@given(PROPOSALS, st.integers(3, 9), st.floats(0.01, 2), st.integers(3, 16))
@example({"a": Proposal(1, 0.0625)}, 3, 0.03125, 4)  # a step with a draft was quicker than one without
def test_no_other_lengths_give_more_tokens_a_second(
    proposals: dict[str, Proposal], rows: int, row_s: float, most_rows: int
) -> None:
    """A budget of rows over all turns: all ways to give it out are tried."""
    costs = learned(row_s)

    def rate(counts: tuple[int, ...]) -> float:
        gained = zip(proposals.values(), counts, strict=True)
        tokens = rows + sum(each.chance_at(place) for each, count in gained for place in range(count))
        return tokens / costs._drafted.line.at(rows + sum(counts)) if any(counts) else rows / costs._plain.line.at(rows)

    ways = product(*(range(each.most + 1) for each in proposals.values()))
    best = max(rate(counts) for counts in ways if rows + sum(counts) <= most_rows or not any(counts))
    lengths = costs.lengths(rows, proposals, most_rows)
    assert sum(lengths.values()) <= max(0, most_rows - rows)
    assert rate(tuple(lengths.get(row, 0) for row in proposals)) >= best * (1 - 1e-6)


def test_forced_tokens_are_tried_first_and_all_of_them() -> None:
    lengths = learned(row_s=0.1).lengths(2, {"a": Proposal(9, 0.9), "b": Proposal(16, 0.1, sure=12)}, 15)
    assert lengths == {"b": 12, "a": 1}


def test_no_step_has_too_many_before_its_costs_are_known_and_where_drafts_are_tried_again() -> None:
    proposals = {"c": Proposal(0, 0.9), "a": Proposal(16, 0.9), "b": Proposal(16, 0.5)}
    lengths = DraftCosts().lengths(3, proposals, 20)
    assert lengths["a"] > lengths["b"] >= 1
    assert sum(lengths.values()) <= 17
    dear = learned(row_s=3.0)
    tried = [dear.lengths(2, proposals, 4) for _ in range(20)]
    assert [each for each in tried if each] == [{"a": 2}]


def test_three_slow_steps_with_drafts_do_not_end_them() -> None:
    """A busy machine: what many steps without drafts took says more."""
    costs = DraftCosts()
    for _ in range(20):
        costs.learn(1, 1.0, is_drafted=False)
    for _ in range(3):
        costs.learn(17, 20.0, is_drafted=True)
    assert costs.lengths(1, proposed(a=0.9), 64)["a"] > 8
    for _ in range(9):
        costs.learn(17, 20.0, is_drafted=True)
    assert costs.lengths(1, proposed(a=0.9), 64) == {}


def test_drafts_that_make_a_device_wait_are_not_tried() -> None:
    """A plain step that is read behind the next takes half the time here: two tokens of three are no gain."""
    assert learned(row_s=0.01, plain_s=0.5).lengths(1, {"a": Proposal(4, 0.5)}, 64) == {}


def test_costs_that_were_high_for_a_while_are_forgotten() -> None:
    """The machine was busy while drafts were tried, and is not now."""
    costs = learned(row_s=0.05)
    for rows in range(1, 25):
        costs.learn(rows, 40.0, is_drafted=True)
    tried = []
    for _ in range(4 * 13):
        if lengths := costs.lengths(1, proposed(a=0.9), 64):
            costs.learn(1 + lengths["a"], 1.0 + 0.05 * lengths["a"], is_drafted=True)
        tried.append(lengths.get("a", 0))
    assert max(tried[:13]) == 4
    assert min(tried[-9:]) > 4


def drafted_of(costs: DraftCosts, steps: int, row_s: float) -> int:
    """In how many of so many steps of eight rows more than a few drafts are tried."""
    many = 0
    for _ in range(steps):
        count = sum(costs.lengths(8, proposed(**dict.fromkeys("abcdefgh", 0.9)), 64).values())
        costs.learn(8 + count, 1.0 + row_s * count, is_drafted=count > 0)
        many += count > 4
    return many


def test_eight_steps_that_compiled_end_drafts_for_a_moment_only() -> None:
    costs = DraftCosts()
    for _ in range(24):
        costs.learn(8, 1.0, is_drafted=False)
    for _ in range(8):
        costs.learn(64, 30.0, is_drafted=True)
    assert drafted_of(costs, 96, row_s=0.01) > 50


def test_steps_that_all_had_the_same_rows_end_no_drafts() -> None:
    """A line through one point: without a usual slope of that size, fewer rows would seem to cost next to nothing."""
    costs = DraftCosts()
    assert drafted_of(costs, 300, row_s=0.01) > 280


def test_drafts_that_never_pay_are_tried_in_full_less_and_less_often() -> None:
    costs = DraftCosts()
    for _ in range(24):
        costs.learn(8, 1.0, is_drafted=False)
    at_first = drafted_of(costs, 200, row_s=3.0)
    drafted_of(costs, 600, row_s=3.0)
    assert at_first > 1.5 * drafted_of(costs, 200, row_s=3.0)


def test_trust_follows_right_drafts_and_forgives() -> None:
    trust = Trust()
    at_first = trust.chance(5)
    for _ in range(5):
        trust.learn(5, 4, 0)
    distrusted = trust.chance(5)
    assert distrusted < at_first / 2 + 0.1
    assert trust.chance(30) > at_first - 0.1  # longer matches are another matter
    for _ in range(200):
        trust.forgive(5)
    assert trust.chance(5) > distrusted
    for _ in range(20):
        trust.learn(5, 4, 4)
    assert trust.chance(5) > 0.9


def test_steps_that_compiled_are_forgotten_and_drafts_that_do_not_pay_tried_now_and_then() -> None:
    costs = learned(row_s=0.01)
    for _ in range(5):
        costs.learn(8, 90.0, is_drafted=True)
    assert costs.lengths(1, proposed(a=0.9), 64) == {"a": 16}
    dear = learned(row_s=3.0)
    tried = [dear.lengths(1, proposed(a=0.5), 64) for _ in range(26)]
    assert [each for each in tried if each] == [{"a": 4}, {"a": 4}]
    assert dear.lengths(1, {}, 64) == {}


@given(st.lists(st.booleans(), max_size=120), st.integers(0, 99))
@example([False] * 120, 0)
@example([False] * 40 + [True] + [False] * 40, 3)
def test_a_turn_that_finds_nothing_looks_less_often_and_never_waits_long(are_right: list[bool], clock: int) -> None:
    """Whatever looks found: at each token at first, and behind right drafts; once in eight tokens at least."""
    pauses, began, looks, misses = Pauses(), clock, 0, 0
    for is_right in are_right:
        looks += 1
        if is_right:
            pauses.found()
            misses, clock = 0, clock + 1
            continue
        wait = pauses.missed(clock)
        assert 1 <= wait <= LONGEST_WAIT
        assert misses >= 4 or wait == 1
        assert misses < 12 or (clock + wait) % LONGEST_WAIT == 0, "all turns look in the same steps"
        misses, clock = misses + 1, clock + wait
    if not any(are_right):
        assert looks <= 13 + (clock - began) / LONGEST_WAIT


def test_texts_beside_are_one_by_one_and_known_while_a_turn_needs_them() -> None:
    """A draft ends where its text ends, and only the newest tokens of the newest texts count."""
    texts = {"a": [TokenIds((1, 2, 3, 4)), TokenIds((9, 2, 3, 5, 6))], "b": [TokenIds((1, 2, 3, 7))]}
    by_namespace = TextsByNamespace(lambda namespace: texts[namespace])
    beside = by_namespace.beside("a")
    assert beside.next(array("I", (1, 2, 3)), 4) == ((4,), 3)
    assert beside.next(array("I", (8, 9, 2, 3)), 4) == ((5, 6), 3)
    assert beside.next(array("I", (3, 9, 2)), 4) == ((), 0)
    assert beside.next(array("I", (2, 3)), 4) == ((), 0)
    assert by_namespace.beside("b").next(array("I", (1, 2, 3)), 4) == ((7,), 3)
    assert by_namespace.beside(None).next(array("I", (1, 2, 3)), 4) == ((), 0)
    assert by_namespace.beside("a") is beside
    texts["a"].append(TokenIds((1, 2, 3, 8)))
    assert by_namespace.beside("a").next(array("I", (1, 2, 3)), 4) == ((8,), 3)
    texts["a"] += [TokenIds((1, 2, 3, 0))] + [TokenIds([0] * 20)] * texts_beside._MOST_TEXTS
    assert by_namespace.beside("a").next(array("I", (1, 2, 3)), 4) == ((), 0)
    texts["a"].append(TokenIds([1, 2, 3, *[0] * texts_beside._MOST_TOKENS]))
    assert by_namespace.beside("a").next(array("I", (1, 2, 3)), 4) == ((), 0)
    assert not by_namespace._known
