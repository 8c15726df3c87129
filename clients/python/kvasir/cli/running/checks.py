"""The settings of `kvasir up`, checked before anything starts. Starts nothing and makes nothing."""

import contextlib
import importlib.util
import json
import re
import shlex
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvasir.address import TCP_FORMS, Address, AddressError, parse_address
from kvasir.cli.failures import WrongUsage
from kvasir.cli.running.holding import claimer
from kvasir.errors import FailedPrecondition
from kvasir.options.engine import EngineTable
from kvasir.options.table import options_of
from kvasir.options.texts import texts_of, value_of

# As the engine names them.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Of each service what the command line and the other one do not need; its extra has its name.
_PACKAGES = {"store": ("structlog", "spake2"), "engine": ("structlog", "mlx")}
_GATEWAY_PACKAGES = ("kvasir_gateway", "starlette", "uvicorn")
_NEIGHBOUR_PACKAGE = "smg_grpc_proto"
_LAST_PORT = 65535
SHIPPED_MODELS = ("kvasir-tiny", "kvasir-tiny-wedlm")  # the first one serves where nobody names a model
_TRACES_PACKAGE = "opentelemetry"
_EXACT = "fp"
PEER_OPTIONS = ("peer", "peer_store", "peer_token_file", "peer_ca_file")
METRICS_OPTIONS = ("--metrics-listen", "--metrics-listen, of the store", "--metrics-listen, of the gateway")


@dataclass(frozen=True, slots=True)
class GivenModel:
    """One --model: a directory, the name of a model that ships, or a repository of the hub."""

    name: str
    path: str

    @property
    def is_on_hub(self) -> bool:
        return is_repository(self.path) and not Path(self.path).expanduser().is_dir()


def is_repository(text: str) -> bool:
    """Whether it is a name of the hub: OWNER/NAME."""
    return _REPOSITORY.fullmatch(text) is not None


def has_gateway() -> bool:
    """Whether the packages of the HTTP gateway are installed."""
    return all(importlib.util.find_spec(name) is not None for name in _GATEWAY_PACKAGES)


def check_installed(*services: str, gateway: bool = False, neighbour: bool = False) -> None:
    """Raise FailedPrecondition where a service (store, engine), or the gateway or neighbour, is not installed."""
    wanted = dict.fromkeys(name for service in services for name in _PACKAGES[service])
    wanted |= dict.fromkeys(_GATEWAY_PACKAGES if gateway else ())
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        what, extra = (f"the {services[0]} is", services[0]) if len(services) == 1 else ("the services are", "all")
        text = f"{what} not installed ({', '.join(missing)} missing); install kvasir[{extra}]"
        raise FailedPrecondition(text, reason="NOT_INSTALLED")
    if neighbour and importlib.util.find_spec(_NEIGHBOUR_PACKAGE) is None:
        raise FailedPrecondition(
            f"--neighbour: {_NEIGHBOUR_PACKAGE} is missing; install kvasir[neighbour]", reason="NOT_INSTALLED"
        )


def check_models(given: Sequence[str]) -> list[GivenModel]:
    """The models, as NAME=PATH or PATH. Raises WrongUsage for one that cannot be, and for two of one name."""
    models = [check_model(item) for item in given]
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise WrongUsage.of("--model", f"two models are named {twice!r}; give them other names: NAME=PATH")
    return models


def check_aliases(given: Mapping[str, str], models: Sequence[GivenModel]) -> None:
    """Raise WrongUsage unless each is of a model that is given (or the shipped one), and of a new name."""
    known = [model.name for model in models] or [SHIPPED_MODELS[0]]
    for name, model in given.items():
        if model not in known:
            raise WrongUsage.of("--alias", f"expected NAME= one of {', '.join(known)}, got {f'{name}={model}'!r}")
        if name in known:
            raise WrongUsage.of("--alias", f"{name!r} is a model's own name")


def check_embeddings(given: str, models: Sequence[GivenModel]) -> list[GivenModel]:
    """The model that only makes embeddings, if one is given. Raises WrongUsage for one that cannot be."""
    if not given:
        return []
    beside = check_model(given, "--embeddings")
    if beside.name in ([model.name for model in models] or [SHIPPED_MODELS[0]]):
        raise WrongUsage.of("--embeddings", f"a model is named {beside.name!r}; give NAME=PATH")
    return [beside]


def check_model(item: str, option: str = "--model") -> GivenModel:
    """One model, as NAME=PATH or PATH. Raises WrongUsage for one that cannot be."""
    name, equals, path = item.partition("=")
    if not (equals and _MODEL_NAME.fullmatch(name)):
        name, path = "", item
    if (directory := Path(path).expanduser()).is_dir():
        if not (directory / "config.json").is_file():
            raise WrongUsage.of(option, f"{directory} has no config.json")
        return GivenModel(name or directory.name, path)
    if path not in SHIPPED_MODELS and not is_repository(path):
        expected = f"a directory, a repository OWNER/NAME, or {' or '.join(SHIPPED_MODELS)}"
        raise WrongUsage.of(option, f"expected {expected}, got {path!r}")
    return GivenModel(name or path, path)


def check_exact_layers(text: str, policy: str | None, models: Sequence[GivenModel]) -> None:
    """Raise WrongUsage unless it is "last" or indexes of layers of the first model."""
    words = [word.strip() for word in text.split(",")] if text else []
    option = "--kv-exact-layers"
    if bad := next((word for word in words if word != "last" and not (word.isascii() and word.isdigit())), ""):
        raise WrongUsage(f'{option}: expected "last" or indexes, got {bad!r}', field=option)
    if words and policy == _EXACT:
        raise WrongUsage.of(option, "under fp every layer is exact already")
    count = _layer_count(models[0]) if models else 0
    if count and (far := next((word for word in words if word != "last" and int(word) >= count), "")):
        raise WrongUsage.of(option, f"the model has layers 0 to {count - 1}, and no {far}")


def _layer_count(model: GivenModel) -> int:
    """From the model's configuration; 0 where it does not have it, or lies on the hub."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        config = json.loads((Path(model.path).expanduser() / "config.json").read_text())
        return int(config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers") or 0)
    return 0


def check_engine_option(name: str, given: object) -> None:
    """Raise WrongUsage for a value that this option of the engine cannot have; None is left out."""
    option = options_of(EngineTable)[name]
    try:
        if given is not None:
            value_of(option, texts_of(option, given))
    except ValueError as error:
        raise WrongUsage.of(option.flag, error) from None


def check_peers(given: Mapping[str, Mapping[str, object]]) -> None:
    """Raise WrongUsage for an option (`PEER_OPTIONS`) of a peer without an address, and for a peer that could not be
    given a turn."""
    every = [
        (f"--{name.replace('_', '-')}", key, str(value)) for name, of in given.items() for key, value in of.items()
    ]
    names = {name for option, name, _ in every if option == "--peer"}
    for option, name, value in every:
        if name.rpartition("/")[2] not in names:  # tokens may be of a NAMESPACE/NAME
            raise WrongUsage.of(option, f"expected NAME=…, with --peer NAME=ADDRESS; got {name}={value}")
    _check_peers(every)


def _check_peers(given: Sequence[tuple[str, str, str]]) -> None:
    has = {(option, name.rpartition("/")[2]) for option, name, _ in given}
    for option, name, value in given:
        if option.endswith("-file") and not Path(value).is_file():
            raise WrongUsage.of(option, f"{value}: there is no such file")
        if option != "--peer":
            continue
        try:
            address = parse_address(value)
        except AddressError as error:
            raise WrongUsage.of(option, error) from None
        if address.socket_path is None and ("--peer-token-file", name) not in has:
            raise WrongUsage.of(option, f"{value} wants a token: --peer-token-file {name}=FILE")
        if not address.is_loopback and ("--peer-ca-file", name) not in has:
            raise WrongUsage.of(option, f"{value} is another machine: --peer-ca-file {name}=FILE")


def metrics_addresses(text: str) -> tuple[str, str, str]:
    """Of the engine, of the store at the next port, of the gateway behind it; none for no text. Raises WrongUsage."""
    if not text:
        return "", "", ""
    address = _host_and_port(text, "--metrics-listen")
    if address.port + 2 > _LAST_PORT:
        raise WrongUsage.of("--metrics-listen", "it needs two more ports above it")
    engine, store, gateway = (str(replace(address, port=address.port + more)) for more in range(3))
    return engine, store, gateway


def _field(option: str) -> str:
    """The option itself, of one that is told with whose address it is."""
    return option.partition(",")[0]


def check_traces(endpoint: str) -> None:
    """Raise FailedPrecondition where traces are wanted and the packages are missing."""
    if endpoint and importlib.util.find_spec(_TRACES_PACKAGE) is None:
        text = "OpenTelemetry is not installed; install kvasir[traces]"
        raise FailedPrecondition.of("--traces-to", text, reason="NOT_INSTALLED")


def check_addresses(addresses: dict[str, str], tls_cert: Path | None, tls_key: Path | None) -> None:
    """Raise WrongUsage for addresses (by option) that are none, that meet, or that other machines reach without TLS."""
    taken: dict[int, str] = {}
    for option, text in addresses.items():
        address = _host_and_port(text, option)
        if other := taken.get(address.port):
            raise WrongUsage(f"{option}: {other} has port {address.port} already", field=_field(option))
        taken[address.port] = option
        if not address.is_loopback:
            _check_public(option, text, tls_cert)
    _check_tls(tls_cert, tls_key)


def _check_public(option: str, text: str, tls_cert: Path | None) -> None:
    if option == "--http" or option.startswith("--metrics-listen"):
        what = f"{option}: {text} is open to other machines, without TLS; use 127.0.0.1:PORT"
        raise WrongUsage(what, field=_field(option))
    if tls_cert is None:
        raise WrongUsage.of(option, f"{text} is open to other machines: TLS is needed, --tls-cert and --tls-key")


def _check_tls(cert: Path | None, key: Path | None) -> None:
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise WrongUsage("--tls-cert and --tls-key: give both or neither", field="--tls-cert" if cert else "--tls-key")
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not path.exists():
            raise WrongUsage.of(option, f"{path}: there is no such file")
    if key.stat().st_mode & 0o077:
        remedy = f"run: chmod 600 {shlex.quote(str(key))}"
        raise FailedPrecondition(f"--tls-key: others can read {key}; {remedy}", reason="KEY_READABLE")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise WrongUsage.of("--tls-cert", f"{cert} and {key} are no certificate and its key ({error.reason})") from None


def _host_and_port(text: str, option: str) -> Address:
    try:
        address = parse_address(text, TCP_FORMS)
    except ValueError as error:
        raise WrongUsage.of(option, error) from None
    if address.socket_path is not None:
        raise WrongUsage.of(option, "expected HOST:PORT; leave it out for a Unix socket")
    if address.port == 0:
        raise WrongUsage.of(option, "name a port, so that others can find it")
    return address


def check_free(text: str, option: str) -> None:
    """Raise FailedPrecondition if something listens on this host and port."""
    address = _host_and_port(text, option)
    family = _family(address.host)
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise _address_in_use(text, option, error.strerror) from None
    if sys.platform != "darwin":
        return
    # It binds there beside a program that listens on all addresses, and would take its local callers.
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect((address.host, address.port))
        raise _address_in_use(text, option, "a program answers there")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _address_in_use(text: str, option: str, why: str | None) -> FailedPrecondition:
    why = claimer(parse_address(text).port) or why
    what = f"{option}: cannot listen on {text}: {why}; stop what is there or choose another port"
    return FailedPrecondition(what, reason="ADDRESS_IN_USE", field=_field(option))


def claim_given(listen: str, option: str) -> socket.socket | None:
    """As `claim`. Raises FailedPrecondition if another home has it; another program's UDP port is no harm."""
    claimed = claim(listen)
    if claimed is None and claimer(parse_address(listen).port):
        raise _address_in_use(listen, option, None)
    return claimed


def claim(listen: str) -> socket.socket | None:
    """Keeps a gateway's port for one home, until it is closed: the gateway listens only once its engine is there, and
    another home would take the port, too. It is the UDP port of this number. None where it is in use."""
    address = parse_address(listen)
    claimed = socket.socket(_family(address.host), socket.SOCK_DGRAM)
    try:
        claimed.bind((address.host, address.port))
    except OSError:
        claimed.close()
        return None
    return claimed


def is_free(text: str, option: str) -> bool:
    """Whether nothing listens on this host and port."""
    try:
        check_free(text, option)
    except FailedPrecondition:
        return False
    return True


def check_socket_free(path: Path) -> None:
    """Raise FailedPrecondition if a program listens on this Unix socket. A socket that a dead one left is no harm."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise FailedPrecondition(f"{path}: another program listens there", reason="ADDRESS_IN_USE")
