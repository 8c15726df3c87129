"""Words to drive an engine with: whole turns, memories, tensor files."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference_svc.engine.api import (
    AgentKey,
    Cold,
    Ended,
    Event,
    Failed,
    Keeps,
    Pace,
    Priority,
    Replay,
    Restored,
    Reuse,
    SamplingParams,
    TurnPlan,
)
from inference_svc.engine.engine import Engine, TurnHandle
from inference_svc.text.replies.reasoning_limit import ReasoningLimit
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from tests.inference.engine.tiny_models import VOCABULARY

# So many tokens tell one changed token of a context: `test_a_reply_depends_on_its_whole_context` holds them to it.
GENERATED = 16


class Listener:
    """Collects a turn's events and waits for its end. What it is told to do at an event it does at once, on the MLX
    thread, before the next step: so tests need not race with it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[list[Event]] = []
        self.handle: Future[TurnHandle] = Future()
        self._at: list[tuple[type[Event], int, Callable[[], object]]] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            self.steps.append(events)
            self.events += events
            self._changed.notify_all()
        due = [action for kind, count, action in self._at if self.count(kind) >= count]
        self._at = [entry for entry in self._at if entry[2] not in due]
        for action in due:
            action()

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def at(self, kind: type[Event], count: int, action: Callable[[], object]) -> "Listener":
        """Do `action` in the step that tells the `count`-th event of a kind."""
        self._at.append((kind, count, action))
        return self

    def cancel_at(self, kind: type[Event], count: int) -> "Listener":
        return self.at(kind, count, lambda: self.handle.result(60).cancel())

    def wait_for(self, kind: type[Event], count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(kind) >= count, 120)

    def end(self) -> Ended:
        with self._changed:
            assert self._changed.wait_for(
                lambda: bool(self.events) and isinstance(self.events[-1], Ended | Failed), 120
            )
        last = self.events[-1]
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Ended)
        return last


# The prompt begins them; special tokens of kvasir-tiny's tokenizer end and begin them. They end within a reply.
THOUGHTS = ReasoningLimit(20, "<|endoftext|>", ("<|im_start|>",), "\n", (1, 5), (4, 1, 5), start_id=0, is_open=True)


class Driver:
    """An engine, driven in whole turns."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._names = 0

    def key(self) -> AgentKey:
        """An agent that nobody used before."""
        self._names += 1
        return AgentKey("tests", f"agent {self._names}")

    def submit(
        self,
        tokens: Sequence[int],
        reuse: Reuse | None = None,
        key: AgentKey | None = None,
        listener: Listener | None = None,
        keep_partial: bool = False,
        namespace: str | None = None,
        priority: Priority = Priority.INTERACTIVE,
        can_be_preempted: bool = False,
        is_remembered: bool = True,
        rewind_point_tokens: int | None = None,
        longest_gap_s: float | None = None,
        replayed: tuple[int, ...] = (),
        **sampling: Any,
    ) -> Listener:
        listener = listener or Listener()
        params = replace(SamplingParams(max_tokens=GENERATED), **sampling)
        keeps = Keeps.PARTIAL if keep_partial else Keeps.WHOLE if is_remembered else Keeps.NOTHING
        plan = TurnPlan(
            TokenIds(tokens),
            TokenChars((1,) * len(tokens)),
            params,
            reuse or Cold(),
            key,
            keeps,
            Pace(priority, longest_gap_s),
            namespace,
            can_be_preempted=can_be_preempted,
            rewind_point_tokens=rewind_point_tokens,
            replay=Replay(replayed) if replayed else None,
        )
        listener.handle.set_result(self.engine.submit(plan, listener))
        return listener

    def turn(self, tokens: Sequence[int], reuse: Reuse | None = None, key: AgentKey | None = None, **kw: Any) -> Ended:
        """Run a turn to its end; raises what it failed with."""
        return self.submit(tokens, reuse, key, **kw).end()

    def reply(self, ended: Ended) -> tuple[int, ...]:
        return tuple(ended.state.token_ids[ended.prompt_tokens :])

    def remember(self, length: int, seed: int = 0, generated: int = 3) -> tuple[AgentKey, SequenceState]:
        """A new agent whose memory is `length` tokens, the last of which it generated."""
        for attempt in range(20):
            key = self.key()
            prompt = tokens_of(length - generated, seed + 1000 * attempt)
            state = self.turn(prompt, key=key, max_tokens=generated).state
            if len(state.token_ids) == length:  # random models often end inside a character, which is not remembered
                return key, state
        raise AssertionError("no memory of that length in 20 attempts")

    def files(self, key: AgentKey) -> tuple[bytes, ...]:
        """The key's memory as tensor files."""
        snapshot = self.engine.memories.snapshot(key, 0).result(60)
        assert snapshot is not None
        return tuple(bytes(data) for _, data in (*snapshot.blocks, *([snapshot.tail] if snapshot.tail else [])))

    def restored(self, key: AgentKey, keep: int | None = None) -> Restored:
        """What a store would give back of the key's memory."""
        hot = self.engine.memories.get(key)
        assert hot is not None
        tokens = hot.state.computed.token_ids
        keep = len(tokens) if keep is None else min(keep, len(tokens))  # the last token may have no KV yet
        return Restored(self.files(key), tokens, keep, hot.state.shareable_tokens)

    def fork(self, key: AgentKey) -> AgentKey:
        target = self.key()
        assert self.engine.memories.fork(key, target).result(60)
        return target


def tokens_of(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens, none of them special."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCABULARY - 2) for _ in range(count))


@contextlib.contextmanager
def driver_with_room_for(tokens: int, model_dir: Path, state_dir: Path) -> Iterator[Driver]:
    """An engine of its own that has KV for so many tokens."""
    unit = Engine.open(model_dir, cache_dir=state_dir, memory_budget_bytes=1 << 20)
    budget_bytes = tokens * unit.model.kv_bytes_per_token
    unit.close()
    engine = Engine.open(model_dir, cache_dir=state_dir, memory_budget_bytes=budget_bytes)
    yield Driver(engine)
    engine.close()
