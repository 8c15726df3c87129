"""The home of one `kvasir up`: the paths of its data, sockets, logs and tokens, and its services' addresses."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.address import AddressError, parse_address
from kvasir.credentials import (
    CredentialFileError,
    check_own_directory,
    gateway_mark,
    read_token,
    replace_private_text,
)
from kvasir.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:  # else with its first client: services begin before `kvasir up` has imported gRPC
    from kvasir.clients import InferenceClient, StoreClient, Tls

DEFAULT_HOME = Path("~/.kvasir")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a service listens, and the files that a client of it needs."""

    address: str  # "unix:/path", "host:port" or "[v6]:port"
    token_file: Path | None = None
    ca_file: Path | None = None

    @property
    def tls(self) -> "Tls | None":
        from kvasir.clients import Tls

        return None if self.ca_file is None else Tls(self.ca_file)

    def token(self) -> str | None:
        """The bearer token. Raises CredentialFileError when others can read its file."""
        return None if self.token_file is None else read_token(self.token_file)

    def store_client(self, timeout_s: float = 10.0) -> "StoreClient":
        """A client of the store here, which connects with its first call."""
        from kvasir.clients import StoreClient

        return StoreClient.connect(
            self.address, token=self.token(), tls=self.tls, retry_reads=False, timeout_s=timeout_s
        )

    def engine_client(self, timeout_s: float = 10.0) -> "InferenceClient":
        from kvasir.clients import InferenceClient

        return InferenceClient.connect(self.address, token=self.token(), tls=self.tls, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class Running:
    """The facts that a running `kvasir up` writes into `run/up.json`: pids (0: no process), addresses, files."""

    pid: int
    store: str
    engine: str
    token_file: str = ""  # empty where a Unix socket wants none
    ca_file: str = ""
    store_pid: int = 0
    engine_pid: int = 0
    is_ready: bool = False  # all services were ready once
    http: str = ""  # HOST:PORT; empty without a gateway
    http_url: str = ""  # what clients of OpenAI's API take as their base
    http_pid: int = 0
    http_remark: str = ""  # why there is no gateway, or not at its usual port, though nobody wanted that
    metrics: Mapping[str, str] = field(default_factory=dict)  # by service, HOST:PORT of its metrics and /healthz
    store_elsewhere: Mapping[str, str] | None = None  # of a store that is not of this home: its token_file and ca_file


class _Below:
    """A path below the home, as an attribute of it."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, home: "Home", _type: type) -> Path:
        return home.root.joinpath(*self._names)


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one home directory."""

    root: Path
    store_data = _Below("store")
    seal_key_file = _Below("seal.key")  # the master key of sealed namespaces, if it was made there
    sealed_file = _Below("sealed-namespaces")  # lists the sealed namespaces of the home's store
    engine_state = _Below("engine")
    run = _Below("run")
    gateway_state = _Below("gateway")
    prove = _Below("prove")  # of `kvasir prove`: its key, and the finished steps of a proof that was ended
    logs = _Below("logs")
    tokens = _Below("tokens")
    credentials_file = _Below("credentials.toml")
    peers_file = _Below("peers.toml")
    up_lock_file = _Below("run", "up.lock")  # locked by a `kvasir up` that lives, and by nothing else
    services_lock_file = _Below("run", "services.lock")  # locked while any service of a `kvasir up` lives: inherited
    running_file = _Below("run", "up.json")

    def command(self, words: str) -> str:
        """`kvasir` with these words for this home, as a person types it."""
        home = "" if self.root == DEFAULT_HOME.expanduser() else f"--home {shlex.quote(str(self.root))} "
        return f"kvasir {home}{words}"

    def gateway_mark(self) -> str:
        """Of its gateway; empty before that has made its key."""
        try:
            return gateway_mark(self.gateway_state, self.root)
        except CredentialFileError:
            return ""

    def seal_options(self) -> tuple[str, ...]:
        """The key's options for a program of the store. Without them, it reads KVASIR_STORE_SEAL_… variables."""
        return ("--seal-key-file", str(self.seal_key_file)) if self.seal_key_file.exists() else ()

    def sealed_options(self, data_dir: Path | None = None) -> tuple[str, ...]:
        """The list, for a program of the home's own store. Another store's is KVASIR_STORE_SEALED_FILE."""
        is_ours = data_dir is None or data_dir.resolve() == self.store_data.resolve()
        return ("--sealed-file", str(self.sealed_file)) if is_ours else ()

    def audit_file(self, service: str) -> Path:
        """The audit of a service; older ones beside it end in .1, .2, …"""
        return self.root / "audit" / f"{service}.jsonl"

    def socket_address(self, service: str) -> str:
        return f"unix:{self.run / f'{service}.sock'}"

    def make(self) -> None:
        """Make the directories, 0700. Raises InvalidArgument when no socket could be there."""
        try:
            parse_address(self.socket_address("engines"))
        except AddressError as error:
            raise InvalidArgument.of("--home", error) from None
        for directory in (self.root, self.run, self.logs, self.tokens):
            try:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                why = "a file is there" if isinstance(error, FileExistsError) else error.strerror
                text = f"{directory} cannot be made: {why}"
                raise FailedPrecondition.of("--home", text, reason="HOME_REFUSED") from None
            check_own_directory(directory)
            if directory.stat().st_mode & 0o077:
                remedy = f"run: chmod 700 {shlex.quote(str(directory))}"
                raise FailedPrecondition(f"{directory}: others can enter it; {remedy}")
        if sys.platform == "darwin":  # Spotlight would read gigabytes of memories
            (self.root / ".metadata_never_index").touch(mode=0o600)

    def running(self) -> Running | None:
        """The facts of this home's last `kvasir up`; None if there was none, or if this home is a copy of that one.
        Raises for a home that we may not read, which may run all the same."""
        try:
            found = json.loads(self.running_file.read_text())
            known = Running(**{each.name: found[each.name] for each in fields(Running) if each.name in found})
            return known if found.get("home", "") in ("", self._directory()) else None
        except PermissionError:
            check_own_directory(self.root)
            raise
        except (OSError, ValueError, TypeError):
            return None

    def write_running(self, running: Running) -> None:
        # A copy of the home has this file too, and nothing runs there.
        replace_private_text(self.running_file, json.dumps({**asdict(running), "home": self._directory()}))

    def _directory(self) -> str:
        """Device and number of the home's directory, which a copy has not."""
        at = self.root.stat()
        return f"{at.st_dev}:{at.st_ino}"

    def endpoint(self, service: str) -> Endpoint:
        """The endpoint of a service of this home: that of `up.json`, or else its socket."""
        running = self.running()
        address: str = getattr(running, service) if running is not None else ""
        if running is None or not address:
            return Endpoint(self.socket_address(service))
        files = (running.token_file, running.ca_file)
        if service == "store" and running.store_elsewhere is not None:
            files = (running.store_elsewhere.get("token_file", ""), running.store_elsewhere.get("ca_file", ""))
        elif address.startswith("unix:"):
            return Endpoint(address)
        return Endpoint(address, *(Path(file) if file else None for file in files))


def has_files(folder: Path) -> bool:
    """Whether it holds more than a mount point or a new file system does. A folder that cannot be read may."""
    try:
        return any(not each.name.startswith(".") and each.name != "lost+found" for each in folder.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True
