"""The options of `kvasir up` and the services, each from a flag, the environment, the settings file or the default."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.cli.failures import WrongUsage
from kvasir.cli.fleet.elsewhere import check_options
from kvasir.cli.running import checks
from kvasir.cli.running.checks import GivenModel
from kvasir.cli.running.home import Home
from kvasir.cli.settings.settings_file import TOP, read_file
from kvasir.options.finding import ENVIRONMENT, FILE, FLAG, ConfigError, Found, Given, environment, find, settings_of
from kvasir.options.up import SERVICES, UpTable, service_flags

Places = Mapping[str, Mapping[str, Given]]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a `kvasir up`, read and checked."""

    home: Home
    up: UpTable = field(default_factory=UpTable)
    services: Mapping[str, Mapping[str, Found]] = field(default_factory=dict)

    def passed_on(self, service: str) -> dict[str, tuple[str, ...]]:
        """The options that the service gets on its command line. It reads the environment itself."""
        found = self.services.get(service, {})
        return {name: each.given.texts for name, each in found.items() if each.given and each.source != ENVIRONMENT}

    def value(self, service: str, name: str) -> Any:
        return self.services[service][name].value

    @property
    def models(self) -> list[GivenModel]:
        """Raises WrongUsage."""
        return checks.check_models(self.value("engine", "model"))

    @property
    def models_to_fetch(self) -> list[GivenModel]:
        """Those that are on the hub, the one for embeddings too. Raises WrongUsage."""
        models = self.models
        beside = checks.check_embeddings(self.value("engine", "embeddings"), models)
        return [model for model in (*models, *beside) if model.is_on_hub]

    @property
    def metrics(self) -> tuple[str, str, str]:
        """Where the numbers of the engine, the store and the gateway are, or nothing. Raises WrongUsage."""
        engine, store, gateway = checks.metrics_addresses(self.up.metrics_listen)
        return engine, "" if self.up.store else store, gateway

    @property
    def addresses(self) -> dict[str, str]:
        """Where something listens over TCP, by option. Raises WrongUsage."""
        named = {"--listen": self.up.listen, "--store-listen": self.up.store_listen, "--http": self.up.http}
        of_metrics = zip(checks.METRICS_OPTIONS, self.metrics, strict=True)
        return {option: address for option, address in (*named.items(), *of_metrics) if address}


def asked_of(home: Home, flags: Mapping[str, Given], config: Path | None) -> Asked:
    """The settings. Raises WrongUsage for impossible ones, and FailedPrecondition where something is missing."""
    file = read_file(config)
    try:
        up = settings_of(UpTable, find(UpTable, {FLAG: _own(flags), FILE: _own(file[TOP])}))
        services = {
            service: find(
                table,
                {
                    FLAG: _of_service(service, flags),
                    ENVIRONMENT: environment(table),
                    FILE: _of_service(service, file[TOP]) | file[service],
                },
            )
            for service, table in SERVICES.items()
        }
    except ConfigError as error:
        raise WrongUsage(str(error), field=error.field) from None
    asked = Asked(home, up, services)
    check_options(home, up)
    if up.store:
        _check_no_store_options(flags, file)
    _check(asked, [name for name in flags if name not in _own_names()])
    return asked


def _check_no_store_options(flags: Mapping[str, Given], file: Places) -> None:
    """Raise WrongUsage for an option of the store, where none starts."""
    said = [*({**file[TOP], **flags}).items(), *file["store"].items()]
    for name, given in said:
        if name in file["store"] or list(service_flags().get(name, {})) == ["store"]:
            raise WrongUsage.of(given.named, "it is the store's, and with --store none starts here")


def _own_names() -> set[str]:
    return {name.replace("_", "-") for name in UpTable.__dataclass_fields__}


def _own(said: Mapping[str, Given]) -> dict[str, Given]:
    return {name.replace("-", "_"): given for name, given in said.items() if name in _own_names()}


def _of_service(service: str, said: Mapping[str, Given]) -> dict[str, Given]:
    """The flags that are this service's options, by its names and in its words. Raises ConfigError."""
    found = {}
    for name, given in said.items():
        option = service_flags().get(name, {}).get(service)
        if option is None or option.about.up is None:
            continue
        try:
            texts = tuple(option.about.up.convert(each) if each else "" for each in given.texts)
        except ValueError as error:
            raise ConfigError(f"{given.named}: {error}", given.named) from None
        if texts:
            found[option.name] = Given(texts, given.named)
    return found


def _check(asked: Asked, flags: Iterable[str]) -> None:
    """The rules that no table has alone. Raises WrongUsage, and FailedPrecondition where something is missing."""
    up = asked.up
    if up.no_http and up.http:
        raise WrongUsage("--http and --no-http: give one of them", field="--no-http")
    of_gateway = [f"--{name}" for name in flags if list(service_flags()[name]) == ["gateway"]]
    if up.no_http and of_gateway:
        raise WrongUsage(f"{of_gateway[0]} is the HTTP gateway's, and --no-http starts none", field=of_gateway[0])
    neighbour = asked.value("engine", "neighbour")
    checks.check_installed("store", "engine", gateway=bool(up.http), neighbour=neighbour)
    models = asked.models
    checks.check_aliases(asked.value("gateway", "alias"), models)
    checks.check_exact_layers(asked.value("engine", "kv_exact_layers"), asked.value("engine", "kv_policy"), models)
    checks.check_peers({name: asked.value("engine", name) for name in checks.PEER_OPTIONS})
    checks.check_addresses(asked.addresses, up.tls_cert, up.tls_key)
    checks.check_traces(asked.value("engine", "traces_to"))
    checks.check_embeddings(asked.value("engine", "embeddings"), models)
