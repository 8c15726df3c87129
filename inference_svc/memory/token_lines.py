"""Which agent remembers a conversation that comes as token ids, from a caller that names none: by hot memory, else by
names, which have the length and digest of a conversation's first prompt. It only shows where to look: the engine
compares tokens. Agents beyond a thousand are deleted, and by the store those that were not used for a week: it counts
time that surely passed, and a clock that is set deletes nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

from blake3 import blake3
from kvasir import expires_after
from kvasir.errors import FailedPrecondition, KvasirError, NotFound
from kvasir.waits import PAUSE_S

from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.text.prefix_matching import common_prefix_length
from inference_svc.text.token_ids import TokenIds

PREFIX = "tokens/"
# Templates may render the last tokens of a prompt, which begin the reply, otherwise once the reply is there.
_REPLY_PROMPT_TOKENS = 16
_COMPARED_FIRST = 16
_DIGEST_CHARS = 24
_MAX_KEPT = 1000
_MAX_KNOWN = 4 * _MAX_KEPT
_UNUSED_FOR = "7d"
_LISTED_EVERY_MS = 10 * 60 * 1000

_Opening = tuple[int, str]  # how a conversation began: the number of tokens of its first prompt, and their digest


class TokenLines:
    """The agents of such conversations, of all namespaces. On the event loop."""

    def __init__(
        self, stores: Mapping[str, RemoteCache], *, new_name: Callable[[], str], now_ms: Callable[[], int]
    ) -> None:
        self._stores = stores
        self._new_name = new_name
        self._now_ms = now_ms
        self._listed_ms: dict[str, int] = {}
        self._known: dict[str, dict[_Opening, str]] = {}  # by namespace, agents that the store may have

    def agent_for(self, engine: Engine, namespace: str, token_ids: TokenIds, busy: Collection[str]) -> str:
        """The agent that a turn with this prompt shall extend. `busy`: agents with a turn under way, left alone."""
        if (hot := _hot_agent(engine, namespace, token_ids, busy)) is not None:
            return hot
        known = self._known.setdefault(namespace, {})
        hot_names = {key.agent_id for key in engine.memories.sizes() if key.namespace == namespace}
        lengths = {length for length, _ in known if length < len(token_ids)}
        openings = _openings(token_ids, [*lengths, len(token_ids)])
        for opening in reversed(openings):
            name = known.get(opening)
            if name is not None and name not in busy and name not in hot_names:  # a hot one went on otherwise
                return name
        length, digest = openings[-1]
        name = f"{PREFIX}{length}-{digest}/{self._new_name()}"
        if namespace in self._stores:
            known[length, digest] = name
            if len(known) > _MAX_KNOWN:  # of a store that does not answer: no list takes their place
                del known[next(iter(known))]
        return name

    async def learn(self, namespace: str) -> None:
        """Read the names that the store has, now and then; delete too many of them, and let the others expire."""
        store, now_ms = self._stores.get(namespace), self._now_ms()
        if store is None or 0 <= now_ms - self._listed_ms.get(namespace, -_LISTED_EVERY_MS) < _LISTED_EVERY_MS:
            return
        self._listed_ms[namespace] = now_ms
        client = store.connection.client
        with contextlib.suppress(KvasirError, TimeoutError):  # a store that does not answer is a miss, here too
            async with asyncio.timeout(PAUSE_S):
                agents = await _agents(store)
                self._known[namespace] = {_opening_of(name): name for _, name, _ in agents}
                for place, (_, name, expires) in enumerate(agents):
                    with contextlib.suppress(FailedPrecondition, NotFound):  # one that is pinned, or moved away, stays
                        if place < len(agents) - _MAX_KEPT:
                            await client.delete_agent(name)
                        elif not expires:
                            await client.update_agent(name, labels={expires_after.LABEL: _UNUSED_FOR})


async def _agents(store: RemoteCache) -> list[tuple[int, str, bool]]:
    """When the store's agents were used last (Unix ms), their names, and whether they expire; the last used comes
    last."""
    agents = store.connection.client.every_agent(name_prefix=PREFIX)
    return sorted(
        [(each.used_at.ToMilliseconds(), each.agent_id, expires_after.LABEL in each.labels) async for each in agents]
    )


def _hot_agent(engine: Engine, namespace: str, prompt: TokenIds, busy: Collection[str]) -> str | None:
    """The agent with the longest hot memory whose last prompt the tokens begin with."""
    best, most = None, 0
    for key in engine.memories.sizes():
        is_free = key.namespace == namespace and key.agent_id.startswith(PREFIX) and key.agent_id not in busy
        memory = engine.memories.tag_of(key) if is_free else None
        if not isinstance(memory, AgentMemory):
            continue
        known, asked = memory.transcript.token_ids, max(memory.turn.prompt_tokens - _REPLY_PROMPT_TOKENS, 1)
        # The end of the prompt is compared first: the conversations of one program begin alike.
        last = slice(max(asked - _COMPARED_FIRST, 0), asked)
        if known[last] == prompt[last] and (common := common_prefix_length(known, prompt)) >= max(asked, most + 1):
            best, most = key.agent_id, common
    return best


def _openings(token_ids: TokenIds, lengths: Sequence[int]) -> list[_Opening]:
    hasher, begin, found = blake3(), 0, []
    for end in sorted(lengths):
        hasher.update(bytes(token_ids[begin:end]))
        begin = end
        found.append((end, hasher.hexdigest()[:_DIGEST_CHARS]))
    return found


def _opening_of(name: str) -> _Opening:
    length, _, digest = name.removeprefix(PREFIX).partition("/")[0].partition("-")
    return (int(length), digest) if length.isdecimal() else (0, "")
