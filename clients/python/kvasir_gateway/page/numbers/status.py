"""How things are: the last hour's reuse, live turns, the engine and its store, and models to load or unload."""

import asyncio
from collections.abc import Mapping

from kvasir.names import check_request_id
from starlette.responses import Response

from kvasir_gateway.engine import EngineLink
from kvasir_gateway.page import looking
from kvasir_gateway.page.look import Answer, Handler, Look
from kvasir_gateway.page.numbers.history import History


class Status:
    """The handlers of the page that operators look at."""

    def __init__(self, history: History, engine: EngineLink) -> None:
        self._history = history
        self._engine = engine

    def pages(self) -> Mapping[str, Handler]:
        return {"status": self._status, "turns": self._turns}

    def writes(self) -> Mapping[str, Handler]:
        return {"cancel": self._cancel, "load": self._load, "unload": self._unload}

    async def _status(self, look: Look) -> Answer:
        wellness, health, usage, turns, models = await asyncio.gather(
            self._engine.wellness(),
            looking.panel(looking.health(look.client, look.namespace)),
            looking.panel(look.client.get_usage()),
            looking.panel(look.client.list_turns()),
            looking.panel(look.client.list_models()),
        )
        namespace = look.namespace
        if health.value is not None:
            namespace = health.value.mine.namespace
            self._history.note(health.value.mine)
        reuse = looking.reuse(self._history, namespace, look.namespace)
        shown = {"health": health, "usage": usage, "turns": turns, "reuse": reuse, "models": models}
        return look.shown("status.html", ailments=wellness.ailments, **shown)

    async def _turns(self, look: Look) -> Answer:
        """The live turns alone, for the script that renews them."""
        return look.shown("turns.html", turns=await looking.panel(look.client.list_turns()))

    async def _cancel(self, look: Look) -> Answer:
        await look.client.cancel_turn(check_request_id(look.form.get("request_id", "")))
        return Response(status_code=204) if look.is_scripts else look.goto("status", done="cancel")

    async def _load(self, look: Look) -> Answer:
        await look.client.load_model(look.form.get("model", ""))
        return look.goto("status", done="load")

    async def _unload(self, look: Look) -> Answer:
        await look.client.unload_model(look.form.get("model", ""))
        return look.goto("status", done="unload")
