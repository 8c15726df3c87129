"""The drafts of decoding turns: each turn's past, its namespace's texts and its reply's format show what may come, its
trust and the step's costs how much of it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from weakref import WeakKeyDictionary

from inference_svc.engine.api import MOST_DRAFTS
from inference_svc.engine.drafting.draft_lengths import DraftCosts, Proposal, Trust
from inference_svc.engine.drafting.past_text import PastText
from inference_svc.engine.drafting.pauses import LONGEST_WAIT, Pauses
from inference_svc.engine.drafting.texts_beside import TextsBeside, TextsByNamespace
from inference_svc.engine.sequence import Sequence
from inference_svc.text.token_ids import TokenIds

Drafts = Mapping[Sequence, tuple[int, ...]]


class _TurnDrafts:
    """What one turn may generate next, as far as its newest tokens came before, or its format allows nothing else."""

    def __init__(self, sequence: Sequence, beside: TextsBeside) -> None:
        self._past = PastText(sequence.token_ids)
        self._beside = beside
        self._known = 0
        self._own_trust, self._trust_beside = Trust(), Trust()
        self._pauses = Pauses()

    def follow(self, sequence: Sequence) -> None:
        if len(sequence.token_ids) > self._known:
            self._past.extend(sequence.token_ids)
            self._known = len(sequence.token_ids)
            self._look(sequence)

    def wait(self, sequence: Sequence, clock: int) -> int:
        """After how many more tokens the next look is worth it. A format may force some at any place."""
        is_free = sequence.sampler is None or sequence.sampler.constraint is None
        return self._pauses.missed(clock) if is_free else 1

    def _look(self, sequence: Sequence) -> None:
        self.tokens, self._equal = self._past.next(MOST_DRAFTS)
        self._trust = self._own_trust
        beside, equal = self._beside.next(self._past.tokens, MOST_DRAFTS)
        if equal > self._equal:
            self.tokens, self._equal, self._trust = beside, equal, self._trust_beside
        forced = sequence.sampler.forced(MOST_DRAFTS) if sequence.sampler is not None else ()
        self._sure = len(forced)  # of the tokens; what follows them in the past is worth trying only if it begins so
        if self.tokens[: self._sure] != forced:
            self.tokens, self._equal = forced, 0

    def proposal(self, most: int) -> Proposal:
        return Proposal(min(len(self.tokens), most), self._trust.chance(self._equal), self._sure)

    def learn(self, drafts: int, right: int) -> None:
        if right:
            self._pauses.found()
        if drafts > self._sure:
            self._trust.learn(self._equal, drafts - self._sure, max(0, right - self._sure))

    def forgive(self) -> None:
        self._trust.forgive(self._equal)


class Drafter:
    """Nothing of a turn outlives it here, and no turn sees text of another namespace."""

    def __init__(
        self,
        most_rows: Callable[[int], int],
        most_drafts: int,
        is_alone: Callable[[], bool],
        texts_of: Callable[[str], Iterable[TokenIds]],
    ) -> None:
        """`most_rows`: of a step, drafts and all, by the tokens of its longest turn. `most_drafts`: of a turn that says
        nothing of them. `is_alone`: whether only one namespace has turns, whose drafts take nobody's time. `texts_of`:
        a namespace's texts that its turns may take drafts from, the newest last.
        """
        self._most_rows = most_rows
        self._most_of_any_step = most_rows(1)  # longer turns leave no more; 0: this model takes no drafts
        self._texts = TextsByNamespace(texts_of)
        self._most_drafts = most_drafts
        self._is_alone = is_alone
        self._turns: WeakKeyDictionary[Sequence, _TurnDrafts] = WeakKeyDictionary()
        self._costs = DraftCosts()

    def may_draft(self, sequences: Collection[Sequence]) -> bool:
        """Whether one of these turns has something to try once its last token is known. Called twice a step: what costs
        most comes last, because in most steps nothing is found.
        """
        if not 0 < len(sequences) < self._most_of_any_step:
            return False
        due = [each for each in sequences if len(each.token_ids) >= each.drafts_from]
        if not due or not self._is_alone():
            return False
        clock = _clock_of(sequences)
        return any(self._finds(each, clock) for each in due) and self._rows_for(sequences) > 0

    def drafts(self, decoding: Collection[Sequence]) -> Drafts:
        """What to try of the turns that decode now, whose tokens are all known."""
        rows = list(decoding)
        if not (most_rows := self._rows_for(rows)):
            return {}
        clock = _clock_of(rows)
        found = {
            each: self._turns[each]
            for each in rows
            if len(each.token_ids) >= each.drafts_from and self._finds(each, clock)
        }
        proposals = {each: turn.proposal(self._most(each)) for each, turn in found.items()}
        lengths = self._costs.lengths(len(rows), proposals, most_rows)
        for each in found.keys() - lengths.keys():
            found[each].forgive()
            if not lengths:
                each.drafts_from = len(each.token_ids) + found[each].wait(each, clock)
        return {each: found[each].tokens[:count] for each, count in lengths.items()}

    def learn(self, sequence: Sequence, drafts: int, right: int) -> None:
        """So many drafts of the turn were tried, and so many were right. Before its new tokens are taken in."""
        self._of(sequence).learn(drafts, right)

    def took(self, rows: int, seconds: float, *, is_drafted: bool) -> None:
        self._costs.learn(rows, seconds, is_drafted=is_drafted)

    def _rows_for(self, sequences: Collection[Sequence]) -> int:
        """Rows of a step of these turns and their drafts at most; 0 if there is no room for drafts."""
        if not sequences or not self._is_alone():
            return 0
        most = self._most_rows(max(len(each.token_ids) for each in sequences))
        return most if most > len(sequences) else 0

    def _finds(self, sequence: Sequence, clock: int) -> bool:
        """Look for drafts of a turn; where it has none, put off its next look. `clock`: see `Pauses`."""
        turn = self._of(sequence) if self._can(sequence) else None
        if turn is not None and turn.tokens:
            return True
        wait = LONGEST_WAIT - clock % LONGEST_WAIT if turn is None else turn.wait(sequence, clock)
        sequence.drafts_from = len(sequence.token_ids) + wait
        return False

    def _can(self, sequence: Sequence) -> bool:
        sampler = sequence.sampler
        is_open = sequence.finish_reason is None and sampler is not None and sampler.takes_drafts
        # Not while a turn that was preempted computes what it had: its tokens are known.
        is_caught_up = sequence.cells.computed == len(sequence.token_ids) - 1
        return is_open and is_caught_up and self._most(sequence) > 0

    def _most(self, sequence: Sequence) -> int:
        """Drafts that leave the reply within its limit, once all and the token behind them are there."""
        given = sequence.plan.sampling.most_drafts
        wanted = self._most_drafts if given is None else given
        return min(wanted, sequence.most_tokens - len(sequence.token_ids) - 1)

    def _of(self, sequence: Sequence) -> _TurnDrafts:
        if (turn := self._turns.get(sequence)) is None:
            turn = self._turns[sequence] = _TurnDrafts(sequence, self._texts.beside(sequence.namespace))
        turn.follow(sequence)
        return turn


def _clock_of(sequences: Collection[Sequence]) -> int:
    """Counts the steps of turns that get one token in each."""
    return len(next(iter(sequences)).token_ids)
