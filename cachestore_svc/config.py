"""Configuration of the cache store: options of the command line, then KVASIR_STORE_… of the environment, then defaults.

Peers come from a file of their own, because they are a list: `pairing/peers_file.py`.
"""

from pathlib import Path
from typing import Annotated, Literal

from kvasir.address import check_endpoint, check_operators_address
from kvasir.server.serving import Listening
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cachestore_svc.records import MIB, StoreConfig
from cachestore_svc.sealing.sealed_list import read_list


class ConfigError(ValueError):
    """The configuration cannot be used. The message says what to do."""


class StoreSettings(BaseSettings):
    """Every setting of the store. Each field says what it does."""

    model_config = SettingsConfigDict(env_prefix="KVASIR_STORE_", extra="forbid", frozen=True)

    data_dir: Path
    """Where everything is kept. Made (0700) when it does not exist."""
    listen: str = ""
    """unix:/path, host:port or [v6]:port. Needed to serve."""
    engine_listen: str = ""
    """unix:/path, a second address for the engines of this machine: their calls wait behind no crowd at the first."""
    credentials_file: Path | None = None
    """Which callers are admitted, and in which roles. Needed beyond a Unix socket."""
    tls_cert_file: Path | None = None
    """PEM certificate. Needed beyond this machine."""
    tls_key_file: Path | None = None
    """Its key, readable by its owner only."""
    tls_client_ca_file: Path | None = None
    """PEM certificates of clients that may connect at all (mutual TLS)."""
    peers_file: Path | None = None
    """Other stores: which agents may be pulled from them, and which may read here. Absent: none yet."""
    seal_key_file: Path | None = None
    """The master key that opens sealed namespaces: 64 hex digits, readable by its owner only. Not beside the data."""
    seal_keychain: str = ""
    """The master key's name in the operating system's keychain. Needs kvasir[keychain]."""
    sealed_file: Path | None = None
    """Lists the sealed namespaces, a line each: one whose key record is gone from the data is refused, and never plain.
    Not beside the data. `keys new` and `keys rotate` add to it. Absent: none yet."""
    last_runs_dir: Path = Path("~/.local/state/kvasir/stores")
    """Where the last commit of each store is noted, outside its data. A start refuses data that are older: an old copy
    was put back, and what engines were promised since is lost."""
    accept_older: bool = False
    """Start with such a copy all the same, once; it is the newest from then on."""
    quota_bytes: Annotated[int, Field(ge=1)] | None = None
    """Blob bytes that a namespace may hold. None: only the disk limits it."""
    namespace_quota_bytes: dict[str, Annotated[int, Field(ge=1)] | None] = {}
    """Quotas of some namespaces, before the one of all; as JSON in the environment, null for none."""
    evict_heads: bool = False
    """Whether a full quota may remove the newest version of an unpinned, long-unused line. Off: writes are refused."""
    free_disk_reserve_bytes: Annotated[int, Field(ge=0)] = 256 * MIB
    """Writes are refused when they would leave less than this on the disk."""
    ballast_bytes: Annotated[int, Field(ge=0)] = 16 * MIB
    """A file given up when the disk is full, so that deletes still have room for the index. 0: none."""
    max_blob_bytes: Annotated[int, Field(ge=1)] = 256 * MIB
    """A larger blob is refused."""
    grace_period_s: Annotated[float, Field(ge=0)] = 3600.0
    """How long a blob that nothing names is kept before it is removed."""
    retained_versions: Annotated[int, Field(ge=1, le=1000)] = 8
    """Versions kept per line, unless the agent says otherwise."""
    expires_after_s: Annotated[float, Field(ge=60)] | None = None
    """An agent that nobody used for so long is deleted, unless its label kvasir.expires_after says otherwise or it is
    pinned. Counted while the store runs. None: it stays."""
    namespace_expires_after_s: dict[str, Annotated[float, Field(ge=60)] | None] = {}
    """The same of some namespaces, before the one of all; as JSON in the environment, null for never."""
    write_budget_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of blobs that may be written in a day (UTC), for the sake of an SSD; those of index and journal, one or two
    hundred kilobytes for a turn, come on top. None: they are only counted."""
    write_budget_over: Literal["tell", "refuse"] = "tell"
    """What happens beyond the budget. tell: it is said. refuse: tensors are refused until midnight UTC; engines keep in
    memory what they cannot store, and lose it if they end before."""
    scrub_bytes_per_s: Annotated[int, Field(ge=0)] = 8 * MIB
    """How fast every blob is hashed again in the background. What is damaged is fetched from a peer that has it.
    0: never."""
    scrub_every_s: Annotated[float, Field(gt=0)] = 7 * 86_400.0
    """The rest between two such passes."""
    event_history: Annotated[int, Field(ge=1)] = 10_000
    """Events kept per namespace for watchers that come back."""
    gc_interval_s: Annotated[float, Field(gt=0)] = 600.0
    """Garbage is collected this often."""
    read_buffer_bytes: Annotated[int, Field(ge=1)] = 128 * MIB
    """Bytes that all readers together may have waiting to be sent."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A caller or peer that neither sends nor takes anything for so long in the middle of a transfer is given up."""
    move_patience_s: Annotated[float, Field(gt=0)] = 30.0
    """An agent stays here when the store that it was to move to is silent for so long before it has all of it."""
    stop_grace_s: Annotated[float, Field(ge=0)] = 5.0
    """How long running calls may go on after SIGTERM."""
    metrics_listen: str = ""
    """127.0.0.1:PORT: Prometheus metrics and /healthz over HTTP, to this machine only. Empty: none."""
    traces_to: str = ""
    """http://127.0.0.1:4317: OpenTelemetry (OTLP over gRPC) gets spans of turns, with counts and never a text. Empty:
    none. Needs kvasir[traces]."""
    audit_file: Path | None = None
    """Where one JSON line says who did what that needs a privilege; see `kvasir audit`. None: nowhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least of what is logged."""
    log_format: Literal["console", "json"] = "console"
    """For people, or for programs. Prompt text, tokens and credentials are in neither."""

    @field_validator("traces_to")
    @classmethod
    def _is_endpoint(cls, given: str) -> str:
        return check_endpoint(given) if given else given

    @field_validator("metrics_listen")
    @classmethod
    def _is_loopback(cls, given: str) -> str:
        return check_operators_address(given) if given else given

    def store_config(self) -> StoreConfig:
        """What a store is opened with. Raises FailedPrecondition (NAMESPACE_SEALED): `sealed_file` cannot be used."""
        return StoreConfig(
            data_dir=self.data_dir,
            default_quota_bytes=self.quota_bytes,
            namespace_quota_bytes=self.namespace_quota_bytes,
            evict_heads=self.evict_heads,
            free_disk_reserve_bytes=self.free_disk_reserve_bytes,
            ballast_bytes=self.ballast_bytes,
            max_blob_bytes=self.max_blob_bytes,
            grace_period_s=self.grace_period_s,
            retained_versions=self.retained_versions,
            event_history=self.event_history,
            write_budget_bytes=self.write_budget_bytes,
            refuses_beyond_budget=self.write_budget_over == "refuse",
            default_expires_after_s=self.expires_after_s,
            namespace_expires_after_s=self.namespace_expires_after_s,
            sealed_namespaces=read_list(self.sealed_file),
            last_runs_dir=self.last_runs_dir,
            accept_older=self.accept_older,
        )

    def listening(self) -> Listening:
        return Listening(
            address=self.listen,
            credentials_file=self.credentials_file,
            tls_cert_file=self.tls_cert_file,
            tls_key_file=self.tls_key_file,
            tls_client_ca_file=self.tls_client_ca_file,
            second_address=self.engine_listen,
        )


def read_settings(arguments: dict[str, object]) -> StoreSettings:
    """Settings from the command line's arguments (those given) over the environment. Raises ConfigError."""
    try:
        return StoreSettings(**{name: value for name, value in arguments.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(in_words(error)) from None


def in_words(error: ValidationError) -> str:
    """Which fields are wrong, and what was expected."""
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    )
