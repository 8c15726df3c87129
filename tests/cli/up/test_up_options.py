"""Every option of the services' tables arrives in the service that it belongs to, by every way that it can be given."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from kvasir.cli.running import up
from kvasir.cli.running.checks import SHIPPED_MODELS, check_models
from kvasir.cli.running.home import Home
from kvasir.cli.running.plan import Plan, plan_of
from kvasir.cli.settings.asked import Asked
from kvasir.credentials import DEFAULT_NAMESPACE
from kvasir.options import table
from kvasir.options.common import ServiceTable
from kvasir.options.finding import ENVIRONMENT, FILE, FLAG, HOME, ConfigError, read
from kvasir.options.gateway import GatewayTable
from kvasir.options.table import Option, Shape, options_of
from kvasir.options.texts import texts_of, value_of
from kvasir.options.up import SERVICES, UpTable, service_flags
from kvasir_gateway.__main__ import _settings as gateway_settings

from cachestore_svc.commands.command_line import parser as store_parser
from cachestore_svc.config import StoreSettings
from cachestore_svc.config import read_settings as store_settings
from inference_svc.config import EngineSettings
from inference_svc.config import read_settings as engine_settings
from inference_svc.model import kvasir_tiny
from tests.cli.running import Ended, in_process

Settings = Mapping[str, EngineSettings | StoreSettings | GatewayTable]
OPTIONS = [(service, each) for service, table in SERVICES.items() for each in options_of(table).values()]
# What is given where no value of the type will do. Flags have people's words.
TEXTS = {
    "model": f"other={kvasir_tiny.path()}",
    "embeddings": f"words={kvasir_tiny.path()}",
    "alias": "a=other",
    "peer": "b=unix:/tmp/kv-b",
    "peer_store": "b=studio",
    "peer_token_file": f"b={__file__}",
    "peer_ca_file": f"b={__file__}",
    "drain_to": "b",
    "kv_exact_layers": "last",
    "traces_to": "http://127.0.0.1:4317",
    "metrics_listen": "127.0.0.1:9",
    "volatile": "template-date",
    "side_calls": "none",
    "expires_after_s": "86400.0",
    "keep_alive_s": "600.0",
    "asleep_after_s": "86400.0",
    "wake_ahead_share": "0.5",
    "blobs": "s3://bucket/prefix",
    "quota_bytes": str(3 << 30),
    "catalog": "postgresql://kvasir@127.0.0.1/kvasir",
}
WORDS = {"agents-asleep-after": "1d", "expire-agents": "1d", "keep-alive": "10m", "store-quota-gib": "3"}


def text_for(option: Option) -> str:
    """A value that is not the default, as the service's text."""
    if option.name in TEXTS:
        return TEXTS[option.name]
    if option.shape is Shape.NUMBERS:
        return '{"theirs": 77, "ours": null}'
    if option.shape in (Shape.SWITCH, Shape.ANSWER):
        return "true"
    if isinstance(option.item, tuple):
        return next(text for text in option.item if text != option.default)
    return {int: "77", float: "77.5"}.get(option.item, "/tmp/kv-given")


def value_for(option: Option) -> Any:
    value = value_of(option, (text_for(option),))
    assert value != option.default
    return value


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Settings]:
    """What the services read when a `kvasir up` with these words has started them, from their command lines."""

    def of(*words: str) -> Settings:
        plans: list[Plan] = []

        async def no_group(_caller: object, plan: Plan, *_others: object) -> None:
            plans.append(plan)

        monkeypatch.setattr(up, "run_group", no_group)
        ended = in_process("--home", tmp_path / "h", "up", "--http", "127.0.0.1:7901", *words)
        assert ended.code == 0, ended.err
        return {service: each for plan in plans for service, each in read_by_services(plan)}

    return of


def read_by_services(plan: Plan) -> Iterator[tuple[str, Any]]:
    assert plan.gateway is not None
    given = vars(store_parser().parse_args(plan.store.argv()[3:]))
    yield "store", store_settings({name: given[name] for name in options_of(StoreSettings)})
    yield "engine", engine_settings(plan.engine.argv()[3:])
    yield "gateway", gateway_settings(plan.gateway.argv()[3:])


def test_every_flag_of_up_arrives_in_its_services(started: Callable[..., Settings]) -> None:
    words: list[str] = []
    for name, of_services in service_flags().items():
        option = next(iter(of_services.values()))
        is_switch = option.shape in (Shape.SWITCH, Shape.ANSWER)
        words += [f"--{name}", *([] if is_switch else [WORDS.get(name, text_for(option))])]
    settings = started(*words)
    arrived = [(service, each) for each_of in service_flags().values() for service, each in each_of.items()]
    assert len(arrived) > 25
    for service, option in arrived:
        assert getattr(settings[service], option.name) == value_for(option), (service, option.name)


def file_of(tmp_path: Path) -> tuple[Path, list[tuple[str, Option]]]:
    """A settings file with every option that can stand in one, flags at its top; and those of the services."""
    lines, of_files = list[str](), list[tuple[str, Option]]()
    for name, of_services in service_flags().items():
        option = next(iter(of_services.values()))
        lines.append(f"{name} = {_toml(option, WORDS.get(name, text_for(option)))}")
        of_files += of_services.items()
    for service in SERVICES:
        lines.append(f"[{service}]")
        for option in options_of(SERVICES[service]).values():
            if option.about.up is None and not option.about.of_home:
                lines.append(f"{option.key} = {_toml(option, text_for(option))}")
                of_files.append((service, option))
    file = tmp_path / "kvasir.toml"
    file.write_text("\n".join(lines))
    return file, of_files


def _toml(option: Option, text: str) -> str:
    if option.shape is Shape.NUMBERS:
        return "{theirs = 77}"
    if option.shape in (Shape.SWITCH, Shape.ANSWER) or (
        option.item in (int, float) and text.strip("0123456789.") == ""
    ):
        return text
    return json.dumps([text] if option.is_repeated else text)


def test_every_option_of_a_settings_file_arrives_in_its_service(
    started: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KVASIR_STORE_LAST_RUNS_DIR", raising=False)  # of `own_notes`
    file, of_files = file_of(tmp_path)
    settings = started("--config", str(file))
    assert len(of_files) > 60
    for service, option in of_files:
        expected = {"theirs": 77} if option.shape is Shape.NUMBERS else value_for(option)
        assert getattr(settings[service], option.name) == expected, (service, option.name)


def test_every_option_comes_from_the_environment_too(
    started: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = [(service, option) for service, option in OPTIONS if not option.about.of_home]
    for service, option in free:
        monkeypatch.setenv(f"KVASIR_{service.upper()}_{option.name.upper()}", text_for(option))
    settings = started()
    for service, option in free:
        assert getattr(settings[service], option.name) == value_for(option), (service, option.name)
    rows = in_process("--home", tmp_path / "h", "config", "show", "--json").value
    named = {(row["service"], row["option"]): (row["from"], row["named"], row["value"]) for row in rows}
    assert named["engine", "max-turns"] == (ENVIRONMENT, "KVASIR_ENGINE_MAX_TURNS", "77")


def test_a_flag_goes_before_the_environment_that_before_the_file_and_each_is_shown(
    started: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kvasir.toml"
    file.write_text("memory-gib = 2\ncontext-tokens = 300\nkeep-versions = 3\n[engine]\nmax-turns = 4\n")
    monkeypatch.setenv("KVASIR_ENGINE_MEMORY_GIB", "3")
    monkeypatch.setenv("KVASIR_ENGINE_CONTEXT_TOKENS", "400")
    settings = started("--config", str(file), "--memory-gib", "4")
    engine, store = settings["engine"], settings["store"]
    assert isinstance(engine, EngineSettings)
    assert (engine.memory_gib, engine.context_tokens, engine.max_turns) == (4.0, 400, 4)
    assert isinstance(store, StoreSettings)
    assert store.retained_versions == 3
    written = json.loads((tmp_path / "h" / "run" / "settings.json").read_text())
    rows = {row["option"]: (row["value"], row["from"], row["named"]) for row in written if row["service"] == "engine"}
    assert rows["memory-gib"] == ("4.0", FLAG, "--memory-gib")
    assert rows["context-tokens"] == ("400", ENVIRONMENT, "KVASIR_ENGINE_CONTEXT_TOKENS")
    assert rows["max-turns"] == ("4", FILE, f"{file}: [engine] max-turns")
    assert rows["store-data-dir"] == (str(tmp_path / "h" / "store"), HOME, "")


NOTHING = {
    "expire-agents": ("30d", "never", "store", "expires_after_s"),
    "store-quota-gib": ("3", "", "store", "quota_bytes"),
    "memory-gib": ("3", "auto", "engine", "memory_gib"),
    "kv-exact-layers": ("last", "", "engine", "kv_exact_layers"),
    "traces-to": ("http://127.0.0.1:4317", "", "gateway", "traces_to"),
    "model": (TEXTS["model"], "", "engine", "model"),
}


@pytest.mark.parametrize("flag", NOTHING)
def test_a_flag_that_says_none_goes_before_the_environment_and_the_file_too(
    flag: str, started: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_file, none, service, name = NOTHING[flag]
    option = options_of(SERVICES[service])[name]
    file = tmp_path / "kvasir.toml"
    file.write_text(f"{flag} = {json.dumps(in_file)}\n")
    variable = f"KVASIR_{service.upper()}_{name.upper()}"
    assert getattr(started("--config", str(file))[service], name) != option.default
    assert getattr(started("--config", str(file), f"--{flag}", none)[service], name) == option.default
    monkeypatch.setenv(variable, text_for(option))
    assert getattr(started(f"--{flag}", none)[service], name) == option.default
    written = json.loads((tmp_path / "h" / "run" / "settings.json").read_text())
    [row] = [row for row in written if (row["service"], row["option"]) == (service, option.key)]
    assert (row["value"], row["from"]) == ("", FLAG)


def test_what_the_home_sets_is_shown_as_the_homes_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVASIR_STORE_DATA_DIR", "/tmp/kv-other")
    monkeypatch.setenv("KVASIR_STORE_TLS_CERT_FILE", "/tmp/kv-cert")  # the home says nothing of it
    rows = in_process("--home", tmp_path / "h", "config", "show", "--json").value
    shown = {row["option"]: (row["value"], row["from"], row["named"]) for row in rows if row["service"] == "store"}
    assert shown["data-dir"] == (str(tmp_path / "h" / "store"), HOME, "")
    assert shown["tls-cert-file"] == ("/tmp/kv-cert", ENVIRONMENT, "KVASIR_STORE_TLS_CERT_FILE")


REFUSED = {
    "no option": ("memry-gib = 2", "memry-gib: there is no such option; is it 'memory-gib'?"),
    "a flag in a service's part": ("[engine]\nmemory-gib = 2", "[engine] memory-gib: it stands at the top"),
    "a service's option at the top": ("max-turns = 2", "max-turns: it stands in [engine]"),
    "the home's option": ("[store]\ndata-dir = '/tmp/x'", "[store] data-dir: `kvasir up` sets it itself"),
    "none where there is no none": ("memory-gib = ''", "memory-gib: expected a number above 0, got ''"),
    "a number that is none": ("[engine]\nmax-turns = 'many'", "max-turns: expected a whole number above 0, got 'many'"),
    "a choice that is none": ("kv-policy = 'q3'", "kv-policy: expected one of q4, q4-rotated, k8v4, q8, fp, auto"),
    "a time that is none": ("keep-alive = 10", "keep-alive: expected a time such as 90s, 10m or 2h, got '10'"),
    "several values": ("memory-gib = [1, 2]", "memory-gib: expected one value, got 2"),
    "a service that is none": ("engine = 3", "engine: expected a table, [engine]"),
    "no TOML": ("memory-gib", "--config: "),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_settings_file_is_refused_by_the_options_name_before_anything_is_made(
    refused: tuple[str, str], tmp_path: Path
) -> None:
    said, told = refused
    file = tmp_path / "kvasir.toml"
    file.write_text(said)
    ended: Ended = in_process("--home", tmp_path / "h", "up", "--config", file)
    assert (ended.code, told in ended.err) == (2, True), ended.err
    assert not (tmp_path / "h").exists()


PATHS = [each for table in (*SERVICES.values(), UpTable) for each in options_of(table).values() if each.item is Path]


@pytest.mark.parametrize("option", PATHS, ids=lambda option: option.key)
def test_an_empty_path_is_none_or_refused_and_never_the_directory_it_is_given_in(option: Option) -> None:
    if option.default in (None, {}):
        assert value_of(option, ("",)) == option.default
    else:
        with pytest.raises(ValueError, match="expected a path, got ''"):
            value_of(option, ("",))


def test_a_model_that_ships_is_taken_by_its_name_and_not_fetched() -> None:
    assert tuple(kvasir_tiny.shipped()) == SHIPPED_MODELS
    models = check_models([*SHIPPED_MODELS, f"masks={SHIPPED_MODELS[1]}", "owner/name"])
    assert [model.name for model in models] == [*SHIPPED_MODELS, "masks", "owner/name"]
    assert [model.is_on_hub for model in models] == [False, False, False, True]


def test_an_empty_path_is_refused_by_the_options_name() -> None:
    given = {"data_dir": "", "listen": "unix:/tmp/kv-never"}
    with pytest.raises(ConfigError, match=r"^--data-dir: expected a path") as refused:
        read(StoreSettings, given)
    assert refused.value.field == "--data-dir"


def test_a_path_with_an_equals_sign_is_no_namespace() -> None:
    option = options_of(SERVICES["engine"])["store_token_file"]
    for text, found in {
        "/tmp/a=b/engine.token": {DEFAULT_NAMESPACE: Path("/tmp/a=b/engine.token")},
        "ours=/tmp/a=b/engine.token": {"ours": Path("/tmp/a=b/engine.token")},
        "a=b=/tmp/engine.token": {"a=b": Path("/tmp/engine.token")},
        "ours=engine.token": {"ours": Path("engine.token")},
    }.items():
        assert value_of(option, (text,)) == found


def test_options_are_a_programs_own_first_also_where_a_class_keeps_no_annotations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from Python 3.14 on."""

    @dataclass(frozen=True, kw_only=True)
    class Some(ServiceTable):
        own: int = table.option(1, "A number.")
        other: int = table.option(2, "Another.")

    hints = get_type_hints(Some)
    monkeypatch.setattr(table, "get_type_hints", lambda _of: hints)
    del Some.__annotations__
    assert list(options_of(Some)) == ["own", "other", *options_of(ServiceTable)]


@pytest.mark.parametrize("option", [each for _, each in OPTIONS], ids=[f"{of}-{each.key}" for of, each in OPTIONS])
def test_an_options_texts_are_its_value_again(option: Option) -> None:
    value = value_for(option)
    assert value_of(option, texts_of(option, value)) == value


def test_a_store_that_reads_a_large_index_has_as_long_to_start_as_an_engine(tmp_path: Path) -> None:
    plan = plan_of(Asked(Home(tmp_path), UpTable(http="127.0.0.1:1")))
    store, engine, gateway = (each.service().ready_within_s for each in plan.started)
    assert store == engine < gateway, "a gateway waits for its engine"
