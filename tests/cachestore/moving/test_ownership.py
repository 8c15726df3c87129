"""The owner's state machine alone, played by two or three stores in every order: never two owners of one agent."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.errors import FailedPrecondition
from kvasir.formats.digest import Digest

from cachestore_svc.facts import ownership
from cachestore_svc.facts.ownership import HERE, Ownership, OwnerState
from cachestore_svc.facts.records import Origin, SnapshotVersion
from cachestore_svc.moving.copying import came_from

NAMES = ("laptop", "studio", "attic")


class World:
    """Stores as facts alone, and messages that are delivered at once or never."""

    def __init__(self) -> None:
        self.facts: dict[str, Ownership] = {name: Ownership(OwnerState.MOVED, 0, "laptop") for name in NAMES}
        self.facts["laptop"] = HERE
        self.moves = 0
        self.offers: list[tuple[str, str, str, int]] = []

    def owners(self) -> list[str]:
        return [name for name, known in self.facts.items() if known.is_owned]

    def begin(self, source: str, target: str) -> None:
        self.moves += 1
        move, here = f"move {self.moves}", self.facts[target]
        if here.state in (OwnerState.ARRIVING, OwnerState.MOVING) or here.is_owned:
            return
        offered = self.offer(source, target, move)
        self.facts[target] = ownership.arriving("a", here, source, move, offered.generation, 0, exists=True)

    def half_begin(self, source: str, target: str) -> None:
        self.moves += 1
        self.offer(source, target, f"move {self.moves}")

    def offer(self, source: str, target: str, move: str) -> Ownership:
        there = self.facts[source]
        generation = max(self.facts[target].generation, there.generation)
        if generation > there.generation:
            there = self.facts[source] = ownership.fenced("a", there, target, generation, 0)
        self.facts[source] = ownership.offered("a", there, target, move, generation, 0)
        self.offers.append((source, target, move, generation))
        return self.facts[source]

    def decide(self, target: str, *, hears: bool) -> None:
        known = self.facts[target]
        if known.state is not OwnerState.ARRIVING:
            return
        try:
            self.facts[known.peer] = ownership.handed_over(
                "a", self.facts[known.peer], target, known.move_id, known.generation, 0
            )
        except FailedPrecondition:
            if hears:
                self.facts[target] = ownership.did_not_arrive(known, known.move_id, 0)
            return
        if hears:
            self.facts[target] = ownership.arrived("a", known, known.move_id, 0)

    def undo(self, source: str) -> None:
        known = self.facts[source]
        self.facts[source] = ownership.undone(known, known.peer, known.move_id, 0)

    def offer_again(self) -> None:
        """Each offer by which a move began, a second time: it begins nothing, and changes no move that is under way."""
        for source, target, move, generation in self.offers:
            with contextlib.suppress(FailedPrecondition):
                assert ownership.offered("a", self.facts[source], target, move, generation, 0) == self.facts[source]

    def tell(self, name: str) -> bool:
        known = self.facts[name]
        for peer in known.tells:
            try:
                self.facts[peer] = ownership.fenced("a", self.facts[peer], name, known.generation, 0)
            except FailedPrecondition as error:
                newer = int(error.metadata["generation"])
                self.facts[name] = ownership.yielded("work", self.facts[name], peer, known.generation, newer, 0)
            else:
                self.facts[name] = ownership.told(self.facts[name], peer, known.generation)
        return bool(known.tells)


STEPS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("half"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["decide", "lost answer", "undo", "tell"]), st.sampled_from(NAMES), st.none()),
)


def play(world: World, step: tuple[str, str, str | None]) -> None:
    what, name, other = step
    if name == other:
        return
    try:
        if what in ("begin", "half") and other is not None:
            (world.begin if what == "begin" else world.half_begin)(name, other)
        elif what in ("decide", "lost answer"):
            world.decide(name, hears=what == "decide")
        elif what == "undo":
            world.undo(name)
        elif what == "tell":
            world.tell(name)
    except FailedPrecondition:
        pass


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_moves_in_any_order_leave_one_owner_at_most_and_in_the_end_exactly_one(
    steps: list[tuple[str, str, str | None]],
) -> None:
    world = World()
    for step in steps:
        play(world, step)
        assert len(world.owners()) <= 1, (step, world.facts)
        world.offer_again()
    for name in NAMES:
        world.decide(name, hears=True)
    for name in NAMES:
        world.undo(name)
    assert len(world.owners()) == 1, world.facts


@pytest.mark.long(3)
@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=20), st.sampled_from(NAMES), st.lists(STEPS, max_size=10), st.integers(0, 1 << 32))
def test_after_a_forced_claim_the_stores_agree_once_they_have_heard(
    before: list[tuple[str, str, str | None]], claimant: str, after: list[tuple[str, str, str | None]], chance: int
) -> None:
    world = World()
    for step in before:
        play(world, step)
    world.facts[claimant] = ownership.claimed(world.facts[claimant], chance, 0)
    for step in after:
        play(world, step)
    for _ in range(20):
        for name in NAMES:
            world.tell(name)
            world.decide(name, hears=True)
    for name in NAMES:
        world.undo(name)
    for name in NAMES * 10:
        world.tell(name)
    assert not any(known.tells for known in world.facts.values())
    assert len(world.owners()) <= 1, world.facts


def test_two_claims_at_two_places_yield_to_the_higher_and_never_both_stay() -> None:
    for chances in ((1, 2), (2, 1), (3, 3)):
        world = World()
        world.begin("laptop", "studio")
        world.decide("studio", hears=True)
        for name, chance in zip(("laptop", "studio"), chances, strict=True):
            world.facts[name] = ownership.claimed(world.facts[name], chance, 0)
        world.facts["studio"] = replace(world.facts["studio"], tells=("laptop",))
        while world.tell("laptop") or world.tell("studio"):
            pass
        assert len(world.owners()) == 1, world.facts
        if chances[0] != chances[1]:
            assert world.owners() == ["laptop" if chances[0] > chances[1] else "studio"]


def test_a_claimant_hears_of_a_newer_owner_from_one_that_it_told_before() -> None:
    world = World()
    world.facts = {
        "attic": Ownership(OwnerState.OWNED, 9 * ownership.CLAIM_STEP),
        "laptop": Ownership(OwnerState.MOVED, 1, "attic"),
        "studio": ownership.claimed(Ownership(OwnerState.MOVED, 1, "laptop"), 0, 0),
    }
    for name in ("studio", "laptop", "laptop"):
        world.tell(name)
    assert world.owners() == ["attic"]
    assert not any(known.tells for known in world.facts.values())


def test_a_claim_is_above_all_that_moves_can_reach() -> None:
    known = Ownership(OwnerState.MOVED, 5, "studio")
    claim = ownership.claimed(known, 0, 0)
    assert claim.generation == ownership.CLAIM_STEP
    assert claim.tells == ("studio",)
    highest = ownership.claimed(claim, ownership.MAX_CLAIM_CHANCE - 1, 0)
    assert highest.generation < 3 * ownership.CLAIM_STEP < ownership.MAX_GENERATION


def test_only_the_destination_of_the_move_gets_the_agent() -> None:
    moving = ownership.offered("a", HERE, "studio", "m", 0, 0)
    for peer, move in (("attic", "m"), ("studio", "n")):
        with pytest.raises(FailedPrecondition, match="not under way"):
            ownership.handed_over("a", moving, peer, move, 1, 0)
        assert ownership.undone(moving, peer, move, 0) == moving
    with pytest.raises(FailedPrecondition, match="on its way to studio"):
        ownership.offered("a", moving, "attic", "n", 0, 0)
    later = ownership.offered("a", moving, "studio", "n", 1, 0)
    for move, generation in (("m", 1), ("n", 1), ("m", 2)):
        with pytest.raises(FailedPrecondition):
            ownership.handed_over("a", later, "studio", move, generation, 0)


def test_a_peer_that_was_offered_an_agent_has_a_part_in_it_for_good_once_it_was_given_it() -> None:
    def parts(known: Ownership, *names: str) -> tuple[bool, bool]:
        return known.has_part(names, may_move=True), known.has_part(names, may_move=False)

    asked = ownership.offered("a", HERE, "studio", "m", 0, 0)
    back = ownership.renamed(ownership.undone(asked, "studio", "m", 0), {"studio": "loft"})
    assert (parts(back, "studio"), parts(back, "loft")) == ((False, False), (True, False))
    gone = ownership.handed_over("a", asked, "studio", "m", 1, 0)
    assert parts(ownership.renamed(gone, {"studio": "loft"}), "loft") == (True, True)
    ordered = ownership.offered("a", back, "loft", "n", 1, 0, is_ordered=True)
    assert parts(ownership.undone(ordered, "loft", "n", 0), "loft") == (True, True)
    again = ownership.offered("a", ownership.undone(ordered, "loft", "n", 0), "loft", "o", 2, 0)
    assert (parts(again, "loft"), again.had_by) == ((True, True), ("loft",))


def test_a_peer_that_gave_an_agent_is_known_by_its_new_name() -> None:
    came = ownership.received(ownership.arriving("a", HERE, "studio", "m", 1, 0, exists=False), 3)
    assert came.came == ("", 0)
    here = ownership.arrived("a", came, "m", 0)
    assert here.came == ("studio", 3)
    assert ownership.renamed(here, {"studio": "loft"}).came == ("loft", 3)


def test_a_store_that_knows_an_older_owner_neither_offers_nor_receives() -> None:
    with pytest.raises(FailedPrecondition, match="knows a newer owner"):
        ownership.offered("a", HERE, "studio", "m", 7, 0)
    known = Ownership(OwnerState.MOVED, 5, "studio")
    with pytest.raises(FailedPrecondition, match="knows a newer owner"):
        ownership.arriving("a", known, "studio", "m", 5, 0, exists=True)


def test_what_is_arriving_is_handed_over_to_nobody() -> None:
    with pytest.raises(FailedPrecondition, match="not under way"):
        ownership.handed_over("a", Ownership(OwnerState.ARRIVING, 1, "studio", "m"), "studio", "m", 1, 0)


def test_a_late_offer_of_a_move_that_ended_begins_nothing() -> None:
    first = ownership.offered("a", HERE, "studio", "m", 0, 0)
    kept = ownership.undone(first, "studio", "m", 0)
    assert kept.is_owned
    other = ownership.offered("a", kept, "studio", "n", 1, 0)
    later = ownership.undone(other, "studio", "n", 0)  # the last move is another one
    back = replace(
        ownership.handed_over("a", other, "studio", "n", 2, 0), state=OwnerState.OWNED, peer="", generation=3
    )
    for known in (kept, later, other, back):
        for move, generation in (("m", 0), ("n", 1))[: 1 + (known in (later, back))]:
            with pytest.raises(FailedPrecondition, match="not under way"):
                ownership.offered("a", known, "studio", move, generation, 0)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_id_of_the_last_move_begins_no_other(is_ordered: bool) -> None:
    """Not to another peer either, and not with the newest generation."""
    under_way = ownership.offered("a", HERE, "studio", "m", 0, 0)
    ended = (
        ownership.undone(under_way, "studio", "m", 0),
        replace(under_way, state=OwnerState.OWNED, peer="", generation=3),  # it went there and came back
    )
    for known in ended:
        for peer in ("studio", "loft"):
            with pytest.raises(FailedPrecondition, match="not under way"):
                ownership.offered("a", known, peer, "m", known.generation, 0, is_ordered=is_ordered)
            assert ownership.offered("a", known, peer, "n", known.generation, 0, is_ordered=is_ordered).move_id == "n"


@pytest.mark.parametrize(
    ("detail", "agent_id", "expected"),
    [
        ("laptop/ada@3", "ada", True),
        ("laptop/ada@3", "", True),
        ("laptop/ada@home@3", "ada", False),
        ("laptop/ada@home@3", "ada@home", True),
        ("studio/ada@3", "ada", False),
        ("laptop/ada", "ada", False),
    ],
)
def test_a_copy_is_of_the_very_agent_that_its_origin_names(detail: str, agent_id: str, expected: bool) -> None:
    copy = SnapshotVersion("ada", "kv", 1, Digest.of(b"m"), 0, 1, 0, 1, Origin.PULL, detail)
    assert came_from(copy, ["laptop", "old laptop"], agent_id) is expected
