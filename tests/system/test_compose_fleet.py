"""compose/fleet: what Docker would start fits together and to Kvasir's own commands. No Docker runs here."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvasir.cli.caller import Caller
from kvasir.cli.fleet import serving_store
from kvasir.cli.running.home import Home
from kvasir.cli.running.own_credentials import make_credentials
from kvasir.credentials import read_token

from tests.cli.running import in_process
from tests.running import in_memory
from tests.running.system_fixtures import ROOT

FOLDER = ROOT / "compose" / "fleet"
FLEET: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = FLEET["services"]
ENGINES = [name for name in SERVICES if name.startswith("engine-")]
_ADDRESS = re.compile(r"127\.0\.0\.1:(\d+)")


def words(service: str) -> list[str]:
    return list(SERVICES[service]["command"])


def option(service: str, name: str) -> str:
    [value] = [word.partition("=")[2] for word in words(service) if word.startswith(f"--{name}=")]
    return value


@pytest.fixture
def home() -> Any:
    made = Home(in_memory.home())
    made.make()
    make_credentials(made)
    yield made
    shutil.rmtree(made.root)


def test_the_engines_options_are_those_of_up(home: Home) -> None:
    """Each command goes as far as to the store, which is asked before anything starts."""
    assert len(ENGINES) == 3
    for engine in ENGINES:
        given = [word.replace(option(engine, "store"), "127.0.0.1:9") for word in words(engine)]
        ended = in_process("--home", home.root, *given, "--json")
        assert ended.value["error"]["reason"] == "STORE_UNREACHABLE", ended
        assert option(engine, "store") == option("store-1", "listen")


def test_the_stores_options_are_those_of_store_serve(home: Home) -> None:
    verb, serve, *given = words("store-1")
    assert (verb, serve) == ("store", "serve")
    asked = serving_store._asked(Caller(home), serving_store._flags(given))
    assert asked.value("store", "catalog") == "postgresql://kvasir@127.0.0.1:5433/kvasir"
    assert asked.value("store", "blobs") == "s3://kvasir/fleet"
    assert asked.value("store", "metrics_listen") == "127.0.0.1:9480"


def test_the_gateway_knows_every_engine(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, argv: begun.append(list(argv)))
    assert in_process("--home", home.root, *words("gateway")).code == 0
    [argv] = begun
    known = [argv[place + 1] for place, word in enumerate(argv) if word == "--engine"]
    assert known == [option(each, "listen") for each in ENGINES]


def test_nginx_has_the_file_that_fleet_config_prints() -> None:
    given = [part for each in ENGINES for part in ("--engine", option(each, "listen"))]
    assert in_process("fleet", "config", "nginx", *given).out == (FOLDER / "nginx.conf").read_text()


def test_prometheus_reads_every_service_that_has_numbers() -> None:
    listening = [option(each, "metrics-listen") for each in (*ENGINES, "store-1")]
    listening.append(SERVICES["gateway"]["environment"]["KVASIR_GATEWAY_METRICS_LISTEN"])
    [job] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert [each["targets"] for each in job["static_configs"]] == [listening]


def test_every_mounted_file_volume_and_service_is_there() -> None:
    used = set()
    for name, service in SERVICES.items():
        for source, target, *mode in (each.split(":") for each in service.get("volumes", ())):
            used.add(source)
            is_file = source.startswith(".")
            assert source in FLEET["volumes"] or (FOLDER / source).is_file(), (name, source)
            assert mode == ["ro"] or not is_file
            assert target.startswith("/")
        for needed, how in service.get("depends_on", {}).items():
            is_once = SERVICES[needed].get("restart") == "no"
            assert how["condition"] == ("service_completed_successfully" if is_once else "service_healthy"), name
    assert used >= set(FLEET["volumes"])
    for each in (FOLDER / "grafana-sources.yml", FOLDER / "grafana-dashboards.yml"):
        assert yaml.safe_load(each.read_text())["apiVersion"] == 1


def test_each_service_has_few_rights_a_fixed_image_and_a_check_of_its_health() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["network_mode"] == "host", "its addresses are the host's loopback"
        assert "ports" not in service
        assert "build" in service or re.search(r":v?\d+\.?\d*", service["image"]), name
        assert "healthcheck" in service or service["image"] == "kvasir:latest", "its image has one"


def test_nothing_listens_beyond_this_machine_and_no_port_is_taken_twice() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    assert "0.0.0.0" not in text
    listening = [option(each, name) for each in (*ENGINES, "store-1") for name in ("listen", "metrics-listen")]
    listening += [option("gateway", "listen"), option("prometheus", "web.listen-address"), "127.0.0.1:8650"]
    assert len({*listening}) == len(listening)
    assert all(_ADDRESS.fullmatch(each) for each in listening)


def test_the_secrets_are_made_once_each_for_one_user_and_fit_to_each_other(tmp_path: Path) -> None:
    for each in ("postgres", "store", "s3", "grafana"):
        (tmp_path / each).mkdir()
    me = str(os.geteuid())
    users = dict.fromkeys(("KVASIR_USER", "S3_USER", "POSTGRES_USER_ID", "GRAFANA_USER"), me)
    command = ["sh", str(FOLDER / "secrets.sh"), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, **users})
    made = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert sorted(made) == ["grafana/password", "postgres/password", "s3/keys", "store/bucket", "store/pgpass"]
    assert made["store/pgpass"] == f"127.0.0.1:5433:*:kvasir:{made['postgres/password']}\n"
    assert len(made["postgres/password"]) == 64
    keys = dict(line.split("=") for line in made["s3/keys"].split())
    assert f"aws_secret_access_key = {keys['ROOT_SECRET_KEY']}\n" in made["store/bucket"]
    assert f"aws_access_key_id = {keys['ROOT_ACCESS_KEY']}\n" in made["store/bucket"]
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o400 for name in made)
    subprocess.run(command, check=True, env={**os.environ, **users})
    assert made == {name: (tmp_path / name).read_text() for name in made}, "they stay as they are"


def test_each_home_gets_the_credentials_of_the_stores_home_and_nothing_else_of_it(tmp_path: Path, home: Home) -> None:
    store, homes = tmp_path / "store", tmp_path / "homes"
    shutil.copytree(home.root, store / ".kvasir", ignore=shutil.ignore_patterns("*.sock"))
    (store / ".kvasir" / "seal.key").write_text("secret")
    (homes / "engine-1").mkdir(parents=True)
    for _ in range(2):  # at each start
        command = ["sh", str(FOLDER / "join.sh"), str(store), str(homes)]
        subprocess.run(command, check=True, env={**os.environ, "KVASIR_USER": str(os.geteuid())})
    joined = Home(homes / "engine-1" / ".kvasir")
    assert read_token(joined.tokens / "engine.token") == read_token(home.tokens / "engine.token")
    assert sorted(each.name for each in joined.root.iterdir()) == ["credentials.toml", "tokens"]
    assert all(each.stat().st_mode & 0o077 == 0 for each in joined.root.rglob("*"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed here")
def test_promtool_accepts_both_files_of_prometheus() -> None:
    for file in (FOLDER / "prometheus.yml", FOLDER.parent / "metrics" / "prometheus.yml"):
        subprocess.run(["promtool", "check", "config", str(file)], check=True, capture_output=True)
