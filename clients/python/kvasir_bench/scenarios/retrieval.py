"""Turns without a memory: the whole transcript each time, or the past messages that BM25 finds."""

import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import bm25s
from kvasir.clients import AioInferenceClient
from kvasir_orchestrator.engine_memory import options_of, streamed
from kvasir_orchestrator.memory import Answer, ReplyRequest
from kvasir_orchestrator.transcript import Message


class NoMemory:
    """Keeps nothing: sends the persona, `depth` past messages (None: all) and what is new, each turn."""

    def __init__(self, client: AioInferenceClient, depth: int | None) -> None:
        self._client, self._depth = client, depth

    async def ask(self, asked: ReplyRequest) -> AsyncGenerator[str | Answer, None]:
        """One turn, of the caller's own namespace."""
        whole = prompt_of(asked.transcript, asked.new, self._depth)
        async with aclosing(streamed(self._client, options_of(asked), time.monotonic, whole=whole)) as pieces:
            async for piece in pieces:
                yield piece if isinstance(piece, str) else piece[0]

    async def forget(self, agent_id: str, namespace: str) -> None:
        """Nothing is kept."""


def prompt_of(transcript: Sequence[Message], new: Sequence[Message], depth: int | None) -> list[Message]:
    """The persona, the `depth` past messages that fit the new ones best, in their order, and the new ones."""
    persona = [message for message in transcript if message["role"] == "system"]
    past = [message for message in transcript if message["role"] != "system"]
    if depth is None or depth >= len(past):
        return [*persona, *past, *new]
    index = bm25s.BM25()
    index.index([_words(message) for message in past], show_progress=False)
    query = [word for message in new for word in _words(message) if word in index.vocab_dict]
    scores = index.get_scores(query) if query else [0.0] * len(past)
    # Of equals the newer one is taken.
    best = sorted(range(len(past)), key=lambda place: (-scores[place], -place))[:depth]
    return [*persona, *(past[place] for place in sorted(best)), *new]


def _words(message: Message) -> list[str]:
    return re.findall(r"\w+", message["content"].lower())
