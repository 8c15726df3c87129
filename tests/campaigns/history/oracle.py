"""What a turn may know: held against what was acknowledged before it began. Pure: no service, no clock.

A turn knows the turns whose words its memory holds. It must know all that was acknowledged as stored (or brought back
by a rollback, a fork or an import), and nothing that was taken back; what was neither may be there or not.
"""

from dataclasses import dataclass, field


@dataclass
class Said:
    """One turn as its caller saw it."""

    number: int
    parent: int | None  # the turn whose memory it extended; None: nothing was remembered
    version: int | None = None  # what its caller was told: stored as this version

    is_whole: bool = False  # its caller sent the whole conversation, so it lacks nothing by right


@dataclass
class History:
    """One agent's life as its caller saw it, step by step."""

    turns: dict[int, Said] = field(default_factory=dict)
    acknowledged: int | None = None
    taken_back: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    # Of turns that began, and whose caller heard nothing: what was acknowledged and what was gone then. A later return
    # may have come before the turn was served: it lifts what it explains.
    unheard: dict[int, tuple[int | None, set[int]]] = field(default_factory=dict)

    def knowledge(self, number: int | None) -> set[int]:
        """The turn and all that it extends."""
        known: set[int] = set()
        while number is not None:
            known.add(number)
            turn = self.turns.get(number)  # none of one that is still under way
            number = turn.parent if turn is not None else None
        return known

    def begun(self, turn: Said) -> None:
        """Until its caller hears of it, what a turn extends is assumed: its `parent`."""
        self.turns[turn.number] = turn
        self.unheard[turn.number] = self.acknowledged, set(self.taken_back)

    def found(self, number: int, parent: int | None) -> None:
        """Judge a turn that is stored, and whose caller did not hear what it extends. Others are left as they are."""
        if number in self.unheard:
            self.turns[number].parent = parent
            self.problems += self._wrongs(self.turns[number], *self.unheard[number])

    def judge(self, turn: Said, acknowledged: int | None, taken_back: set[int]) -> None:
        """Note a turn that began when `acknowledged` was the newest and `taken_back` was gone."""
        self.turns[turn.number] = turn
        self.problems += self._wrongs(turn, acknowledged, taken_back)

    def judge_beside(self, turn: Said, acknowledged: int | None, taken_back: set[int], to: int | None) -> None:
        """The same of a turn beside which the memory went back `to` another: it was served before or after that."""
        after = self.knowledge(to)
        gone_after = (taken_back | set(self.turns)) - after
        self.turns[turn.number] = turn
        before = self._wrongs(turn, acknowledged, taken_back)
        if before and self._wrongs(turn, to, gone_after):
            self.problems += before

    def _wrongs(self, turn: Said, acknowledged: int | None, taken_back: set[int]) -> list[str]:
        known, wrongs = self.knowledge(turn.parent), list[str]()
        if gone := known & taken_back:
            wrongs.append(f"turn {turn.number} knows {sorted(gone)}, which was taken back before it began")
        if not turn.is_whole and acknowledged is not None and acknowledged not in known:
            wrongs.append(f"turn {turn.number} lacks turn {acknowledged}, which was acknowledged; knows {known}")
        return wrongs

    def judge_empty(self, acknowledged: int | None) -> None:
        """A turn was told that the agent remembers nothing."""
        if acknowledged is not None:
            self.problems.append(f"a turn was told that nothing is remembered; turn {acknowledged} was acknowledged")

    def stored(self, number: int) -> None:
        """Its caller was told so: it is the newest."""
        self.acknowledged = number

    def went_back(self, to: int | None, but: int | None = None) -> None:
        """A rollback, deletion or import was acknowledged: the newest is this turn's memory; the rest is gone, `but`
        for a turn that was served after it took effect.
        """
        self.acknowledged = to
        kept = self.knowledge(to)
        self.taken_back |= set(self.turns) - kept - {but}
        self.taken_back -= kept
        self.unheard = {number: (None, gone - kept) for number, (_, gone) in self.unheard.items()}
