"""Summaries that clients requested, by digests: a conversation that begins with one goes on in its agent."""

import base64
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from kvasir_gateway.reading.records import Beside
from kvasir_gateway.turn import Said

_MAX_SUMMARIES = 100  # of a namespace; the oldest is dropped
_MAX_LABEL_CHARS = 256  # as the store takes
# Clients write a text of theirs around a summary, and may strip tags. Shorter lines are headings, equal in many.
_LEAST_CHARS = 40
_DIGEST_BYTES = 8
_MAX_LINES = (_MAX_LABEL_CHARS * 3 // 4 - _DIGEST_BYTES) // _DIGEST_BYTES  # the label has the session's digest, too


@dataclass(frozen=True, slots=True)
class _Summary:
    agent_id: str
    session: bytes
    lines: frozenset[bytes]


class Summaries:
    """By namespace and agent the newest summary of its conversation."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._summaries: dict[str, dict[str, _Summary]] = {}
        self._read: set[str] = set()

    def is_read(self, namespace: str) -> bool:
        """Whether the labels of its agents are known."""
        return namespace in self._read

    def read(self, namespace: str, labels: Mapping[str, str]) -> None:
        """What `add` returned, by agent, the oldest first; of an agent that has a newer summary it is ignored."""
        if namespace in self._read:
            return
        self._read.add(namespace)
        newer = self._summaries.pop(namespace, {})
        for agent_id, label in labels.items():
            with contextlib.suppress(ValueError):  # labels are their callers', too
                data = base64.b64decode(label)
                session, *lines = (data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES))
                self._keep(namespace, _Summary(agent_id, session, frozenset(lines)))
        for summary in newer.values():
            self._keep(namespace, summary)

    def add(self, namespace: str, agent_id: str, session: bytes, messages: Sequence[Said], text: str) -> str:
        """`messages`: what it sums up, whose own lines do not count. Returns the agent's label, or nothing."""
        others = self._lines_of(messages)
        lines = [line for line in dict.fromkeys(self._lines(text)) if line not in others]
        if not lines:
            return ""
        lines = lines[:: -(-len(lines) // _MAX_LINES)]  # of all parts: clients leave some out
        self._keep(namespace, _Summary(agent_id, session[:_DIGEST_BYTES], frozenset(lines)))
        return base64.b64encode(session[:_DIGEST_BYTES] + b"".join(lines)).decode()

    def _keep(self, namespace: str, summary: _Summary) -> None:
        known = self._summaries.setdefault(namespace, {})
        known.pop(summary.agent_id, None)
        known[summary.agent_id] = summary
        if len(known) > _MAX_SUMMARIES:
            del known[next(iter(known))]

    def used(self, namespace: str, agent_id: str) -> None:
        """A conversation went on from it: another that repeats a line of it does not."""
        self._summaries.get(namespace, {}).pop(agent_id, None)

    async def agent_of(self, namespace: str, session: bytes, messages: Sequence[Said], beside: Beside) -> str:
        """The agent whose summary these messages repeat, a line of it at least; else nothing."""
        summaries = self._summaries.get(namespace, {}).values()
        known = [each for each in summaries if session.startswith(each.session)]
        if not known:
            return ""
        said = await beside(partial(self._lines_of, messages))  # of a long conversation it takes its time
        best = max(reversed(known), key=lambda each: len(each.lines & said))
        return best.agent_id if best.lines & said else ""

    def _lines_of(self, messages: Sequence[Said]) -> set[bytes]:
        return {line for message in messages for line in self._lines(message.content)}

    def _lines(self, text: str) -> list[bytes]:
        lines = (line.strip() for line in text.splitlines())
        return [self._digest(line) for line in lines if len(line) >= _LEAST_CHARS]

    def _digest(self, line: str) -> bytes:
        return blake3(line.encode("utf-8", "surrogatepass"), key=self._key).digest(_DIGEST_BYTES)
