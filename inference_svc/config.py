"""Configuration of the inference service: options of the command line, then KVASIR_ENGINE_… of the environment, then
defaults.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from kvasir.address import check_endpoint, check_operators_address
from kvasir.clients import Tls
from kvasir.credentials import DEFAULT_NAMESPACE
from kvasir.errors import InvalidArgument
from kvasir.server.serving import Listening
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from inference_svc.kv.policy import AUTO, PolicyRequest
from inference_svc.memory.publishing.committing import PublishingLimits
from inference_svc.model import kvasir_tiny
from inference_svc.turns.admission import AdmissionLimits
from inference_svc.turns.engine_parts import TurnLimits
from inference_svc.turns.outbox import ReaderLimits

GIB = 1 << 30
_COMMAND = "python -m inference_svc"
# Limits that are no options. The classes of the limits say what each means.
_KV_BACKLOG = 4.0
_HEAD_BUDGET_S = 2.0
_STORE_MIN_BYTES_PER_S = 20e6
_SWAP_READ_BUDGET_S = 2.0
_SWAP_RENEW_S = 300.0
_REPEATED = ("store_token_file", "model", "service_admin", "peer", "peer_token_file", "peer_store", "peer_ca_file")
_Given = TypeVar("_Given")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ConfigError(ValueError):
    """The configuration cannot be used. The message says what to do."""


class EngineSettings(BaseSettings):
    """All options of the inference service. Each field explains itself."""

    model_config = SettingsConfigDict(
        env_prefix="KVASIR_ENGINE_", extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    listen: str
    """unix:/path, host:port or [v6]:port."""
    model: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=lambda: {kvasir_tiny.NAME: str(kvasir_tiny.path())}
    )
    """Directory or Hugging Face repository of a model that mlx-lm loads: PATH, or NAME=PATH, once for each model that
    may be loaded; the first is, at the start. Left out: the model that ships."""
    store: str = ""
    """Cache store: unix:/path or host:port. Empty: memories are hot only, and end with the process."""
    store_token_file: Annotated[dict[str, Path], NoDecode] = Field(default_factory=dict)
    """The engine's token at the store: PATH, or NAMESPACE=PATH, once for each namespace that is served."""
    store_token_dir: Path | None = None
    """A directory with a file engine@NAMESPACE.token for each further namespace; SIGHUP takes up those that came."""
    store_data_dir: Path | None = None
    """The store's data directory, if it is this user's and on this machine: blobs are read there, and verified. None:
    all come from the store."""
    store_ca_file: Path | None = None
    """PEM: the store's own certificate, which pins it, or the authority that signed it. Needed beyond this machine."""
    peer: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """Another engine that may take over decoding turns: NAME=ADDRESS (unix:/path or host:port), once for each."""
    peer_token_file: Annotated[dict[str, Path], NoDecode] = Field(default_factory=dict)
    """This engine's token at a peer, with role engine, or peer if its store is another one: NAME=PATH, or
    NAMESPACE/NAME=PATH, once for each."""
    peer_store: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """NAME=STORE: that peer has another store, which this engine's store knows as its peer STORE; an agent that goes to
    the one engine while it generates moves to the other store. Left out: both engines have one store."""
    peer_ca_file: Annotated[dict[str, Path], NoDecode] = Field(default_factory=dict)
    """PEM, as --store-ca-file: NAME=PATH, once for each peer that is beyond this machine."""
    drain_to: str = ""
    """NAME of the peer that takes over decoding turns when this engine stops. Empty: they end here."""
    credentials_file: Path | None = None
    """Credentials of the callers, with their names and roles. Needed beyond a Unix socket."""
    service_admin: Annotated[tuple[str, ...], NoDecode] = ()
    """NAME of a credential with role admin that may change models and see the numbers of all namespaces, once for each.
    Any other admin acts for its own namespace. The owner of the Unix socket needs no naming."""
    tls_cert_file: Path | None = None
    """PEM certificate. Needed beyond this machine."""
    tls_key_file: Path | None = None
    """Its key, readable by its owner only."""
    tls_client_ca_file: Path | None = None
    """PEM certificates of clients that may connect at all (mutual TLS)."""
    state_dir: Path = Field(default_factory=lambda: Path.home() / ".kvasir" / "engine")
    """Digests of weights are kept here by file identity, so that they are hashed once."""

    memory_gib: Annotated[float, Field(gt=0)] = 4.0
    """KV of all agents, hot and running, in GiB."""
    context_tokens: Annotated[int, Field(gt=1)] | None = None
    """Default: the model's own."""
    compute_type: Literal["float32", "float16", "bfloat16"] | None = None
    """Default: float32 on a CPU, else the model's own."""
    copy_weights: bool = False
    """Read the weights into memory, also where their files can be mapped: for files that may be cut short or written to
    while the model serves. One that is replaced by a rename does no harm."""
    batch_invariant: bool = False
    """On a GPU a reply's tokens then do not depend, to the bit, on the turns beside it: each pass decodes 16 rows, some
    of them empty. On a CPU they never do."""
    kv_policy: Literal["q4", "q4-rotated", "k8v4", "q8", "fp", "auto"] = "q4"
    """How K and V are stored, cheapest first: q4, q4-rotated (keys rotated first), k8v4, q8, fp (16 bits); or auto:
    the cheapest that answers as exact KV does, measured at the first start with a model (up to a minute or two)."""
    embeddings: str = ""
    """A model that only makes embeddings, beside the others: PATH or NAME=PATH, a directory or Hugging Face repository
    in sentence-transformers' layout (BERT, RoBERTa) or one of mlx-lm's. Empty: the loaded model makes them."""
    embedding_pooling: Literal["mean", "last"] = "mean"
    """Which of a text's last hidden rows make its embedding: the mean of all, or the last; of the loaded model, and of
    one in mlx-lm's layout. sentence-transformers' name their own."""
    kv_exact_layers: str = ""
    """Layers that stay at 16 bits: last, or indexes with commas between."""

    max_prompt_bytes: Annotated[int, Field(gt=0)] = 8 << 20
    """A larger prompt is refused. A request of more than twice this and 1 MiB is refused by gRPC, no field named."""
    max_open_prompt_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    """Prompts of all turns that wait or run."""
    max_turns: Annotated[int, Field(gt=0)] = 256
    """Turns that may wait or run; more are refused, with a time to come back."""
    max_turns_per_namespace: Annotated[int, Field(gt=0)] | None = None
    """Of those, turns of one namespace; beside others' fewer, so that a place is left. Default: three quarters."""
    max_turns_per_caller: Annotated[int, Field(gt=0)] | None = None
    """Of those, turns of one credential. Default: three quarters."""
    max_restoring_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    """Bytes that were read from the store and are not KV yet; turns wait for their part."""
    max_publishing_bytes: Annotated[int, Field(gt=0)] = 512 << 20
    """Copies of KV that wait for the store."""
    max_unread_bytes: Annotated[int, Field(gt=0)] = 256 << 10
    """A reader that leaves more of its replies unread is ended, and its place is free."""
    reader_stall_s: Annotated[float, Field(gt=0)] = 60.0
    """A reader that takes no message for so long is ended too."""
    store_budget_ms: Annotated[float, Field(ge=0)] = 250.0
    """Time without progress that a turn may lose to the store, in total."""
    store_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """How long the start waits for a store that is being started beside it. Then it goes on without."""
    commit_wait_s: Annotated[float, Field(ge=0)] = 2.0
    """How long the last message of a turn waits for the commit before it reports: pending."""
    publish_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """After so long without progress a publication fails; the memory stays hot, and is tried again."""
    keep_alive_s: Annotated[float, Field(gt=0)] | None = None
    """A model that no turn has used for so long, or up to twice as long, is unloaded; the next turn loads it again.
    Default: it stays."""
    stop_grace_s: Annotated[float, Field(ge=0)] = 10.0
    """How long running turns may go on after SIGTERM; then hot memories are stored until nothing has moved for so
    long."""
    neighbour: bool = False
    """Also serve mlx.grpc.engine.MlxEngine, at the same address, for gateways that speak it.
    Needs kvasir[neighbour]."""
    metrics_listen: str = ""
    """127.0.0.1:PORT: Prometheus metrics and /healthz over HTTP, to this machine only. Empty: none."""
    traces_to: str = ""
    """http://127.0.0.1:4317: OpenTelemetry (OTLP over gRPC) gets spans of turns, with counts and never a text. Empty:
    none. Needs kvasir[traces]."""
    audit_file: Path | None = None
    """Where one JSON line says who did what that needs a privilege; see kvasir audit. None: nowhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least of what is logged."""
    log_format: Literal["console", "json"] = "console"
    """For people, or for programs. Prompt text, tokens and credentials are in neither."""

    @field_validator("model", mode="before")
    @classmethod
    def _by_name(cls, given: object) -> object:
        """A path alone is its own name; the environment separates several by commas."""
        items = given.split(",") if isinstance(given, str) else given
        if not isinstance(items, list):
            return items
        named = [_named_model(item) for item in items if item]
        if len({name for name, _ in named}) != len(named):
            raise ValueError("two models have the same name; give them others, as NAME=PATH")
        return dict(named or [_named_model(str(kvasir_tiny.path()))])

    @field_validator("embeddings")
    @classmethod
    def _is_another(cls, given: str, info: ValidationInfo) -> str:
        if given and _named_model(given)[0] in info.data.get("model", {}):
            raise ValueError("a model has this name; give it another, as NAME=PATH")
        return given

    @field_validator("service_admin", mode="before")
    @classmethod
    def _names(cls, given: object) -> object:
        """The environment separates several by commas."""
        return tuple(name for name in given.split(",") if name) if isinstance(given, str) else given

    @field_validator("traces_to")
    @classmethod
    def _is_endpoint(cls, given: str) -> str:
        return check_endpoint(given) if given else given

    @field_validator("metrics_listen")
    @classmethod
    def _is_loopback(cls, given: str) -> str:
        return check_operators_address(given) if given else given

    @field_validator("store_token_file", mode="before")
    @classmethod
    def _by_namespace(cls, given: object) -> object:
        """PATH belongs to the default namespace; the environment separates several by commas."""
        items = given.split(",") if isinstance(given, str) else given
        if not isinstance(items, list):
            return items
        pairs = [item.rpartition("=") for item in items if item]
        return {namespace or DEFAULT_NAMESPACE: path for namespace, _, path in pairs}

    @field_validator("store_token_file", "store_token_dir")
    @classmethod
    def _has_store(cls, given: _Given, info: ValidationInfo) -> _Given:
        if given and not info.data.get("store"):
            raise ValueError("it is for a store: name that with --store, or leave this out")
        return given

    @field_validator("peer", "peer_token_file", "peer_store", "peer_ca_file", mode="before")
    @classmethod
    def _by_peer(cls, given: object) -> object:
        """NAME=VALUE; the environment separates several by commas."""
        items = given.split(",") if isinstance(given, str) else given
        if not isinstance(items, list):
            return items
        pairs = [item.partition("=") for item in items if item]
        if any(not (name and value) for name, _, value in pairs):
            raise ValueError("expected NAME=VALUE")
        return {name: value for name, _, value in pairs}

    @field_validator("drain_to")
    @classmethod
    def _is_peer(cls, given: str, info: ValidationInfo) -> str:
        if given and given not in info.data.get("peer", {}):
            raise ValueError(f"{given!r} is no peer: name it with --peer {given}=ADDRESS")
        return given

    @field_validator("kv_exact_layers")
    @classmethod
    def _are_layers(cls, given: str, info: ValidationInfo) -> str:
        try:
            PolicyRequest.parse(info.data.get("kv_policy", AUTO), given)
        except InvalidArgument as error:
            raise ValueError(error.message) from None
        return given

    @property
    def memory_budget_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def max_request_bytes(self) -> int:
        """Larger than a prompt may be, so that a prompt a little over the limit gets our error instead of gRPC's."""
        return 2 * self.max_prompt_bytes + (1 << 20)

    @property
    def admission(self) -> AdmissionLimits:
        most = -(-3 * self.max_turns // 4)
        return AdmissionLimits(
            max_turns=self.max_turns,
            max_turns_per_namespace=self.max_turns_per_namespace or most,
            max_turns_per_caller=self.max_turns_per_caller or most,
            kv_memory_bytes=self.memory_budget_bytes,
            max_open_prompt_bytes=max(self.max_open_prompt_bytes, self.max_prompt_bytes),
            max_restoring_bytes=self.max_restoring_bytes,
            max_publishing_bytes=self.max_publishing_bytes,
            kv_backlog=_KV_BACKLOG,
        )

    @property
    def publishing(self) -> PublishingLimits:
        return PublishingLimits(
            commit_wait_s=self.commit_wait_s, timeout_s=self.publish_timeout_s, head_budget_s=_HEAD_BUDGET_S
        )

    @property
    def turn_limits(self) -> TurnLimits:
        return TurnLimits(
            store_budget_s=self.store_budget_ms / 1000,
            store_min_bytes_per_s=_STORE_MIN_BYTES_PER_S,
            publish_timeout_s=self.publish_timeout_s,
            swap_read_budget_s=_SWAP_READ_BUDGET_S,
            swap_renew_s=_SWAP_RENEW_S,
            reader=ReaderLimits(self.max_unread_bytes, self.reader_stall_s),
        )

    @property
    def embedding_model(self) -> tuple[str, str] | None:
        """Name and path of the model beside the others."""
        return _named_model(self.embeddings) if self.embeddings else None

    @property
    def policy_request(self) -> PolicyRequest:
        return PolicyRequest.parse(self.kv_policy, self.kv_exact_layers)

    @property
    def listening(self) -> Listening:
        return Listening(
            address=self.listen,
            credentials_file=self.credentials_file,
            tls_cert_file=self.tls_cert_file,
            tls_key_file=self.tls_key_file,
            tls_client_ca_file=self.tls_client_ca_file,
        )

    def peer_tokens(self, name: str) -> dict[str, Path]:
        """Token files of a peer by namespace."""
        by_name = [(*key.rpartition("/")[::2], path) for key, path in self.peer_token_file.items()]
        return {namespace or DEFAULT_NAMESPACE: path for namespace, peer, path in by_name if peer == name}

    @property
    def store_tls(self) -> Tls | None:
        return Tls(self.store_ca_file) if self.store_ca_file is not None else None


def _named_model(item: str) -> tuple[str, str]:
    """NAME=PATH, or PATH, which is then its own name. A path may hold an equals sign; a name holds no slash."""
    name, equals, path = item.partition("=")
    if equals and _MODEL_NAME.fullmatch(name):
        return name, path
    if item == str(kvasir_tiny.path()):
        return kvasir_tiny.NAME, item
    return (Path(item).name if Path(item).is_dir() else item), item


def read_settings(arguments: Sequence[str]) -> EngineSettings:
    """Settings from the command line over the environment. Raises ConfigError; exits for --help and unknown options."""
    parser = argparse.ArgumentParser(prog=f"{_COMMAND} serve", description="Serve one model at a time over gRPC.")
    parser.add_argument("command", nargs="?", choices=["serve"], default="serve", help=argparse.SUPPRESS)
    for name, field in EngineSettings.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            parser.add_argument(option, dest=name, action="store_const", const=True, help=field.description)
            continue
        action = "append" if name in _REPEATED else "store"
        parser.add_argument(option, dest=name, action=action, help=field.description)
    given = vars(parser.parse_args(arguments))
    del given["command"]
    try:
        return EngineSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    problems = (
        f"--{'.'.join(map(str, each['loc'])).replace('_', '-')}: {each['msg'].removeprefix('Value error, ')}"
        for each in error.errors()
    )
    return "; ".join(problems)
