"""The engine's stores by namespace: opened with its tokens, waited for, and with other tokens after a reload."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import structlog
from kvasir.clients import AioStoreClient, Tls
from kvasir.credentials import DEFAULT_NAMESPACE, CredentialFileError, further_engine_tokens, read_engine_tokens
from kvasir.errors import KvasirError
from kvasir.server.reloading import TakenInPart
from kvasir.waits import LOOK_S

from inference_svc.config import EngineSettings
from inference_svc.memory.store.connection import StoreClients
from inference_svc.memory.store.files import StoreFiles
from inference_svc.memory.store.patience import PROBE_TIMEOUT_S
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model.model_host import ModelHost
from inference_svc.served_model import ServedModel

_LOG = structlog.get_logger(__name__)


def open_stores(settings: EngineSettings) -> dict[str, RemoteCache]:
    """The cache store by namespace; a wrong file costs its own namespace its store. Raises CredentialFileError."""
    if not settings.store:
        return {}
    named, wrong = read_engine_tokens(settings.store_token_file)
    if wrong:
        raise CredentialFileError("; ".join(wrong))
    further, wrong = read_engine_tokens(_further_files(settings))
    for each in wrong:
        _LOG.error("store.token_file_not_used", problem=each)
    tokens: dict[str, str | None] = {**further, **named}
    if settings.store.startswith("unix:"):
        tokens.setdefault(DEFAULT_NAMESPACE, None)
    return {namespace: _new_store(settings, namespace, token) for namespace, token in tokens.items()}


async def until_it_answers(store: RemoteCache, give_up_at: float, clock: Callable[[], float]) -> None:
    """Query once, and again until that time of the clock, unless its answer is that it must not be used."""
    while True:
        if await store.connection.answers() or store.connection.problem is not None or clock() >= give_up_at:
            return
        await asyncio.sleep(LOOK_S)


async def reload_store_tokens(
    settings: EngineSettings, stores: dict[str, RemoteCache], host: ModelHost[ServedModel]
) -> int:
    """Read the tokens again, and take up new namespaces, each by itself; no call ends by it. Raises TakenInPart, naming
    each file that is wrong: if it cannot be read, nothing changes for its namespace; if its token is another
    namespace's or none of the store's, a known namespace has no store until the store takes it, and a new one is not
    taken up. A store that is away is queried when it is back.
    """
    tokens, unread = read_engine_tokens({**_further_files(settings), **settings.store_token_file})
    wrong = [f"{each}; for its namespace nothing changes" for each in unread]
    wrong += filter(None, await asyncio.gather(*(_take(settings, stores, host, *each) for each in tokens.items())))
    if wrong:
        raise TakenInPart("; ".join([*wrong, "the other tokens are in force"]))
    return 0


async def _take(
    settings: EngineSettings, stores: dict[str, RemoteCache], host: ModelHost[ServedModel], namespace: str, token: str
) -> str:
    """Take a token. Returns what is wrong with it, and what is in force then."""
    if (known := stores.get(namespace)) is not None:
        await known.connection.renew_token(token)
        problem = known.connection.problem
        return f"{problem.in_words}; until then its store is not used" if problem is not None else ""
    store, now = _new_store(settings, namespace, token), None
    if await store.connection.answers():
        with contextlib.suppress(KvasirError, TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                now = await store.events.newest()
    if store.connection.problem is not None:
        await store.connection.close()
        return f"{store.connection.problem.in_words}; the namespace was not taken up"
    stores[namespace] = store
    if host.served is not None:
        host.served.add_store(namespace, store, now)
    return ""


def _new_store(settings: EngineSettings, namespace: str, token: str | None) -> RemoteCache:
    def connected() -> AioStoreClient:
        tls = Tls(settings.store_ca_file) if settings.store_ca_file is not None else None
        return AioStoreClient.connect(settings.store, token=token, tls=tls, retry_reads=False)

    return RemoteCache(
        StoreClients(connected(), connected(), connected()),
        namespace,
        StoreFiles(settings.store_data_dir, namespace) if settings.store_data_dir is not None else None,
        {**_further_files(settings), **settings.store_token_file}.get(namespace),
    )


def _further_files(settings: EngineSettings) -> dict[str, Path]:
    return further_engine_tokens(settings.store_token_dir) if settings.store_token_dir is not None else {}
