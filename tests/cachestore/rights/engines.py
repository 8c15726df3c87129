"""Engines that serve in this process beside stores that do so, over Unix sockets, with all their real parts."""

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvasir.clients import AioInferenceClient
from kvasir.clients.aio.turn_peer import AioTurnPeer
from kvasir.credentials import HANDOVER, Principal, write_private_text
from kvasir.server.operating.audit import Audit
from kvasir.server.operating.traces import Traces
from kvasir.server.parts import Parts

from inference_svc.config import read_settings
from inference_svc.edge.agent_service import PRIVILEGED_OF_AGENTS
from inference_svc.engine.engine import Engine
from inference_svc.engine_stores import open_stores
from inference_svc.formats.grammar_trial import GrammarTrial
from inference_svc.formats.reply_formats import ReplyFormats
from inference_svc.handover.pairings import PairingsFile
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.model.model_host import ModelHost
from inference_svc.served_model import ServedModel
from inference_svc.serving import PRIVILEGED, _peers, _server, _Service
from inference_svc.turns.admission import Admission
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.peered import Lines
from tests.cachestore.service.running import make_credentials
from tests.inference.engine.tiny_models import LLAMA, write_model

SMALLEST = {**LLAMA, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64} | {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
"""A model whose turns take a few milliseconds, and whose replies depend on all that came before."""
ELSEWHERE = "elsewhere"  # a namespace in which every peer has a token, too


@dataclass(frozen=True)
class Place:
    """Where an engine is to be: its name, its store, and the engines that it may give turns to."""

    name: str
    store: str  # an address
    peers: Sequence[str] = ()  # engines, whose stores have the same names
    beside: Sequence[str] = ()  # engines on the same store
    callers: Sequence[str] = ()  # names of those that may give it turns of another store


@dataclass
class Player:
    """One engine that serves."""

    place: Place
    address: str
    served: ServedModel
    audit: Lines
    tokens: Mapping[str, str]  # by peer, and by "NAMESPACE/PEER"
    owner: AioInferenceClient
    links: list[AioTurnPeer] = field(default_factory=list)

    def as_peer(self, token: str | None) -> AioTurnPeer:
        """A program that has this token here, and says what it likes. It is closed with the engine."""
        self.links.append(AioTurnPeer.connect(self.address, token=token))
        return self.links[-1]


@asynccontextmanager
async def players(root: Path, places: Sequence[Place], liars: Mapping[str, str]) -> AsyncIterator[dict[str, Player]]:
    """So many engines. `liars`: addresses at which others find a peer that is no engine of ours."""
    model = await asyncio.to_thread(write_model, root / "model", SMALLEST)
    async with AsyncExitStack() as exits:
        sockets = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="kv")))
        addresses = {place.name: f"unix:{sockets / place.name}" for place in places}
        found = {**addresses, **liars}
        tokens = {place.name: _credentials(root, place) for place in places}
        made = {}
        for place in places:
            options = [
                *("serve", "--listen", addresses[place.name]),
                *("--store", place.store, "--model", str(model), "--state-dir", str(root / f"state-{place.name}")),
                *("--store-budget-ms", "5000", "--commit-wait-s", "10"),
            ]
            if place.callers:
                options += ["--credentials-file", str(root / f"{place.name}.toml")]
            for peer in (*place.peers, *place.beside):
                options += ["--peer", f"{peer}={found[peer]}"]
            for peer in place.peers:
                options += ["--peer-store", f"{peer}={peer}"]
                if peer not in liars:
                    write_private_text(root / f"{place.name}-{peer}", tokens[peer][place.name])
                    options += ["--peer-token-file", f"{peer}={root / f'{place.name}-{peer}'}"]
            made[place.name] = await exits.enter_async_context(_player(place, options, tokens[place.name]))
        yield made


def _credentials(root: Path, place: Place) -> dict[str, str]:
    """Tokens of an engine's callers."""
    by_namespace = {}
    for namespace in (NS, ELSEWHERE):
        for caller in place.callers:
            name = caller if namespace == NS else f"{caller}-{namespace}"
            by_namespace[name] = Principal(name, namespace, frozenset({HANDOVER}))
    return make_credentials(root / f"{place.name}.toml", list(by_namespace.values()))


@asynccontextmanager
async def _player(place: Place, options: Sequence[str], tokens: Mapping[str, str]) -> AsyncIterator[Player]:
    settings, lines = read_settings(options), Lines()
    async with Parts() as parts:
        audit = Audit("engine", lines, {*PRIVILEGED, *PRIVILEGED_OF_AGENTS})  # type: ignore[arg-type]
        pairings = PairingsFile(None)
        server = parts.closing(_server(settings, None, Traces(), audit, pairings))
        stores = open_stores(settings)
        for store in stores.values():
            parts.closing(store.connection)
        stats, admission = ServiceStats(time.monotonic()), Admission(settings.admission, time.monotonic)
        peers, owner = _peers(settings, parts, pairings), f"engine-{secrets.token_hex(8)}"
        service = _Service(settings, server, stores, stats, admission, peers, owner)
        open_engine = partial(Engine.open, memory_budget_bytes=50 << 20)
        opener = service.model_opener(open_engine, lambda _: None)
        host = parts.closing(ModelHost(settings.models, opener, lambda: None))
        await host.load(host.names[0])
        await service.until_stores_answer()
        formats = parts.closing(ReplyFormats(GrammarTrial()))
        service.add_to_server(host, formats, None, None)
        await server.start()
        server.set_ready(True)
        async with AioInferenceClient.connect(server.address) as owner:
            player = Player(place, server.address, host.serving(""), lines, tokens, owner)
            try:
                yield player
            finally:
                for link in player.links:
                    await link.close()
