"""The link to several engines of one store: a turn goes where its agent is hot or belongs, and elsewhere if it must."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from kvasir.clients import AioInferenceClient, GenerateOptions
from kvasir.clients.aio.service_client import Making, at_once
from kvasir.errors import KvasirError, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.operating.wellness import Ailment, Wellness
from kvasir.waits import ANSWER_S, PATIENCE_S, PAUSE_S, RETRY_S

from kvasir_gateway.engine import CallerAtEngine, EngineLink
from kvasir_gateway.fleet.placing import EngineState, Ring, agent_point, choose
from kvasir_gateway.reading.records import Beside

_MOST_PLACES = 100_000


class Engines:
    """What the gateway knows of its engines, from their answers and from the turns that it sends them."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float]) -> None:
        self.names = tuple(names)
        self.clock = clock
        self.owners: list[str] = [""] * len(names)  # the names under which they hold agents
        self._ring = Ring(names)
        self._is_up = [True] * len(names)
        self._open = [0] * len(names)
        self._hot: OrderedDict[int, int] = OrderedDict()  # an agent's point: the engine that had its last turn

    def choose(self, point: int, without: Sequence[int] = ()) -> int | None:
        """The engine for an agent's next turn; None if none is up."""
        states = [
            EngineState(is_up and engine not in without, turns)
            for engine, (is_up, turns) in enumerate(zip(self._is_up, self._open, strict=True))
        ]
        return choose(self._ring.order(point), states, self._hot.get(point))

    def of_agent(self, point: int) -> int:
        """The engine that knows of an agent, however busy it is: a turn that is not stored yet is known there alone."""
        hot = self._hot.get(point)
        return hot if hot is not None and self._is_up[hot] else self.choose(point) or 0

    def answered(self, engine: int, owner: str) -> None:
        self._is_up[engine], self.owners[engine] = True, owner or self.owners[engine]

    def failed(self, engine: int) -> None:
        self._is_up[engine] = False

    def had_turn(self, point: int, engine: int) -> None:
        self._hot[point] = engine
        self._hot.move_to_end(point)
        while len(self._hot) > _MOST_PLACES:
            self._hot.popitem(last=False)

    def holder(self, owner: str) -> int | None:
        """The engine that holds agents under this name, if it is one of these and up."""
        engine = self.owners.index(owner) if owner and owner in self.owners else None
        return engine if engine is not None and self._is_up[engine] else None

    @contextlib.contextmanager
    def turn_at(self, engine: int) -> Iterator[None]:
        self._open[engine] += 1
        try:
            yield
        finally:
            self._open[engine] -= 1


class CallerAtFleet(CallerAtEngine):
    """The engines as one caller may use them."""

    def __init__(
        self, clients: Sequence[AioInferenceClient], engines: Engines, namespace: str, beside: Beside = at_once
    ) -> None:
        super().__init__(clients[engines.choose(agent_point(namespace, "")) or 0], beside)
        self._clients = clients
        self._engines = engines
        self._namespace = namespace

    def at(self, agent_id: str) -> AioInferenceClient:
        return self._clients[self._engines.of_agent(agent_point(self._namespace, agent_id))]

    async def events(
        self, given: Mapping[str, Any], options: GenerateOptions
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The turn at its engine; as long as nothing has come of it, at the next one if that is gone, and at the one
        that holds the agent. An agent of an engine that is gone is waited for until that engine's lease has ended."""
        engines, point = self._engines, agent_point(self._namespace, options.agent_id or options.request_id)
        tried: list[int] = []
        engine, give_up_at = engines.choose(point) or 0, engines.clock() + PATIENCE_S  # twice as long as a lease lasts
        while True:
            has_begun = False
            try:
                with engines.turn_at(engine):
                    async with aclosing(self._clients[engine].generate(**given, options=options)) as events:
                        async for event in events:
                            if not has_begun and options.agent_id:
                                engines.had_turn(point, engine)
                            has_begun = True
                            yield event
                return
            except Unavailable as error:
                after = None if has_begun else self._after(error, engine, point, tried)
                if after is None or engines.clock() > give_up_at:
                    raise
            if after == engine:
                await asyncio.sleep(PAUSE_S)
            engine = after

    def _after(self, error: Unavailable, engine: int, point: int, tried: list[int]) -> int | None:
        """The engine to try next; None: the refusal is the answer."""
        if error.reason == "AGENT_HELD_ELSEWHERE":
            holder = self._engines.holder(error.metadata.get("owner", ""))
            return engine if holder is None or holder in tried else holder
        if not is_gone(error):
            return None
        self._engines.failed(engine)
        tried.append(engine)
        return self._engines.choose(point, tried)


def is_gone(error: Unavailable) -> bool:
    """Whether the engine ends, or did not answer itself: its own refusals have a time to retry."""
    return error.reason == "SHUTTING_DOWN" or (error.reason == "UNAVAILABLE" and error.retry_after_s is None)


class FleetLink(EngineLink):
    def __init__(self, links: Sequence[EngineLink], engines: Engines) -> None:
        self.links = links
        self.engines = engines

    @classmethod
    def to(cls, links: Sequence[EngineLink], names: Sequence[str]) -> EngineLink:
        """One engine needs no choice."""
        return links[0] if len(links) == 1 else cls(links, Engines(names, time.monotonic))

    def of(
        self, token: str | None, beside: Beside = at_once, making: Making = at_once, _namespace: str = ""
    ) -> CallerAtEngine:
        callers = [link.of(token, beside, making) for link in self.links]
        return CallerAtFleet([each.client for each in callers], self.engines, _namespace, beside)

    async def watch(self) -> None:
        """Poll every engine for ever whether it is there, and under which name it holds agents."""
        while True:
            await asyncio.gather(*map(self._look, range(len(self.links))))
            await asyncio.sleep(RETRY_S)

    async def _look(self, engine: int) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self.links[engine].of(None).client.get_capabilities()
        except (KvasirError, TimeoutError):
            self.engines.failed(engine)
        else:
            self.engines.answered(engine, answer.lease_owner)

    async def wellness(self, within_s: float = 2.0) -> Wellness:
        """Well as long as one engine is; each that is not is named by its place in the gateway's options."""
        found = await asyncio.gather(*(link.wellness(within_s) for link in self.links))
        best = min(found, key=lambda wellness: (wellness.http_status, len(wellness.ailments)))
        stops = best.http_status != 200
        ailments = [
            Ailment(each.reason, f"engine {number} of {len(found)}: {each.message}", stops and each.stops)
            for number, wellness in enumerate(found, 1)
            for each in wellness.ailments
        ]
        return Wellness(ailments, best.facts)

    async def models(self, within_s: float = 2.0) -> list[str]:
        """The names of all engines' models."""
        found = await asyncio.gather(*(link.models(within_s) for link in self.links))
        return list(dict.fromkeys(name for names in found for name in names))

    async def close(self) -> None:
        for link in self.links:
            await link.close()
