"""The engine's side of the cache store: every call has a price limit, and every failure is a miss with its reason.

Reading is on the way to the first token, so a turn has one small budget of time without progress for all of it; bytes
that arrive earn more. After a failure the breaker keeps turns away, at no cost, while a probe in the background waits
for the store to answer again. What is read is held against its digest before anyone sees it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
from kvasir import errors
from kvasir.aio_store_client import AioStoreClient
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.digest import Digest

from inference_svc.service_data import Miss, MissReason

_LOG = structlog.get_logger(__name__)
_MAX_BLOCK_HASHES = 10_000
_BROUGHT = (cachestore_pb2.ORIGIN_IMPORT, cachestore_pb2.ORIGIN_PULL)
_PROBE_TIMEOUT_S = 1.0
_FIRST_PROBE_DELAY_S = 0.1
_MAX_PROBE_DELAY_S = 1.0

T = TypeVar("T")


class StoreMiss(Exception):
    """The store could not serve a read, or not in time."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.detail)
        self.miss = miss


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version of a line. Version 0 with no manifest: the line has none."""

    version: int
    manifest: Digest | None
    parent_version: int
    kv_identity_hash: str = ""
    is_brought: bool = False  # by an archive or from another store: no engine of this one computed it


NO_HEAD = Head(0, None, 0)


@dataclass(frozen=True, slots=True)
class AgentHeads:
    """The head of the line that was asked for, and of the agent's line of another KV identity that was used last."""

    ours: Head
    foreign: Head | None


class Budget:
    """The time that one turn may lose to the store without progress; received bytes earn more of it."""

    def __init__(self, seconds: float, min_bytes_per_s: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._allowed_s = seconds
        self._min_bytes_per_s = min_bytes_per_s
        self._clock = clock
        self.spent_s = 0.0

    @property
    def remaining_s(self) -> float:
        return max(self._allowed_s - self.spent_s, 0.0)

    def earn(self, received_bytes: int) -> None:
        """A store that sends faster than `min_bytes_per_s` is not slow, however much there is to send."""
        self._allowed_s += received_bytes / self._min_bytes_per_s

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the block, even if it fails."""
        began = self._clock()
        try:
            yield
        finally:
            self.spent_s += self._clock() - began


class Breaker:
    """Keeps calls away from a store that failed, until a probe in the background finds it answering."""

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        self._probe = probe
        self._prober: asyncio.Task[None] | None = None
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.closed.set()

    @property
    def is_open(self) -> bool:
        return self.opened.is_set()

    def trip(self) -> None:
        if not self.is_open:
            self.closed.clear()
            self.opened.set()
            self._prober = asyncio.create_task(self._until_it_answers())
            _LOG.warning("store.unreachable")

    async def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)

    def reset(self) -> None:
        """The store was found answering."""
        if self.is_open:
            self.opened.clear()
            self.closed.set()
            _LOG.info("store.reachable")

    async def _until_it_answers(self) -> None:
        delay_s = _FIRST_PROBE_DELAY_S
        while self.is_open:
            await asyncio.sleep(delay_s)
            try:
                await asyncio.wait_for(self._probe(), _PROBE_TIMEOUT_S)
            except (errors.Unavailable, errors.DeadlineExceeded, TimeoutError):
                delay_s = min(2 * delay_s, _MAX_PROBE_DELAY_S)
            except errors.KvasirError:
                break  # it refuses, so it answers
            except Exception:  # noqa: BLE001 - it has no reader but the log
                # A prober that ends would leave the breaker open for good.
                _LOG.exception("store.probe_failed")
                delay_s = min(2 * delay_s, _MAX_PROBE_DELAY_S)
            else:
                break
        self.reset()


class RemoteCache:
    """One namespace of one cache store, seen from the engine."""

    def __init__(self, client: AioStoreClient, namespace: str = "") -> None:
        """`client` carries the engine's credential at the store, which binds the namespace. It must not retry reads
        by itself: a turn has no time for that. `namespace`: the one that it must be; empty: whichever it is.
        """
        self._client = client
        self._namespace = namespace
        self.problem = ""  # why this store must not be used, once it has been asked
        self._breaker = Breaker(self._probe)

    @property
    def is_reachable(self) -> bool:
        """False from a failure until the store answers again. Says nothing about a store that was never asked."""
        return not self._breaker.is_open

    async def answers(self) -> bool:
        """Ask now, briefly. Finds a store that is back before the breaker's own probe does."""
        try:
            await asyncio.wait_for(self._probe(), _PROBE_TIMEOUT_S)
        except (errors.KvasirError, TimeoutError):
            return False
        except Exception:  # noqa: BLE001 - whatever it answered, it is no store that can be used
            _LOG.exception("store.answer_not_understood")
            return False
        self._breaker.reset()
        return True

    async def until_reachable(self) -> None:
        await self._breaker.closed.wait()

    async def until_unreachable(self) -> None:
        await self._breaker.opened.wait()

    async def close(self) -> None:
        await self._breaker.close()
        await self._client.close()

    # --- reading: a failure is a StoreMiss ---

    async def heads(self, agent_id: str, kv_identity_hash: str, budget: Budget) -> AgentHeads | None:
        """The agent's newest versions; None when there is no such agent."""
        try:
            agent = await self._read(lambda: self._client.get_agent(agent_id), budget)
        except errors.NotFound:
            return None
        with _reading("the store's answer about the agent"):
            lines = [head_of(line) for line in agent.lines]
        ours = next((line for line in lines if line.kv_identity_hash == kv_identity_hash), NO_HEAD)
        return AgentHeads(ours, next((line for line in lines if line.kv_identity_hash != kv_identity_hash), None))

    async def manifest(self, agent_id: str, head: Head, budget: Budget) -> bytes:
        """Bytes of a version's manifest, equal to their digest."""
        try:
            _, data = await self._read(
                lambda: self._client.get_snapshot(
                    agent_id, head.kv_identity_hash, head.version, timeout_s=budget.remaining_s
                ),
                budget,
            )
        except errors.NotFound as error:
            raise StoreMiss(Miss(MissReason.BLOB_MISSING, f"version {head.version} is gone")) from error
        if head.manifest is not None and Digest.of(data) != head.manifest:
            raise StoreMiss(Miss(MissReason.BLOB_DAMAGED, f"manifest {head.manifest}: other bytes were received"))
        return data

    async def read_blobs(self, digests: Sequence[Digest], budget: Budget) -> tuple[list[bytes], Miss | None]:
        """The longest prefix of the blobs that arrived whole and right within the budget, and why not all of them."""
        blobs: list[bytes] = []
        try:
            async with contextlib.aclosing(self._client.get_blobs(digests)) as arriving:
                while len(blobs) < len(digests):
                    _, data = await self._read(lambda: anext(arriving), budget)
                    budget.earn(len(data))
                    blobs.append(bytes(data))
        except StoreMiss as error:
            return blobs, error.miss
        except errors.NotFound as error:
            return blobs, _miss(error)
        return blobs, None

    async def find_prefix(self, kv_identity_hash: str, block_hashes: Sequence[str], budget: Budget) -> list[Digest]:
        """Digests of the longest stored prefix of a chain that may be shared."""
        asked = block_hashes[:_MAX_BLOCK_HASHES]
        try:
            found = await self._read(
                lambda: self._client.find_prefix(kv_identity_hash, asked, timeout_s=budget.remaining_s), budget
            )
        except errors.NotFound as error:
            raise StoreMiss(_miss(error)) from error
        return found[: len(asked)]

    # --- writing: a failure is a KvasirError, and no turn waits for it longer than it likes ---

    async def write_tensors(self, files: Sequence[bytes], timeout_s: float) -> tuple[list[Digest], int]:
        """Make tensor files durable; their digests in order, and the bytes that had to be sent."""
        self._check_usable()
        digests = [Digest.of(data) for data in files]
        there: list[int] = []
        progress = await self._noting(
            self._client.put_blobs(
                dict(zip(digests, files, strict=True)),
                on_progress=lambda now: there.append(now.bytes_done),
                timeout_s=timeout_s,
            )
        )
        return digests, progress.bytes_total - there[0]

    async def renew(self, digests: Sequence[Digest], timeout_s: float) -> None:
        """Keep blobs that no manifest names for another grace period. Those that are gone stay so."""
        await self._noting(self._client.find_missing(digests, timeout_s=timeout_s))

    async def commit(self, agent_id: str, manifest: bytes, parent_version: int, timeout_s: float) -> Head:
        """Make a manifest the next version of the agent's line. Raises Conflict when the head is not its parent."""
        self._check_usable()
        digest = await self._noting(self._client.put_manifest(manifest, timeout_s=timeout_s))
        version = await self._noting(self._client.commit(agent_id, digest, parent_version, timeout_s=timeout_s))
        return head_of(version)

    # --- how a call is made ---

    async def _probe(self) -> None:
        found = (await self._client.get_capabilities()).namespace
        self.problem = ""
        if self._namespace and found != self._namespace:
            # Whoever mixed up two token files would mix up two namespaces' memories.
            self.problem = f"the store's token is bound to namespace {found!r}, expected {self._namespace!r}"
            _LOG.error("store.wrong_namespace", expected=self._namespace, found=found)
            raise errors.PermissionDenied(self.problem, reason="WRONG_NAMESPACE")

    def _check_usable(self) -> None:
        if self.problem:
            raise errors.PermissionDenied(self.problem, reason="WRONG_NAMESPACE")

    async def _read(self, call: Callable[[], Awaitable[T]], budget: Budget) -> T:
        """One read within the budget. Raises NotFound as it is and anything else as StoreMiss."""
        if self._breaker.is_open:
            raise StoreMiss(Miss(MissReason.STORE_UNREACHABLE, "the store failed a moment ago"))
        if self.problem:
            raise StoreMiss(Miss(MissReason.STORE_REFUSED, self.problem))
        if (given_s := budget.remaining_s) <= 0:
            raise StoreMiss(Miss(MissReason.STORE_TIMEOUT, "the turn's budget for the store is spent"))
        try:
            with budget.spending():
                async with asyncio.timeout(given_s):
                    return await call()
        except errors.Unavailable as error:
            self._breaker.trip()
            raise StoreMiss(_miss(error)) from error
        except (TimeoutError, errors.DeadlineExceeded):
            # A call that was left the last few milliseconds says nothing about the store.
            if given_s >= budget.seconds / 2:
                self._breaker.trip()
            raise StoreMiss(
                Miss(MissReason.STORE_TIMEOUT, "no answer within the turn's budget for the store")
            ) from None
        except errors.NotFound:
            raise
        except (errors.KvasirError, StopAsyncIteration, ValueError) as error:
            raise StoreMiss(_miss(error)) from error

    async def _noting(self, call: Awaitable[T]) -> T:
        """A store that is away trips the breaker."""
        try:
            return await call
        except (errors.Unavailable, errors.DeadlineExceeded):
            self._breaker.trip()
            raise


def head_of(snapshot: cachestore_pb2.SnapshotVersion) -> Head:
    """A line's newest version as the store tells it."""
    return Head(
        snapshot.version,
        Digest.from_proto(snapshot.manifest),
        snapshot.parent_version,
        snapshot.kv_identity_hash,
        is_brought=snapshot.origin in _BROUGHT,
    )


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """A store that answers nonsense is a miss too."""
    try:
        yield
    except ValueError as error:
        raise StoreMiss(Miss(MissReason.STORE_REFUSED, f"{what} is malformed: {error}")) from error


_REASONS: tuple[tuple[type[Exception], MissReason], ...] = (
    (errors.Unavailable, MissReason.STORE_UNREACHABLE),
    (errors.DeadlineExceeded, MissReason.STORE_TIMEOUT),
    (errors.NotFound, MissReason.BLOB_MISSING),
    (errors.DataLoss, MissReason.BLOB_DAMAGED),
)


def _miss(error: Exception) -> Miss:
    reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), MissReason.STORE_REFUSED)
    named = error.metadata.get("digest", "") if isinstance(error, errors.KvasirError) else ""
    return Miss(reason, f"{type(error).__name__}{f' (blob {named[:12]}…)' if named else ''}")
