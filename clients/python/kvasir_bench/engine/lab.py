"""The engine under measurement, and its turns, whose every event is timed."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.layer_groups import first_touched_block
from kvasir.server.interceptors import settle_garbage

from inference_svc.engine import api
from inference_svc.engine.engine import Engine, TurnHandle
from inference_svc.engine.mlx_thread import MlxThread
from inference_svc.engine.scheduling.schedulable import DraftRules, Rules
from inference_svc.kv.policy import PolicyRequest
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from kvasir_bench.arithmetic import Target
from kvasir_bench.engine import link_rates
from kvasir_bench.engine.mlx_lm_peer import MlxLmPeer
from kvasir_bench.engine.prompts import Prompts
from kvasir_bench.program import MEASURED_WITHIN_S

_NAMESPACE = "bench"
_ItemT = TypeVar("_ItemT")
Row = Mapping[str, Any]  # with the keys of `keys.json`


class MeasuredEngine(Engine):
    """An engine whose turns end only at `max_tokens`, for equal work, and whose cells can have another size."""

    longest_gap_s = Rules.longest_gap_s
    end_token_ids: tuple[int, ...] = ()  # the model's own, for turns that must end as in real use

    @classmethod
    def opened(
        cls,
        model: str | Path,
        cache_dir: Path,
        memory_budget_bytes: int,
        policy: identity_pb2.KvPolicy | PolicyRequest | None = None,
        cell_tokens: int = 0,
        longest_gap_s: float = Rules.longest_gap_s,
    ) -> "MeasuredEngine":
        """As `Engine.open`, behind a collection of garbage, as in the service: a later one would be a gap of 50 ms."""
        settle_garbage()
        engine = cls.open(
            model,
            cache_dir=cache_dir,
            memory_budget_bytes=memory_budget_bytes,
            policy=policy,
            longest_gap_s=longest_gap_s,
            drafts=DraftRules(most=0),  # equal work: one token in a step, but where a case sets it otherwise
        )
        assert isinstance(engine, MeasuredEngine)
        engine.end_token_ids, own_cell = engine.model.stop_token_ids, engine.model.cell_tokens
        engine.model = replace(engine.model, stop_token_ids=(), cell_tokens=cell_tokens or own_cell)
        engine.longest_gap_s = longest_gap_s
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
        self._last: api.Ended | api.Failed | None = None
        self._at: tuple[Callable[[Run], bool], Callable[[], None]] | None = None
        self._changed = threading.Condition()

    def when(self, has_come: Callable[["Run"], bool], action: Callable[[], None]) -> "Run":
        """Do `action` once, on the MLX thread, in the step in which `has_come` of this run becomes true."""
        self._at = (has_come, action)
        return self

    def begin(self, engine: Engine, plan: api.TurnPlan) -> "Run":
        self.submitted_s = self._clock()
        self._handle = engine.submit(plan, self._listen)
        return self

    def _listen(self, events: list[api.Event]) -> None:
        now = self._clock()
        with self._changed:
            for event in events:
                if isinstance(event, api.Tokens):
                    self.token_times += [now] * len(event.ids)
                elif isinstance(event, api.Prefilled):
                    self.cell_times.append(now)
                elif isinstance(event, api.Ended | api.Failed):
                    self._last = event
            self.last_event_s = now
            self._changed.notify_all()
        if self._at is not None and self._at[0](self):
            action, self._at = self._at[1], None
            action()

    @property
    def first_token_s(self) -> float:
        return self.token_times[0] - self.submitted_s

    def wait_until(self, has_come: Callable[["Run"], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._last is not None or has_come(self), MEASURED_WITHIN_S):
                raise TimeoutError("the engine did not come so far")
        if isinstance(self._last, api.Failed) and not has_come(self):
            raise self._last.error

    def end(self) -> api.Ended:
        """Wait for the turn's end; raises its error if it failed."""
        self.wait_until(lambda _: False)
        assert isinstance(self._last, api.Ended)
        return self._last

    def ended(self) -> "Run":
        """This turn, when it has ended; raises its error if it failed."""
        self.end()
        return self

    def cancel(self) -> float:
        """Cancel the turn; returns the seconds until its end was reported."""
        assert self._handle is not None
        began = self._clock()
        self._handle.cancel()
        with self._changed:
            if not self._changed.wait_for(lambda: self._last is not None, MEASURED_WITHIN_S):
                raise TimeoutError("the cancelled turn did not end")
        return self.last_event_s - began


@dataclass(frozen=True)
class LabMemory:
    key: api.AgentKey
    state: SequenceState

    @property
    def tokens(self) -> TokenIds:
        return self.state.token_ids


@dataclass(frozen=True)
class Case:
    title: str
    rows: Sequence[Row]
    targets: Sequence[Target] = ()


@dataclass(frozen=True)
class Scope:
    repeats: int
    is_quick: bool = False  # small and once, for a look
    lengths: tuple[int, ...] = ()  # of contexts, in tokens; empty: each case's own
    batches: tuple[int, ...] = ()  # rows that decode together; empty: each case's own
    texts: tuple[str, ...] = ()  # of the case "ahead"; empty: all
    time_limit_s: float | None = None  # after this no new row is begun
    has_peer: bool = False  # whether cases give their work to mlx-lm too
    enough_s: float | None = None  # a measurement that takes as long has three repeats, one whose rounds do has two


class Pace:
    """How often cases measure, for how long, and what they report meanwhile."""

    def __init__(
        self, clock: Callable[[], float], scope: Scope, say: Callable[[str], None], *, compiles: bool = False
    ) -> None:
        """`compiles`: a first computation of a shape compiles kernels for it."""
        self.keep: Callable[[Sequence[Row]], None] = lambda _rows: None  # gets a case's rows so far
        self.fewest_repeats = scope.repeats  # of any measurement
        self._clock = clock
        self._scope = scope
        self._say = say
        self._compiles = compiles
        self._began_s = clock()
        self.begin_case()

    def begin_case(self) -> None:
        self._is_warm = False

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def is_late(self) -> bool:
        return self._scope.time_limit_s is not None and self.elapsed_s >= self._scope.time_limit_s

    def say(self, text: str) -> None:
        limit = f" of {self._scope.time_limit_s:.0f}" if self._scope.time_limit_s is not None else ""
        self._say(f"[{self.elapsed_s:.0f}{limit} s] {text}")

    def while_there_is_time(self, items: Iterable[_ItemT]) -> Iterator[_ItemT]:
        """The items until the time limit passes; reports the others. The first is always measured."""
        waiting = list(items)
        while waiting:
            yield waiting.pop(0)
            if waiting and self.is_late:
                self.say(f"no time is left for {', '.join(map(str, waiting))}")
                return

    def rows(self, items: Iterable[_ItemT], measure: Callable[[_ItemT], Iterable[Row]]) -> list[Row]:
        """The rows of each item while there is time; they are kept after each item."""
        rows: list[Row] = []
        for item in self.while_there_is_time(items):
            rows += measure(item)
            self.keep(rows)
        return rows

    def rounds(self, what: str) -> Iterable[bool]:
        """For each repeat, whether it counts; the fewer, the longer they take, and none while there is no time. Before
        them comes one that warms caches; where nothing is compiled, of a case's first measurement alone.
        """
        began_s, repeat = self.elapsed_s, 0
        if not self._is_warm:
            self.say(f"{what}, warming up")
            yield False
            self._is_warm = not self._compiles
        while repeat < self._scope.repeats and not (repeat and self.is_late):
            repeat += 1
            self.say(f"{what}, {repeat} of {self._scope.repeats}")
            round_s = self.elapsed_s
            yield True
            if self._are_enough(repeat, self.elapsed_s - round_s, self.elapsed_s - began_s):
                break
        self.fewest_repeats = min(self.fewest_repeats, repeat)

    def _are_enough(self, repeats: int, last_s: float, all_s: float) -> bool:
        enough_s = self._scope.enough_s
        return enough_s is not None and ((repeats >= 3 and all_s >= enough_s) or (repeats >= 2 and last_s >= enough_s))

    def counted(self, what: str, measure: Callable[[], _ItemT]) -> list[_ItemT]:
        return [found for counts, found in [(counts, measure()) for counts in self.rounds(what)] if counts]


class LabAgents:
    def __init__(self, engine: MeasuredEngine, start: Callable[..., Run]) -> None:
        self._engine = engine
        self._start = start
        self._count = 0

    def new_key(self) -> api.AgentKey:
        self._count += 1
        return api.AgentKey(_NAMESPACE, f"agent {self._count}")

    def remember(self, tokens: Sequence[int], like: LabMemory | None = None) -> LabMemory:
        """A new agent with these tokens, and the next one, in memory. `like`: a memory of more tokens of the same text,
        or of fewer; none of them is computed again.
        """
        run, key = self.go_on(like, tokens, 1)
        return LabMemory(key, run.end().state)

    def go_on(self, memory: LabMemory | None, tokens: Sequence[int], max_tokens: int) -> tuple[Run, api.AgentKey]:
        """A new agent's turn, which begins with a fork of a memory of the same text; None: with nothing."""
        if memory is None:
            return self._start(tokens, max_tokens, key=(key := self.new_key())), key
        key = self.fork(memory).key
        reuse = api.Hot(min(len(memory.tokens), len(tokens)) - 1)  # a memory's last token is the model's own
        return self._start(tokens, max_tokens, reuse, key), key

    def fork(self, memory: LabMemory) -> LabMemory:
        """The same memory for a new agent, so that a turn may use it up."""
        key = self.new_key()
        if not self._engine.memories.fork(memory.key, key).result(MEASURED_WITHIN_S):
            raise RuntimeError("the engine dropped a memory of the measurement: its memory budget is too small")
        return LabMemory(key, memory.state)

    def forget(self, memories: Iterable[LabMemory]) -> None:
        for memory in memories:
            self.drop(memory.key)

    def drop(self, key: api.AgentKey) -> None:
        self._engine.memories.drop(key).result(MEASURED_WITHIN_S)

    def resume(self, memory: LabMemory, suffix: Sequence[int], max_tokens: int) -> Run:
        """A turn that extends an agent's hot memory."""
        return self._start((*memory.tokens, *suffix), max_tokens, api.Hot(len(memory.tokens)), memory.key)

    def restored(self, memory: LabMemory) -> api.Restored:
        """A memory in the form in which a store would return it."""
        snapshot = self._engine.memories.snapshot(memory.key, 0).result(MEASURED_WITHIN_S)
        if snapshot is None:
            raise RuntimeError("the engine dropped a memory of the measurement: its memory budget is too small")
        files = (*snapshot.blocks, *([snapshot.tail] if snapshot.tail else []))
        tokens = snapshot.state.token_ids
        here = len(tokens)
        state = next((data for identity, data in snapshot.states if identity.tokens == here), None)
        windows = tuple(_seen(window, here) for window in snapshot.windows)
        return api.Restored(tuple(data for _, data in files), tokens, here, state=state, windows=windows)


class Lab:
    """An engine, a clock (s), and how much is measured."""

    def __init__(
        self,
        engine: MeasuredEngine,
        model: str | Path,
        clock: Callable[[], float],
        scope: Scope,
        *,
        cache_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """`cache_dir`: where the digests of the model's weights are kept for other processes of this measurement."""
        self.engine = engine
        self.model = model
        self.clock = clock
        self.scope = scope
        self.pace = Pace(clock, scope, say, compiles=self.is_gpu)
        self.agents = LabAgents(engine, self.start)
        self.cache_dir = cache_dir
        self.prompts = Prompts(engine.tokenizer)
        self._peer: MlxThread[MlxLmPeer] | None = None

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()

    @property
    def is_gpu(self) -> bool:
        return self.engine.device != "cpu"

    @property
    def peer(self) -> MlxThread[MlxLmPeer]:
        """mlx-lm with a copy of the model of its own, loaded at the first need."""
        if self._peer is None:
            compute_type = self.engine.model.compute_type
            self.pace.say("loading the model for mlx-lm")
            self._peer = MlxThread(lambda: MlxLmPeer(self.model, compute_type, self.clock), name="mlx-lm")
        return self._peer

    @cached_property
    def links(self) -> link_rates.LinkRates:
        """Rates of this machine's copies, measured once."""
        self.pace.say("copies of this machine")
        return link_rates.measured(self.clock, (256 if self.is_gpu else 16) << 20)

    def lengths(self, quick: int, *own: int) -> list[int]:
        """The given lengths, or a case's `quick` or own ones, each cut to the model's context."""
        chosen = self.scope.lengths or ((quick,) if self.scope.is_quick else own)
        return sorted({self.shortened(length, 512) for length in chosen})

    def batches(self, quick: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
        """The rows that decode together: those given, or a case's `quick` or own ones."""
        return self.scope.batches or (quick if self.scope.is_quick else own)

    def start_together(self, first: Sequence[int], second: Sequence[int], reply: int) -> tuple[Run, Run]:
        """Two turns that have ended. The second was submitted in the step of a third of the first's reply."""
        joined = Run(self.clock)

        def arrive() -> None:
            self.start(second, reply, run=joined)

        running = Run(self.clock).when(lambda run: len(run.token_times) >= reply // 3, arrive)
        return self.start(first, reply, run=running).ended(), joined.ended()

    def start(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        reuse: api.Reuse | None = None,
        key: api.AgentKey | None = None,
        *,
        namespace: str | None = None,
        stop_token_ids: tuple[int, ...] = (),
        run: Run | None = None,
        **sampled: Any,
    ) -> Run:
        """`sampled`: other settings of `SamplingParams`."""
        sampling = api.SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, **sampled)
        plan = api.TurnPlan(
            TokenIds(tokens), TokenChars((1,) * len(tokens)), sampling, reuse or api.Cold(), key, namespace=namespace
        )
        return (run or Run(self.clock)).begin(self.engine, plan)

    def shortened(self, tokens: int, spare: int = 64) -> int:
        """`tokens`, or fewer if the model's context has no room for them and `spare` more."""
        return min(tokens, self.engine.model.context_tokens - spare)


def _seen(window: api.WindowFiles, tokens: int) -> api.RestoredWindow:
    """The files of a window from the first block on that the token at position `tokens` sees."""
    first = first_touched_block(window.window, tokens)
    files = window.by_block
    return api.RestoredWindow(window.window, first, tuple(files[block] for block in range(first, max(files) + 1)))
