"""A service that cannot start leaves nothing open behind it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvasir.clients.aio.turn_peer import AioTurnPeer
from kvasir.errors import InvalidArgument

from cachestore_svc import __main__ as store_service
from cachestore_svc.config import StoreSettings
from cachestore_svc.config import read_settings as store_settings
from cachestore_svc.edge.peer_service import PeerService
from cachestore_svc.store.store import Store
from inference_svc import serving as engine_service
from inference_svc.config import read_settings as engine_settings
from inference_svc.engine.engine import Engine


class Opened:
    """Stands for a client."""

    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def store(tmp_path: Path) -> StoreSettings:
    tmp_path.chmod(0o700)
    options = {"data_dir": tmp_path / "data", "listen": f"unix:{tmp_path / 's'}", "last_runs_dir": tmp_path / "runs"}
    return store_settings(options)


def test_peer_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of an engine, the second one."""
    cache, peer = SimpleNamespace(connection=Opened()), Opened()

    def connect(address: str, **_: object) -> Opened:
        if address.endswith("/c"):
            raise InvalidArgument("no such peer")
        return peer

    monkeypatch.setattr(engine_service, "open_stores", lambda _settings: {"default": cache})
    monkeypatch.setattr(AioTurnPeer, "connect", connect)
    words = ("--listen", f"unix:{tmp_path / 's'}", "--state-dir", str(tmp_path))
    settings = engine_settings([*words, "--peer", "b=unix:/tmp/b", "--peer", "c=unix:/tmp/c"])
    with pytest.raises(InvalidArgument, match="no such peer"):
        asyncio.run(engine_service.serve(settings, Engine.open))
    assert (cache.connection.is_closed, peer.is_closed) == (True, True)


def test_door_fails(monkeypatch: pytest.MonkeyPatch, store: StoreSettings, tmp_path: Path) -> None:
    """Of a store, when its own address is already listened at."""

    async def settle(_service: PeerService) -> None:
        assert (tmp_path / "s").is_socket()
        raise OSError("no door")

    monkeypatch.setattr(PeerService, "settle", settle)
    with pytest.raises(OSError, match="no door"):
        asyncio.run(store_service.serve(store))
    assert not (tmp_path / "s").exists()


def test_list_fails(monkeypatch: pytest.MonkeyPatch, store: StoreSettings) -> None:
    """Of sealed namespaces, when the store is already open."""
    closed: list[Store] = []
    close = Store.close

    def closing(opened: Store) -> None:
        closed.append(opened)
        close(opened)

    def add_to_list(*_: object) -> None:
        raise OSError("no list")

    monkeypatch.setattr(Store, "close", closing)
    monkeypatch.setattr(store_service, "add_to_list", add_to_list)
    with pytest.raises(OSError, match="no list"):
        store_service.open_store(store)
    assert len(closed) == 1
