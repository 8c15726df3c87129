"""Words to drive an engine with: whole turns, memories, tensor files."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inference_svc.engine import Engine, TurnHandle
from inference_svc.plan import (
    Cold,
    Ended,
    Event,
    Failed,
    Restored,
    Reuse,
    SamplingParams,
    SequenceKey,
    SequenceState,
    TurnPlan,
)
from tests.inference.engine.tiny_models import VOCABULARY

GENERATED = 64


class Listener:
    """Collects a turn's events and waits for its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[list[Event]] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            self.steps.append(events)
            self.events += events
            self._changed.notify_all()

    def wait_for(self, kind: type[Event], count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(isinstance(e, kind) for e in self.events) >= count, 120)

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


class Driver:
    """An engine, spoken to in whole turns."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._names = 0

    def key(self) -> SequenceKey:
        """An agent that nobody used before."""
        self._names += 1
        return SequenceKey("tests", f"agent {self._names}")

    def submit(
        self,
        tokens: Sequence[int],
        reuse: Reuse | None = None,
        key: SequenceKey | None = None,
        keep_partial: bool = False,
        **sampling: Any,
    ) -> tuple[Listener, TurnHandle]:
        params = replace(SamplingParams(max_tokens=GENERATED), **sampling)
        plan = TurnPlan(tuple(tokens), (1,) * len(tokens), params, reuse or Cold(), key, keep_partial)
        listener = Listener()
        return listener, self.engine.submit(plan, listener)

    def turn(
        self, tokens: Sequence[int], reuse: Reuse | None = None, key: SequenceKey | None = None, **kw: Any
    ) -> Ended:
        """Run a turn to its end; raises what it failed with."""
        listener, _ = self.submit(tokens, reuse, key, **kw)
        return listener.end()

    def reply(self, ended: Ended) -> tuple[int, ...]:
        return ended.state.token_ids[ended.prompt_tokens :]

    def remember(self, length: int, seed: int = 0, generated: int = 3) -> tuple[SequenceKey, SequenceState]:
        """A new agent whose memory is `length` tokens, the last of which it generated."""
        for attempt in range(20):
            key = self.key()
            prompt = tokens_of(length - generated, seed + 1000 * attempt)
            state = self.turn(prompt, key=key, max_tokens=generated).state
            if len(state.token_ids) == length:  # random models often end inside a character, which is not remembered
                return key, state
        raise AssertionError("no memory of that length in 20 attempts")

    def files(self, key: SequenceKey) -> tuple[bytes, ...]:
        """The key's memory as tensor files."""
        snapshot = self.engine.snapshot(key, 0).result(60)
        assert snapshot is not None
        return tuple(data for _, data in (*snapshot.blocks, *([snapshot.tail] if snapshot.tail else [])))

    def restored(self, key: SequenceKey, keep: int | None = None) -> Restored:
        """What a store would give back of the key's memory."""
        hot = self.engine.hot_memory(key)
        assert hot is not None
        tokens = hot.state.token_ids
        return Restored(self.files(key), tokens, len(tokens) if keep is None else keep, hot.state.shareable_tokens)

    def fork(self, key: SequenceKey) -> SequenceKey:
        target = self.key()
        assert self.engine.fork_hot(key, target).result(60)
        return target


def tokens_of(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens, none of them special."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCABULARY - 2) for _ in range(count))
