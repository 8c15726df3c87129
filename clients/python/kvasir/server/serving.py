"""How both services are served: where they may listen, and the grpc.aio servers that they run in.

A service listens on a Unix socket (0600 in a directory 0700), on loopback TCP with a credential file, or elsewhere with
TLS and a credential file. Otherwise it does not start, and names the remedy. The server limits everything that a peer
could make grow: message and metadata size, streams, idle time. It stops gracefully on SIGTERM and SIGINT.

gRPC hands calls over in the order of arrival, before the caller is known. So a crowd at an address delays every caller
there, and a store can have a second address for its engines, with a gRPC server of its own. Paired stores come in by a
door of their own: mutual TLS, whose certificates change while it is open."""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvasir.address import Address, AddressError, parse_address
from kvasir.certificates import read_certificates
from kvasir.credentials import CredentialFileError, Credentials, read_credentials, read_private_text
from kvasir.server.interceptors import MAX_RPCS_PER_PRINCIPAL, Authentication, CallerOfCertificate, Errors
from kvasir.server.operating import health
from kvasir.server.operating.audit import Audit
from kvasir.server.operating.durations import RpcCounts
from kvasir.server.operating.traces import Traces
from kvasir.waits import PATIENCE_S, WORK_S

_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
# The store's largest request names 10,000 digests; a frame of a blob has 1 MiB.
MAX_MESSAGE_BYTES = 2 << 20
_MAX_ANSWER_BYTES = 4 << 20
_LOOKAHEAD_BYTES = 256 << 10
_MAX_METADATA_BYTES = 16 << 10
# More calls than one credential may have, so that its next call is refused with a reason. Of calls beyond this number
# gRPC's clients keep some waiting, and end the others as if the connection had broken.
_MAX_STREAMS_PER_CONNECTION = MAX_RPCS_PER_PRINCIPAL + 64
# gRPC counts a call before the caller is known. Authentication limits known callers; this number is the backstop for a
# burst of strangers' calls while they are being refused.
MAX_RPCS_AT_ALL = 8192

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# A descriptor per connection and per file that is read or written. macOS refuses more than the second.
_FILES = (65_536, 10_240)

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", _MAX_ANSWER_BYTES),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    # How much of a message may arrive before a handler reads it. gRPC would estimate the bandwidth and allow
    # megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", _MAX_STREAMS_PER_CONNECTION),
    # A connection without calls is closed. Its client connects again in a millisecond.
    ("grpc.max_connection_idle_ms", round(WORK_S * 1000)),
    # A connection that does not begin HTTP/2.
    ("grpc.server_handshake_timeout_ms", round(PATIENCE_S * 1000)),
    # Finds a peer that vanished without a FIN. Clients may ping this often without being disconnected.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two services on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
)


class RefusedToStart(ValueError):
    """The service must not listen there. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where to listen, and what protects it. Files, because secrets have no place in arguments or the environment."""

    # "unix:/path", "host:port" or "[v6]:port".
    address: str
    credentials_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    # Certificates of the clients that may connect (mutual TLS).
    tls_client_ca_file: Path | None = None
    # A second address, "unix:/path" or none: a crowd at the first does not delay its calls.
    second_address: str = ""


@dataclass(frozen=True, slots=True)
class MutualTls:
    """A door for those who show a certificate: where it is, the key and certificate (PEM) that it shows, and the
    certificates (PEM) of who may come in, both read again for every connection."""

    address: str  # HOST:PORT
    identity: Callable[[], tuple[bytes, bytes]]
    clients: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Reports:
    """Where a service reports its calls, and the names under which it does."""

    new_request_id: Callable[[], str]
    traces: Traces = field(default_factory=Traces)
    audit: Audit = field(default_factory=Audit)


class EdgeServer:
    """A service under Kvasir's rules: add() its servicer, start(), run_until_stopped(). Each address has a server of
    its own; `.grpc` is the first's. Limits of callers hold for all together."""

    def __init__(
        self,
        listening: Listening,
        service_names: Sequence[str],
        allowed_roles: Mapping[str, frozenset[str]],
        reports: Reports,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        caller_of_certificate: CallerOfCertificate | None = None,
    ) -> None:
        """Raises RefusedToStart when `listening` is not allowed. Made inside the event loop that will run it.

        `max_message_bytes`: the largest request; gRPC itself refuses a larger one (RESOURCE_EXHAUSTED) unread.
        `caller_of_certificate`: who shows a certificate at the door that open_door() opens."""
        self._listening = listening
        self._service_names = tuple(service_names)
        self._address, credentials = check_listening(listening)
        self._second_path = _second_path(listening, self._address)
        self.authentication = Authentication(credentials, allowed_roles, max_message_bytes, caller_of_certificate)
        self.rpcs = RpcCounts()
        turnstiles = self.authentication.turnstiles
        self._errors = Errors(reports.new_request_id, self.rpcs, reports.traces, reports.audit, turnstiles)
        self._max_message_bytes = max_message_bytes
        self._services: list[tuple[Callable[[Any, grpc.aio.Server], None], Any]] = []
        self._servers = [self._new_server() for _ in range(1 if self._second_path is None else 2)]
        self.grpc = self._servers[0]
        self._door: grpc.aio.Server | None = None
        self._health = health.HealthService()
        self.add(health_pb2_grpc.add_HealthServicer_to_server, self._health)
        for server in self._servers:
            _add_reflection((*self._service_names, health.SERVICE_NAME), server)
        # Set when a stop was requested: streams without an end of their own watch it.
        self.stopping = asyncio.Event()
        self.address = str(self._address)
        self._sockets: list[Path] = []  # ours, from the moment that they are bound

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> None:
        """Serve it at every address. `register`: the generated `add_…Servicer_to_server`."""
        self._services.append((register, servicer))
        for server in self._servers:
            register(servicer, server)

    async def start(self) -> None:
        """Listens. Health "" is SERVING at once; the services' after set_ready(True). Raises RefusedToStart."""
        self.set_ready(False)
        try:
            self._bind()
            for server in self._servers:
                await server.start()
        except BaseException:
            await self._close(0)  # an address that takes connections and never answers is worse than none
            raise
        self._health.set([""], serve=True)

    async def reload_credentials(self) -> int:
        """Read the credential file again, if there is one; returns how many calls ended by it. Raises
        CredentialFileError for a file that cannot be used: then the old credentials hold."""
        file = self._listening.credentials_file
        return 0 if file is None else self.authentication.take(await asyncio.to_thread(read_credentials, file))

    def set_ready(self, is_ready: bool) -> None:
        """What health answers for the service names: a supervisor and load balancers wait for it."""
        self._health.set(self._service_names, serve=is_ready)

    async def run_until_stopped(self, grace_s: float) -> None:
        """Serve until SIGTERM, SIGINT or stop(); then let running RPCs end for `grace_s`, and cancel the rest."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.stopping.wait()
        finally:
            self._health.end()
            await self._close(grace_s)

    async def close(self) -> None:
        """End what start() began, if run_until_stopped() has not. Running RPCs are cancelled."""
        await self._close(0)

    async def open_door(self, tls: MutualTls) -> str:
        """Serve at one more address, to clients with a certificate; returns the address. Raises RefusedToStart."""
        await self.close_door()
        server = self._new_server()
        for register, servicer in self._services:
            register(servicer, server)

        def today() -> Any:
            return grpc.ssl_server_certificate_configuration([tls.identity()], tls.clients())

        credentials = grpc.dynamic_ssl_server_credentials(today(), today, require_client_authentication=True)
        try:
            port = server.add_secure_port(tls.address, credentials)
        except RuntimeError:
            raise RefusedToStart(f"cannot listen on {tls.address}: is another process there?") from None
        await server.start()
        self._door = server
        return str(Address(host=parse_address(tls.address).host, port=port))

    async def close_door(self, grace_s: float = 1.0) -> None:
        """End the connections at the door, if there is one; calls that are ending may end within the grace."""
        door, self._door = self._door, None
        if door is not None:
            await door.stop(grace_s)

    def stop(self) -> None:
        """Request a graceful stop. Safe to repeat."""
        self.stopping.set()

    async def _close(self, grace_s: float) -> None:
        while self._sockets:  # first: later they may be those of the next service here
            self._sockets.pop().unlink(missing_ok=True)
        self.authentication.turnstiles.open()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers), self.close_door(grace_s))

    def _new_server(self) -> grpc.aio.Server:
        return grpc.aio.server(
            interceptors=(self._errors, self.authentication),
            options=(*_OPTIONS, ("grpc.max_receive_message_length", self._max_message_bytes)),
            maximum_concurrent_rpcs=MAX_RPCS_AT_ALL,
        )

    def _bind(self) -> None:
        if self._address.socket_path is None:
            self.address = str(self._bind_tcp())
        else:
            self._bind_socket(self.grpc, self._address.socket_path)
        if self._second_path is not None:
            self._bind_socket(self._servers[1], self._second_path)

    def _bind_tcp(self) -> Address:
        tls = _server_tls(self._listening)
        try:
            if tls:
                port = self.grpc.add_secure_port(str(self._address), tls)
            else:
                port = self.grpc.add_insecure_port(str(self._address))
        except RuntimeError:
            raise RefusedToStart(f"cannot listen on {self._address}: is another process there?") from None
        return Address(host=self._address.host, port=port)

    def _bind_socket(self, server: grpc.aio.Server, path: Path) -> None:
        prepare_socket_path(path)
        # The directory keeps others out already; the mask leaves no moment in which the socket itself is open.
        before = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError:
            raise RefusedToStart(f"cannot listen on unix:{path}") from None
        finally:
            os.umask(before)
        self._sockets.append(path)
        path.chmod(0o600)


def _add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Reflection as v1alpha and as v1. grpcio has the first alone; their messages are the same bytes."""
    names = (*names, reflection.SERVICE_NAME)  # v1 has no descriptor here, and clients request a listed one by name
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_REFLECTION_V1, handlers),))


def check_listening(listening: Listening) -> tuple[Address, Credentials | None]:
    """Where to listen and the credentials to require; None on a Unix socket without a file. Raises RefusedToStart."""
    try:
        address = parse_address(listening.address)
        _check_protection(listening, address)
        file = listening.credentials_file
        return address, None if file is None else read_credentials(file)
    except (AddressError, CredentialFileError) as error:
        raise RefusedToStart(str(error)) from None


def _second_path(listening: Listening, first: Address) -> Path | None:
    if not listening.second_address:
        return None
    try:
        path = parse_address(listening.second_address).socket_path
    except AddressError as error:
        raise RefusedToStart(str(error)) from None
    if path is None or path == first.socket_path:
        raise RefusedToStart(f"{listening.second_address}: the second address must be a Unix socket of its own")
    return path


def _check_protection(listening: Listening, address: Address) -> None:
    has_tls = listening.tls_cert_file is not None and listening.tls_key_file is not None
    if (listening.tls_cert_file is None) != (listening.tls_key_file is None):
        raise RefusedToStart("TLS needs both a certificate and its key: give both files or neither")
    if listening.tls_client_ca_file is not None and not has_tls:
        raise RefusedToStart("a client CA needs TLS: give a certificate and its key too")
    if address.socket_path is not None:
        if has_tls:
            raise RefusedToStart("a Unix socket has no TLS: leave out the certificate, or listen on host:port")
        return
    if listening.credentials_file is None:
        raise RefusedToStart(
            f"{address} is TCP, which any process here can reach: give a credential file, or listen on unix:/path"
        )
    if not address.is_loopback and not has_tls:
        raise RefusedToStart(
            f"{address} can be reached from other machines: give a TLS certificate and its key too, "
            "or listen on 127.0.0.1 or unix:/path"
        )


def prepare_socket_path(path: Path) -> None:
    """Make the directory (0700), and remove a socket that nobody listens on. Raises RefusedToStart otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory = path.parent.stat()
    if directory.st_uid != os.getuid() or directory.st_mode & 0o077:
        raise RefusedToStart(
            f"{path.parent}: owner {directory.st_uid}, mode {stat.S_IMODE(directory.st_mode):04o}: others can enter; "
            "the directory of a socket must be yours, with mode 0700"
        )
    if path.is_socket():
        _remove_stale_socket(path)
    elif os.path.lexists(path):
        raise RefusedToStart(f"unix:{path}: something that is not a socket is there")


def _remove_stale_socket(path: Path) -> None:
    # gRPC would unlink it without asking, and so would remove the socket of a running service.
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RefusedToStart(f"unix:{path}: {error.strerror or error}") from None
        else:
            raise RefusedToStart(f"unix:{path}: another process is listening there")


def _server_tls(listening: Listening) -> grpc.ServerCredentials | None:
    if listening.tls_cert_file is None or listening.tls_key_file is None:
        return None
    try:
        key = read_private_text(listening.tls_key_file).encode()
        certificate = read_certificates(listening.tls_cert_file)
        client_ca = None if listening.tls_client_ca_file is None else read_certificates(listening.tls_client_ca_file)
    except (OSError, ValueError) as error:
        raise RefusedToStart(f"TLS: {error}") from None
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=client_ca, require_client_auth=client_ca is not None
    )


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a service's main coroutine: on uvloop where it is installed (twice the bytes per second), else on asyncio."""
    settle_limits()
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


def settle_limits() -> int:
    """Set both limits of this process. Returns how many files it may open."""
    forbid_core_dumps()
    return raise_file_limit()


def raise_file_limit() -> int:
    """Let this process open as many files as the system lets it; the usual 256 or 1,024 are few for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _FILES:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else max(_FILES)


def forbid_core_dumps() -> None:
    """A core dump holds memories, tokens and the keys of sealed namespaces in plain."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def give_memory_back(large_bytes: int) -> None:
    """Let glibc return what was freed, at once where it has so many bytes, whatever its own settings are. It keeps an
    arena for each of many threads, and large blocks for the next ones: sixty exports of 15 MiB left half of a gigabyte.
    Others are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
        mallopt(_M_TRIM_THRESHOLD, 32 << 20)
