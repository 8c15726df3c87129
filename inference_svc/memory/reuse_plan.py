"""The plan of a turn's reused KV, from its planning to the turn's end."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest

from inference_svc.engine.api import Ended, Reuse, Started
from inference_svc.memory.outcomes import Miss, Source
from inference_svc.memory.replaying import Runs, runs_of_turn
from inference_svc.memory.store.reading import BackgroundRead
from inference_svc.memory.stored_windows import StoredWindow
from inference_svc.model.prompting import Tokenized
from inference_svc.text.prefix_matching import Outcome

T = TypeVar("T")


class Once(Generic[T]):
    """A value that goes to its taker, and is not kept alive here."""

    def __init__(self, value: T | None) -> None:
        self._value = value

    def take(self) -> T | None:
        value, self._value = self._value, None
        return value


@dataclass(frozen=True, slots=True)
class Prepared:
    text: str
    tokens: Tokenized
    kv: Once[Reuse]
    source: Source
    match: Outcome
    miss: Miss | None
    stored_blocks: tuple[Digest, ...]  # the leading full blocks of the prompt that the store already holds
    stored_windows: Mapping[int, StoredWindow] = field(default_factory=dict)  # and, by window, blocks of those layers
    shareable_tokens: int = 0  # of these blocks' tokens, leading ones whose rows every prefill makes
    reading: BackgroundRead | None = None  # of the files that are reused
    can_be_preempted: bool = False
    runs: Runs | None = None  # of the memory that is reused

    def stop_reading(self) -> None:
        if self.reading is not None:
            self.reading.stop()

    def begun(self, started: Started) -> "Prepared":
        """The same plan with only the stored blocks that the turn's KV still has. The engine may begin further back
        than planned, and then computes rows of the last reply again; or it takes another agent's KV, which is the same
        only where that was prefilled.
        """
        kept = min(started.cached_tokens, self.shareable_tokens) if started.is_shared else started.cached_tokens
        read_miss = self.reading.miss if self.reading is not None else None
        runs = () if started.is_shared else self.runs
        return replace(self.kept(kept // BLOCK_TOKENS), miss=read_miss or self.miss, runs=runs)

    def kept(self, blocks: int) -> "Prepared":
        """The same plan with so many of the stored blocks at most: rows behind them are recomputed."""
        windows = {window: stored.before(blocks) for window, stored in self.stored_windows.items()}
        return replace(self, stored_blocks=self.stored_blocks[:blocks], stored_windows=windows)

    def runs_after(self, turn: Ended) -> Runs | None:
        """The runs of all rows that the turn left. None: it is not known how some of them were computed."""
        return runs_of_turn(self.runs, turn.cached_tokens, turn.prompt_tokens, turn.state.decoded_to)
