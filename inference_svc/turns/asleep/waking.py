"""Wakes agents before their turns come, by earlier returns. If no turn comes in time, they sleep again."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import structlog
from kvasir.credentials import replace_private_text
from kvasir.errors import Cancelled, KvasirError, NotFound
from kvasir.waits import ANSWER_S

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.outcomes import Wake
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.turns.asleep.allowance import Allowance
from inference_svc.turns.asleep.own_turns import OwnTurns
from inference_svc.turns.asleep.returns import Returns
from inference_svc.turns.asleep.woken import WokenAgents
from inference_svc.turns.turn_data import Work

_LOG = structlog.get_logger(__name__)
_MINUTES_AWAKE = 30  # until one that was awake, or could not be woken, is looked at again
_MINUTES_FULL = 1  # the same of one that had no room
_MOST_LATER = 4096
_FILE = "returns.json"
_LOOKS_SAVED = 60  # between two writes of the file


@dataclass(frozen=True, slots=True)
class WakingParts:
    turns: OwnTurns
    engine: Engine
    stores: Mapping[str, RemoteCache]  # by namespace; more may come later
    woken: WokenAgents
    stats: ServiceStats
    clock: Callable[[], float]  # seconds, of turns' arrival


class WakingAhead:
    """At most one wake at a time, while no turn runs and the allowance lasts. A turn that comes ends it."""

    def __init__(self, parts: WakingParts, allowance: Allowance, state_dir: Path) -> None:
        self._parts = parts
        self._allowance = allowance
        self._file = ReturnsFile(state_dir / _FILE, parts.woken.returns)
        self._later: dict[AgentKey, float] = {}  # agents that are looked at again from then on, by Unix time
        self.own = set[AgentKey]()  # agents that it woke, and whose turns have not come

    async def run(self) -> None:
        await asyncio.to_thread(self._file.remove if self._allowance.is_empty else self._file.read)
        try:
            for look in count(1):
                await asyncio.sleep(ANSWER_S)
                try:
                    await self.look()
                except Exception as error:  # noqa: BLE001 - no turn fails by it, and the next look may succeed
                    _LOG.error("memory.not_woken_ahead", exc_info=error)
                if look % _LOOKS_SAVED == 0 and (text := self._kept()):
                    await asyncio.to_thread(self._file.write, text)
        finally:
            if text := self._kept():
                self._file.write(text)

    def _kept(self) -> str:
        """The returns in namespaces that are not sealed. Empty where nobody is woken, and until each store answered."""
        if self._allowance.is_empty:
            return ""
        features = {name: store.connection.features for name, store in self._parts.stores.items()}
        if not features or not all(features.values()):
            return ""
        plain = [name for name, known in features.items() if "sealed" not in known]
        return self._parts.woken.returns.to_json(self._parts.woken.now_s(), plain)

    async def look(self) -> None:
        """Let agents go that did not come, then wake those that may come, until a caller's turn runs."""
        expected = self._parts.woken.returns.expected(self._parts.woken.now_s())
        await self._let_go(set(expected))
        for key in self._candidates(expected):
            if not self._parts.turns.may_begin or not self._allowance.has_time(self._parts.woken.now_s()):
                return
            await self._wake_if_asleep(key)

    async def _let_go(self, expected: set[AgentKey]) -> None:
        ready, sizes = self._parts.woken.ready, self._parts.engine.memories.sizes()
        self.own &= ready.keys()
        for key in [key for key in ready if key not in sizes]:  # others wanted its room
            self._ended(key)
            self._look_later(key)
        for key in self.own - expected:
            if not self._parts.turns.may_begin:
                return
            with contextlib.suppress(KvasirError):  # a turn came; or it is looked at again
                await self._parts.turns.make(key, Work.SLEEP)
                self._ended(key)

    def _ended(self, key: AgentKey) -> None:
        if self._parts.woken.ready.pop(key, None) is not None:
            self._parts.stats.of(key.namespace).wakes[Wake.UNUSED] += 1
        self.own.discard(key)

    def _candidates(self, expected: Iterable[AgentKey]) -> list[AgentKey]:
        now_s, hot = self._parts.woken.now_s(), self._parts.engine.memories.sizes()
        self._later = {key: at for key, at in self._later.items() if at > now_s}
        return [key for key in expected if key not in hot and key not in self._later]

    async def _wake_if_asleep(self, key: AgentKey) -> None:
        """Wake the agent, if it is asleep, this engine served its last turn, and there is room."""
        store, model = self._parts.stores.get(key.namespace), self._parts.engine.model
        if store is None:
            return
        try:
            agent = await store.agents.listed(key.agent_id)
        except NotFound:
            self._parts.woken.returns.forget(key)
            return
        except KvasirError:  # of one namespace: the others' agents are woken all the same
            self._look_later(key, _MINUTES_FULL)
            return
        is_ours = self._parts.woken.returns.is_last(key, agent.request_id)
        if not agent.is_asleep or agent.kv_identity_hash != model.kv_identity_hash or not is_ours:
            self._look_later(key)
        elif self._has_room(agent.tokens):
            await self._wake(key)
        else:
            self._look_later(key, _MINUTES_FULL)

    def _has_room(self, tokens: int) -> bool:
        engine, woken = self._parts.engine, self._parts.woken
        sizes = engine.memories.sizes()
        held_bytes = sum(sizes.get(key, 0) for key in woken.ready)
        return self._allowance.has_room(held_bytes, engine.needed_bytes(tokens + 1))

    async def _wake(self, key: AgentKey) -> None:
        began_s = self._parts.clock()
        try:
            await self._parts.turns.make(key, Work.WAKE)
        except Cancelled:
            return  # a caller's turn came
        except KvasirError as error:
            _LOG.info("memory.not_woken", reason=error.reason)
            self._look_later(key)
        finally:
            self._allowance.spend(self._parts.clock() - began_s)
        if key in self._parts.woken.ready:
            self.own.add(key)

    def _look_later(self, key: AgentKey, minutes: int = _MINUTES_AWAKE) -> None:
        if len(self._later) < _MOST_LATER:
            self._later[key] = self._parts.woken.now_s() + 60 * minutes


class ReturnsFile:
    """Keeps learned returns over restarts. A damaged file, or a disk that takes none, costs them."""

    def __init__(self, path: Path, returns: Returns) -> None:
        self._path = path
        self._returns = returns
        self._written = ""

    def read(self) -> None:
        try:
            self._returns.read_json(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _LOG.warning("returns.unreadable", file=str(self._path), error=type(error).__name__)

    def remove(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("returns.not_removed", file=str(self._path), error=type(error).__name__)

    def write(self, text: str) -> None:
        if text == self._written:
            return
        try:
            replace_private_text(self._path, text)
            self._written = text
        except OSError as error:
            _LOG.warning("returns.not_kept", file=str(self._path), error=type(error).__name__)
