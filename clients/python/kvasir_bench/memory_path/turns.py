"""One turn of an agent as its caller sees it: when tokens and the last event came, and when its memory was stored."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any

from kvasir.clients import InferenceClient, Reply, enum_word
from kvasir.waits import WORK_S

from kvasir_bench.program import MEASURED_WITHIN_S

_POLL_S = 0.005
_READ_ONLY: Any = 2  # MEMORY_MODE_READ_ONLY
_QUESTION = "What did I say, and what of it is left? Take your time, and leave nothing out that you still know."


@dataclass(frozen=True, slots=True)
class SeenTurn:
    """Seconds since the request; the engine's facts about the turn."""

    first_token_s: float
    last_token_s: float
    last_event_s: float
    prefill_s: float
    restore_s: float
    prompt_tokens: int
    cached_tokens: int
    source: str
    reason: str
    snapshot: str
    why: str  # it was not stored with the turn
    token_ids: list[int]

    @property
    def lag_s(self) -> float:
        return self.last_event_s - self.last_token_s


class Agent:
    """An agent of one length. Its texts differ from their first word on, so that it shares no block with others."""

    def __init__(self, client: InferenceClient, name: str, words: int, reply_tokens: int, system: str = "") -> None:
        self.name = name
        self._system = [{"role": "system", "content": system}] if system else []
        self._client = client
        self._reply_tokens = reply_tokens
        self._text = text_of(name, words)
        self._began_s = 0.0

    def cold(self) -> SeenTurn:
        """The first turn, which computes all of its prompt."""
        return self._turn(messages=[*self._system, {"role": "user", "content": self._text}])

    def goes_on(self, **given: Any) -> SeenTurn:
        return self._turn(append_messages=[{"role": "user", "content": _QUESTION}], **given)

    def asked(self, client: InferenceClient) -> SeenTurn:
        """The same question at the same memory, which stays as it is. `client`: of the engine that runs now."""
        self._client = client
        return self._turn(append_messages=[{"role": "user", "content": _QUESTION}], memory_mode=_READ_ONLY)

    def stored_s(self) -> float | None:
        """Wait until the store has the memory as it is. Seconds since the last request; None if it never has."""
        while time.monotonic() - self._began_s < WORK_S:
            memories = self._client.list_hot_memories([self.name])
            if memories and memories[0].is_stored:
                return time.monotonic() - self._began_s
            time.sleep(_POLL_S)
        return None

    def _turn(self, **given: Any) -> SeenTurn:
        reply, times = Reply(), [0.0]
        self._began_s = time.monotonic()
        sampling = {"max_tokens": self._reply_tokens}
        events = self._client.generate(agent_id=self.name, sampling=sampling, timeout_s=MEASURED_WITHIN_S, **given)
        with closing(events):
            for event in events:
                reply.add(event)
                elapsed_s = time.monotonic() - self._began_s
                if event.delta.token_ids:
                    times.append(elapsed_s)
        return _seen(reply, times, elapsed_s)


def _seen(reply: Reply, times: Sequence[float], last_event_s: float) -> SeenTurn:
    """`times`: 0, and when messages with tokens came."""
    started, finished = reply.started, reply.finished
    return SeenTurn(
        first_token_s=times[1 if len(times) > 1 else 0],
        last_token_s=times[-1],
        last_event_s=last_event_s,
        prefill_s=finished.timings.prefill.ToTimedelta().total_seconds(),
        restore_s=finished.timings.restore.ToTimedelta().total_seconds(),
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        source=enum_word(started, "source"),
        reason=started.reason,
        snapshot=enum_word(finished.snapshot, "state"),
        why=finished.snapshot.reason,
        token_ids=[*reply.token_ids],
    )


def text_of(name: str, words: int) -> str:
    """So many words of five digits."""
    random = Random(name)  # noqa: S311 - a text that can be made again
    return " ".join(str(random.randrange(10_000, 100_000)) for _ in range(words))


def words_per_token(client: InferenceClient) -> float:
    """Of such texts, as the loaded model counts them."""
    words = 400
    return words / client.count_tokens(prompt=text_of("counted", words))
