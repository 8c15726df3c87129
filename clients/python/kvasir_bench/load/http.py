"""Turns of a load over HTTP by what every server of OpenAI's chat completions knows, counted by `usage`."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from kvasir.errors import InvalidArgument, Unavailable

from kvasir_bench.load.arithmetic import Arrived, TurnFailed
from kvasir_bench.load.run import LoadAgent
from kvasir_bench.program import MEASURED_WITHIN_S

_NO_MEMORY = {"x-agent-memory": "none"}  # of turns that are no conversation; other servers do not know the header


class HttpTarget:
    """A server with `/v1/chat/completions`."""

    counts = "events"

    def __init__(self, client: httpx2.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def tokens_per_word(self, text: str) -> float | None:
        words = text.split()
        half = words[: len(words) // 2]
        tokens = [await self._prompt_tokens(" ".join(each)) for each in (words, half)]
        # The difference, because a chat template's own words are in both.
        return (tokens[0] - tokens[1]) / (len(words) - len(half)) if tokens[0] > tokens[1] else None

    async def turn(self, agent: LoadAgent, max_tokens: int) -> AsyncGenerator[Arrived, None]:
        """One turn, with the whole conversation. Raises TurnFailed: the status, or what went wrong."""
        is_whole, body = False, self._body(agent.messages, max_tokens)
        headers = {} if agent.name else _NO_MEMORY
        try:
            async with self._client.stream("POST", "/chat/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise TurnFailed(f"HTTP {answer.status_code}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    if (data := line[5:].strip()) == "[DONE]":
                        is_whole = True
                        continue
                    chunk = _object(data)
                    if "error" in chunk:
                        raise TurnFailed("an error inside the stream")
                    choices = chunk.get("choices") or ()
                    is_whole |= any(choice.get("finish_reason") for choice in choices)
                    deltas = [choice.get("delta") or {} for choice in choices]
                    if any(map(_says_something, deltas)):
                        yield Arrived(1, text="".join(delta.get("content") or "" for delta in deltas))
                    if (total := usage(chunk, "completion_tokens")) is not None:
                        yield Arrived(total_tokens=total)
        except httpx2.HTTPError as error:
            raise TurnFailed(type(error).__name__) from None
        except (AttributeError, TypeError):  # objects that are none, of a server that means something else
            raise TurnFailed("what came is no chat completion") from None
        if not is_whole:
            raise TurnFailed("the stream ended early")

    async def forget(self, agents: Sequence[str]) -> None:
        """Nothing: no such server deletes a conversation."""

    async def whole(self, messages: Sequence[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        """The answer in one piece, to a turn that is no conversation. Raises Unavailable and InvalidArgument."""
        body = {**self._body(messages, max_tokens), "stream": False}
        del body["stream_options"]
        try:
            answer = await self._client.post("/chat/completions", json=body, headers=_NO_MEMORY)
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self._client.base_url}: {type(error).__name__}") from None
        if answer.status_code != 200:
            told = f"{self._client.base_url}chat/completions answers {answer.status_code}: {answer.text[:300]}"
            raise Unavailable(told) if answer.status_code >= 500 else InvalidArgument(told, field="--http")
        try:
            found = _object(answer.text)
            usage(found, "prompt_tokens")
        except (TurnFailed, AttributeError):
            told = f"{self._client.base_url}chat/completions does not answer with a chat completion"
            raise InvalidArgument.of("--http", told) from None
        return found

    async def _prompt_tokens(self, text: str) -> int:
        """0 where the server does not count them."""
        return usage(await self.whole([{"role": "user", "content": text}], 1), "prompt_tokens") or 0

    def _body(self, messages: Sequence[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@asynccontextmanager
async def connected(url: str, model: str, api_key: str) -> AsyncGenerator[HttpTarget, None]:
    """A target at `url`, with or without `/v1`; as many connections as turns are in flight. Raises
    InvalidArgument."""
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument.of("--http", f"expected http://HOST:PORT or https://…, got {url!r}")
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
    try:
        client = httpx2.AsyncClient(
            base_url=base, headers=headers, limits=limits, timeout=MEASURED_WITHIN_S, trust_env=False
        )
    except (httpx2.InvalidURL, UnicodeEncodeError) as error:
        raise InvalidArgument.of("--http", f"{type(error).__name__}") from None
    async with client:
        yield HttpTarget(client, model)


def _says_something(delta: dict[str, Any]) -> bool:
    """Whether a piece has a part of the reply; the first one may have its role alone."""
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def usage(answer: dict[str, Any], name: str) -> int | None:
    """A count of tokens, where the server gives it. Raises AttributeError for one that is no object."""
    count = (answer.get("usage") or {}).get(name)
    return count if isinstance(count, int) else None


def _object(text: str) -> dict[str, Any]:
    """Raises TurnFailed."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise TurnFailed("what came is no chat completion")
    return value
