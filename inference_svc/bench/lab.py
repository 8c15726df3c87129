"""The engine under measurement, and its turns, whose every event is timed."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.bench.arithmetic import Target
from inference_svc.bench.prompts import Prompts
from inference_svc.engine.api import (
    AgentKey,
    Cold,
    Ended,
    Event,
    Failed,
    Hot,
    Prefilled,
    Restored,
    Reuse,
    SamplingParams,
    Tokens,
    TurnPlan,
)
from inference_svc.engine.engine import Engine, TurnHandle
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.sequence_state import SequenceState

PATIENCE_S = 1800.0
_NAMESPACE = "bench"


class MeasuredEngine(Engine):
    """An engine whose turns end only at `max_tokens`, so that all runs do the same work, and whose cells can have
    another size.
    """

    cell_tokens = 0  # 0: the engine's own
    step_budget_s = 0.1

    @property
    def model(self) -> ModelInfo:
        info = super().model
        return replace(info, stop_token_ids=(), cell_tokens=self.cell_tokens or info.cell_tokens)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens, for turns that must end as in real use."""
        return super().model.stop_token_ids

    @classmethod
    def opened(
        cls,
        model: str | Path,
        cache_dir: Path,
        memory_budget_bytes: int,
        policy: identity_pb2.KvPolicy | None = None,
        cell_tokens: int = 0,
    ) -> "MeasuredEngine":
        """Open an engine as `Engine.open` does."""
        engine = cls.open(
            model,
            cache_dir=cache_dir,
            memory_budget_bytes=memory_budget_bytes,
            policy=policy,
            step_budget_s=cls.step_budget_s,
        )
        assert isinstance(engine, MeasuredEngine)
        engine.cell_tokens = cell_tokens
        return engine


class Run:
    """A turn in flight, and the time of each of its events on the lab's clock (s)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.submitted_s = clock()
        self.token_times: list[float] = []
        self.cell_times: list[float] = []  # of Prefilled events
        self.last_event_s = 0.0  # of the last event
        self._clock = clock
        self._handle: TurnHandle | None = None
        self._last: Ended | Failed | None = None
        self._at: tuple[Callable[[Run], bool], Callable[[], None]] | None = None
        self._changed = threading.Condition()

    def when(self, has_come: Callable[["Run"], bool], action: Callable[[], None]) -> "Run":
        """Do `action` once, on the MLX thread, in the step in which `has_come` of this run becomes true."""
        self._at = (has_come, action)
        return self

    def begin(self, engine: Engine, plan: TurnPlan) -> "Run":
        self.submitted_s = self._clock()
        self._handle = engine.submit(plan, self._listen)
        return self

    def _listen(self, events: list[Event]) -> None:
        now = self._clock()
        with self._changed:
            for event in events:
                if isinstance(event, Tokens):
                    self.token_times += [now] * len(event.ids)
                elif isinstance(event, Prefilled):
                    self.cell_times.append(now)
                elif isinstance(event, Ended | Failed):
                    self._last = event
            self.last_event_s = now
            self._changed.notify_all()
        if self._at is not None and self._at[0](self):
            action, self._at = self._at[1], None
            action()

    @property
    def first_token_s(self) -> float:
        """From submit to the first token."""
        return self.token_times[0] - self.submitted_s

    def wait_until(self, has_come: Callable[["Run"], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._last is not None or has_come(self), PATIENCE_S):
                raise TimeoutError("the engine did not come so far")
        if isinstance(self._last, Failed) and not has_come(self):
            raise self._last.error

    def end(self) -> Ended:
        """Wait for the turn's end; raises its error if it failed."""
        self.wait_until(lambda _: False)
        assert isinstance(self._last, Ended)
        return self._last

    def cancel(self) -> float:
        """Cancel the turn; returns the seconds until its end was reported."""
        assert self._handle is not None
        began = self._clock()
        self._handle.cancel()
        with self._changed:
            if not self._changed.wait_for(lambda: self._last is not None, PATIENCE_S):
                raise TimeoutError("the cancelled turn did not end")
        return self.last_event_s - began


@dataclass(frozen=True)
class LabMemory:
    """An agent in the engine's memory, and its sequence."""

    key: AgentKey
    state: SequenceState

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.state.token_ids


@dataclass(frozen=True)
class Case:
    """The results of a case: rows with the keys of `kvasir.bench.engine_keys`, and the project's targets."""

    title: str
    rows: Sequence[object]
    targets: Sequence[Target] = ()


class Lab:
    """An engine, a clock (s), the number of repeats, and whether small quick measurements are enough."""

    def __init__(
        self,
        engine: MeasuredEngine,
        model: str | Path,
        clock: Callable[[], float],
        *,
        repeats: int,
        is_quick: bool,
        say: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.model = model
        self.clock = clock
        self.repeats = repeats
        self.is_quick = is_quick
        self.say = say
        self.prompts = Prompts(engine.tokenizer)
        self._agents = 0

    def rounds(self, what: str) -> Iterable[bool]:
        """For each repeat, whether it counts; the first one does not, it warms caches and allocators."""
        for repeat in range(self.repeats + 1):
            self.say(f"{what}, {f'{repeat} of {self.repeats}' if repeat else 'warming up'}")
            yield repeat > 0

    def new_key(self) -> AgentKey:
        """A new agent."""
        self._agents += 1
        return AgentKey(_NAMESPACE, f"agent {self._agents}")

    def run(self) -> Run:
        """A turn that is not yet submitted."""
        return Run(self.clock)

    def start(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        reuse: Reuse | None = None,
        key: AgentKey | None = None,
        *,
        namespace: str | None = None,
        stop_token_ids: tuple[int, ...] = (),
        run: Run | None = None,
    ) -> Run:
        """Submit a greedy turn."""
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        plan = TurnPlan(tuple(tokens), (1,) * len(tokens), sampling, reuse or Cold(), key, namespace=namespace)
        return (run or self.run()).begin(self.engine, plan)

    def remember(self, tokens: Sequence[int]) -> LabMemory:
        """A new agent with these tokens, and the next one, in memory."""
        key = self.new_key()
        return LabMemory(key, self.start(tokens, 1, key=key).end().state)

    def fork(self, memory: LabMemory) -> LabMemory:
        """The same memory for a new agent, so that a turn may use it up."""
        key = self.new_key()
        if not self.engine.fork_hot(memory.key, key).result(PATIENCE_S):
            raise RuntimeError("the engine dropped a memory of the measurement: its memory budget is too small")
        return LabMemory(key, memory.state)

    def forget(self, memories: Iterable[LabMemory]) -> None:
        for memory in memories:
            self.engine.drop_hot(memory.key).result(PATIENCE_S)

    def resume(self, memory: LabMemory, suffix: Sequence[int], max_tokens: int) -> Run:
        """A turn that extends an agent's hot memory."""
        return self.start((*memory.tokens, *suffix), max_tokens, Hot(len(memory.tokens)), memory.key)

    def restored(self, memory: LabMemory) -> Restored:
        """A memory in the form in which a store would return it."""
        snapshot = self.engine.snapshot(memory.key, 0).result(PATIENCE_S)
        if snapshot is None:
            raise RuntimeError("the engine dropped a memory of the measurement: its memory budget is too small")
        files = (*snapshot.blocks, *([snapshot.tail] if snapshot.tail else []))
        return Restored(tuple(data for _, data in files), memory.tokens, len(memory.tokens))

    def shortened(self, tokens: int, spare: int = 64) -> int:
        """`tokens`, or fewer if the model's context has no room for them and `spare` more."""
        return min(tokens, self.engine.model.context_tokens - spare)
