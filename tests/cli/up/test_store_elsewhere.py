"""`kvasir store serve` and `kvasir up --store`: two engines of homes without a store, on one store, over pinned TLS.

An agent goes on at the other engine as if it had never left, also after a kill -9.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from kvasir.address import accepts
from kvasir.cachestore.v1 import cachestore_pb2, cachestore_pb2_grpc
from kvasir.cli.fleet.balancers import Balancer, envoy, nginx
from kvasir.cli.running.home import Home
from kvasir.clients import InferenceClient, Reply
from kvasir.clients.inference_client_turns import place_of
from kvasir.credentials import write_private_text
from kvasir.errors import Unavailable
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.memory.store.answers import LEASE_TTL_S
from tests.cli.certificates import make_certificate
from tests.cli.running import Cli, Ended, free_port, in_process, process_exists
from tests.running import in_memory
from tests.running.waiting import eventually

PAGE = Path(__file__).parents[3] / "docs" / "pages" / "two-engines.md"
FIRST = "My name is Anna. My dog is called Rex."
QUESTIONS = ("What is my dog called?", "What is my name?", "My cat is called Tom.", "What is my cat called?")


@dataclass(frozen=True)
class Fleet:
    """A home with a store alone, and two with an engine alone."""

    store: Cli
    address: str
    certificate: Path
    engines: tuple[Cli, Cli]
    addresses: tuple[str, str]

    def start(self, engine: Cli) -> None:
        listen = self.addresses[self.engines.index(engine)]
        patience = engine.home / "kvasir.toml"  # a machine that runs other tests besides is slow, not wrong
        patience.write_text("[engine]\nstore-budget-ms = 5000\ncommit-wait-s = 10\n")
        words = self.typed("kvasir up -d --store", **{"127.0.0.1:7444": listen})
        engine.done(*words, "--no-http", "--config", patience)

    def typed(self, begin: str, **others: str) -> list[str]:
        """A command as the page has it, with the addresses and files of this test."""
        [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(begin)]
        ports = dict(zip(("127.0.0.1:7444", "127.0.0.1:7445"), self.addresses, strict=True))
        key = str(self.certificate.with_suffix(".key"))
        files = {"studio.local:7443": self.address, "studio.crt": str(self.certificate), "studio.key": key}
        known = {**ports, **files, **others}
        return [known.get(word, word) for word in line.partition(" > ")[0].split()[1:]]


def joined(store: Cli, engine: Cli) -> None:
    """Copy the credentials of the store's home, as the page says."""
    shutil.copytree(store.home / "tokens", engine.home / "tokens")
    shutil.copy(store.home / "credentials.toml", engine.home / "credentials.toml")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with ExitStack() as exits:
        homes = [Cli(in_memory.home()) for _ in range(3)]
        for each in homes:
            exits.callback(shutil.rmtree, each.home)
            exits.callback(each, "down")
        store, one, other = homes
        certificate = store.home / "studio.crt"
        address = f"localhost:{free_port()}"
        listen = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
        made = Fleet(store, address, certificate, (one, other), listen)
        subprocess.run(["openssl", *made.typed("openssl req")], check=True, capture_output=True)
        served = store.done(*made.typed("kvasir store serve"))
        assert f"`kvasir up --store {address} --store-ca-file {certificate}`" in served.out + served.err
        for each in (one, other):
            joined(store, each)
            made.start(each)
        yield made


@pytest.fixture
def alone() -> Iterator[Cli]:
    """A home with both, whose agents never leave."""
    cli = Cli(in_memory.home())
    cli.done("up", "-d", "--no-http")
    yield cli
    cli("down")
    shutil.rmtree(cli.home)


def said(cli: Cli, words: str, agent: str = "ada") -> Reply:
    """A turn at the engine of a home, once the lease of an engine that was killed has ended."""
    endpoint = Home(cli.home).endpoint("engine")
    message = [{"role": "user", "content": words}]
    given = {"messages" if words == FIRST else "append_messages": message}
    give_up = time.monotonic() + 4 * LEASE_TTL_S
    with endpoint.engine_client(timeout_s=60) as client:
        while True:
            try:
                return client.reply(agent_id=agent, sampling={"temperature": 0.0, "max_tokens": 16}, **given)
            except Unavailable as error:
                if error.reason != "AGENT_HELD_ELSEWHERE" or time.monotonic() > give_up:
                    raise
                time.sleep(0.2)


@pytest.mark.long(12)
def test_an_agent_goes_on_at_the_other_engine_as_one_that_never_left_also_after_a_kill(
    fleet: Fleet, alone: Cli
) -> None:
    one, other = fleet.engines
    stayed = [said(alone, words).token_ids for words in (FIRST, *QUESTIONS)]
    assert said(one, FIRST).token_ids == stayed[0]
    assert [said(each, words).token_ids for each, words in zip((other, one, other), QUESTIONS, strict=False)] == (
        stayed[1:4]
    )
    running = Home(other.home).running()
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)  # its `kvasir up`, which would start the engine again
    os.kill(running.engine_pid, signal.SIGKILL)
    last = said(one, QUESTIONS[3])
    assert last.token_ids == stayed[4]
    assert last.started.source == pb.CACHE_SOURCE_WARM, "it is the memory that the killed engine stored"
    fleet.start(other)


@pytest.mark.long(2)
def test_status_and_down_know_what_runs_where(fleet: Fleet) -> None:
    one, _ = fleet.engines
    said(one, FIRST)
    shown = one.done("status", "--json").value["services"]
    assert [(each["name"], each["state"], each["is_elsewhere"]) for each in shown] == [
        ("store", "ready", True),
        ("engine", "ready", False),
    ]
    (one.home / "store").mkdir(exist_ok=True)  # of an earlier `kvasir up`, on another disk than the store's
    status = one.done("status").out
    assert "elsewhere" in status
    [disk] = (line for line in status.splitlines() if line.startswith("disk: "))
    assert " free; " in disk, "how large the store's disk is, nobody here knows"
    assert [each["name"] for each in fleet.store.done("status", "--json").value["services"]] == ["store"]
    assert "`kvasir store serve` runs here" in fleet.store.done("status").out
    assert "`kvasir up` runs here" in status
    assert "store" in {each["service"] for each in _lines(fleet.store.done("logs", "--json"))}
    for home in (one, fleet.store):
        assert "ada" in home.done("agents", "ls").out
        assert home.done("agents", "history", "ada", "--json").value
    started = {row["service"] for row in one.done("config", "show", "--json").value}
    assert started == {"engine", "gateway"}
    assert f"agents' memories are at the store, {fleet.address}" in one.done("down").out
    fleet.start(one)


def _lines(ended: Ended) -> list[dict[str, Any]]:

    return [json.loads(line) for line in ended.out.splitlines()]


@pytest.mark.long(3)
def test_a_store_that_is_down_is_a_typed_error_of_the_start_and_named_by_status(tmp_path: Path) -> None:
    home, port = in_memory.home(), free_port()
    cli = Cli(home)
    try:
        store = ("store", "serve", "-d", "--listen", f"127.0.0.1:{port}")
        pid = cli.done(*store, "--json").value["store_pid"]
        assert process_exists(pid)
        again = cli(*store, "--json")
        assert (again.code, again.value["error"]["reason"]) == (4, "ALREADY_RUNNING")
        assert cli.done("down", "--json").value["ended"]
        assert not process_exists(pid)
        words = ("up", "--store", f"127.0.0.1:{port}", "--store-token-file", _token(home))
        refused = in_process("--home", tmp_path / "h", *words, "--json")
        assert (refused.code, refused.value["error"]["reason"]) == (3, "STORE_UNREACHABLE")
        told = in_process("--home", tmp_path / "h", *words).err
        assert told == (
            f"kvasir: --store: nothing answers at 127.0.0.1:{port}. Is it running? `kvasir store serve`, or "
            "`kvasir up` with --store-listen, starts one there.\n"
        ), "this home's `kvasir up`, which was asked for, starts no such store"
        assert not (tmp_path / "h").exists(), "nothing is made before the store answers"
    finally:
        cli("down")
        shutil.rmtree(home)


def _token(home: Path, name: str = "engine") -> str:
    return str(home / "tokens" / f"{name}.token")


@pytest.mark.long(3)
def test_a_wrong_token_role_certificate_or_service_is_refused_by_name_before_anything_starts(
    fleet: Fleet, tmp_path: Path
) -> None:
    other = tmp_path / "other.crt"
    make_certificate(other, tmp_path / "other.key")
    alien = tmp_path / "alien.token"
    write_private_text(alien, "t" * 40)
    pinned, own = ("--store-ca-file", str(fleet.certificate)), ("--store-token-file", _token(fleet.store.home))
    at = ("--store", fleet.address)
    cases: list[tuple[tuple[str, ...], int, str, str]] = [
        ((*at, *pinned, "--store-token-file", str(alien)), 4, "STORE_TOKEN_WRONG", "does not know the token"),
        ((*at, *pinned, "--store-token-file", _token(fleet.store.home, "client")), 4, "STORE_TOKEN_WRONG", "roles"),
        ((*at, *pinned, "--store-token-file", f"work={_token(fleet.store.home)}"), 4, "STORE_TOKEN_WRONG", "'work'"),
        ((*at, "--store-ca-file", str(other), *own), 4, "STORE_CERTIFICATE_WRONG", "shows another certificate"),
        ((*at, *own), 4, "STORE_CERTIFICATE_WRONG", "wants TLS: give its certificate"),
        (("--store", fleet.addresses[0], *own), 4, "NO_STORE_THERE", "does not answer as a store"),
        (("--store", "10.0.0.1:1", *own), 2, "WRONG_USAGE", "TLS is needed, --store-ca-file"),
        ((*at, *pinned), 2, "WRONG_USAGE", "copy credentials.toml and tokens/"),
        ((*at, *pinned, "--store-token-file", "/nowhere"), 2, "WRONG_USAGE", "there is no such file"),
        ((*at, *pinned, *own, "--store-listen", "127.0.0.1:1"), 2, "WRONG_USAGE", "no store runs here"),
        ((*at, *pinned, *own, "--store-quota-gib", "3"), 2, "WRONG_USAGE", "it is the store's"),
        (("--store-ca-file", str(other)), 2, "WRONG_USAGE", "name that with --store"),
        (("--store", "unix:/tmp/s", *pinned), 2, "WRONG_USAGE", "a Unix socket has no TLS"),
        ((*at, "--store-ca-file", str(alien), *own), 2, "WRONG_USAGE", "expected the store's certificate (PEM)"),
        (("--store", "nowhere"), 2, "WRONG_USAGE", "expected unix:/path"),
    ]
    for words, code, reason, text in cases:
        refused = in_process("--home", tmp_path / "h", "up", *words, "--json")
        error = refused.value["error"]
        assert (refused.code, error["reason"], text in error["message"]) == (code, reason, True), (words, error)
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize("said", ["store = '{0}'\nstore-token-file = '{1}'", "[store]\nfree-disk-reserve-bytes = 1\n"])
def test_a_settings_file_names_the_store_or_sets_its_options_and_not_both(said: str, tmp_path: Path) -> None:
    file, token = tmp_path / "kvasir.toml", tmp_path / "engine.token"
    token.write_text("t" * 40)
    file.write_text(said.format("127.0.0.1:1", token))
    words = () if "store =" in said else ("--store", "127.0.0.1:1", "--store-token-file", str(token))
    refused = in_process("--home", tmp_path / "h", "up", "--config", file, *words, "--json").value["error"]
    if words:
        assert (refused["reason"], refused["field"]) == ("WRONG_USAGE", f"{file}: [store] free-disk-reserve-bytes")
    else:
        token.chmod(0o600)
        refused = in_process("--home", tmp_path / "h", "up", "--config", file, "--json").value["error"]
        assert refused["reason"] == "STORE_UNREACHABLE"


class OtherVersion(cachestore_pb2_grpc.CacheStoreServiceServicer):
    def GetCapabilities(self, request: Any, context: Any) -> Any:  # noqa: N802  gRPC's name
        return cachestore_pb2.GetCapabilitiesResponse(version="9.0", manifest_format=9, block_tokens=256)


def test_a_store_of_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(OtherVersion(), server)
    port, token = server.add_insecure_port("127.0.0.1:0"), tmp_path / "engine.token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    server.start()
    try:
        words = ("--store", f"127.0.0.1:{port}", "--store-token-file", token)
        error = in_process("--home", tmp_path / "h", "up", *words, "--json").value["error"]
    finally:
        server.stop(None)
    assert error["reason"] == "STORE_VERSION_DIFFERS"
    assert "Kvasir 9.0, whose manifests have format 9" in error["message"]


def test_a_store_alone_listens_to_other_machines_only_with_tls_and_refuses_unknown_options(tmp_path: Path) -> None:
    for words, text in (
        (("--listen", "0.0.0.0:7000"), "--tls-cert-file and --tls-key-file"),
        (("--listen", "nowhere"), "--listen: 'nowhere': expected unix:/path"),
        (("--nothing", "1"), "unrecognized arguments: --nothing"),
        (("-d", "--data-dir", str(tmp_path / "other")), "--detach: it is for the home's own data"),
    ):
        refused = in_process("--home", tmp_path / "h", "store", "serve", *words, "--json")
        assert (refused.code, text in refused.value["error"]["message"]) == (2, True), refused
    assert not (tmp_path / "h").exists()


@pytest.mark.long(3)
def test_fleet_status_names_each_engine_and_the_agents_that_it_has_hot(fleet: Fleet) -> None:
    one, other = fleet.engines
    for cli, agent in ((one, "bob"), (other, "eve")):
        said(cli, FIRST, agent)
    found = one.done(*fleet.typed("kvasir fleet status"), "--json").value
    assert found["store"] == {"address": fleet.address, "state": "ready"}
    shown = found["engines"]
    assert [(each["address"], each["state"], each["has_store"]) for each in shown] == [
        (address, "ready", True) for address in fleet.addresses
    ]
    hot = [{each["agent_id"] for each in row["hot"]} for row in shown]
    assert [("bob" in each, "eve" in each) for each in hot] == [(True, False), (False, True)]
    gone = f"127.0.0.1:{free_port()}"
    lost = one(*fleet.typed("kvasir fleet status"), "--engine", gone)
    assert lost.code == 3
    assert f"{gone}" in lost.out
    assert "stopped" in lost.out
    two = ("--store", fleet.address, "--store", gone)
    replicas = one(*fleet.typed("kvasir fleet status"), *two, "--json")
    assert replicas.code == 3
    states = {each["address"]: each["state"] for each in replicas.value["stores"]}
    assert (states[fleet.address], states[gone] == "ready") == ("ready", False)
    alone = fleet.store.done("fleet", "status", "--store", fleet.address, "--json").value  # its home has no engine
    assert (alone["engines"], [each["state"] for each in alone["stores"]]) == ([], ["ready"])


@pytest.mark.long(4)
def test_the_gateway_of_several_engines_takes_the_homes_keys(fleet: Fleet) -> None:
    one, port = fleet.engines[0], free_port()
    key = (one.home / "tokens" / "client.token").read_text().strip()
    body = {"model": "kvasir-tiny", "messages": [{"role": "user", "content": FIRST}], "max_tokens": 4}
    with one.running(*fleet.typed("kvasir gateway", **{"127.0.0.1:8643": f"127.0.0.1:{port}"})) as gateway:
        eventually(lambda: accepts(f"127.0.0.1:{port}") or gateway.process.poll() is not None, within_s=60)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
        assert (answer.status_code, bool(answer.json()["choices"])) == (200, True), (answer.text, gateway.err)
        assert httpx.post(url, json=body, timeout=60).status_code == 401


@pytest.mark.long(3)
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed here")
def test_nginx_with_the_printed_configuration_keeps_an_agents_turns_at_one_engine(fleet: Fleet) -> None:
    one, port = fleet.engines[0], free_port()
    printed = one.done(*fleet.typed("kvasir fleet config"), "--listen", f"127.0.0.1:{port}").out
    file = one.home / "nginx.conf"
    file.write_text(printed)
    command = ["nginx", "-p", str(one.home), "-c", str(file), "-g", "daemon off; pid nginx.pid; error_log stderr;"]
    token = (one.home / "tokens" / "client.token").read_text().strip()
    agents = [f"n{number}" for number in range(8)]
    balancer = subprocess.Popen(command)
    try:
        eventually(lambda: accepts(f"127.0.0.1:{port}") or balancer.poll() is not None)
        with InferenceClient.connect(f"127.0.0.1:{port}", token=token, timeout_s=60) as client:
            for agent in agents:
                client.reply(agent_id=agent, messages=[{"role": "user", "content": FIRST}], sampling={"max_tokens": 2})
                more = [{"role": "user", "content": QUESTIONS[0]}]
                reply = client.reply(agent_id=agent, append_messages=more, sampling={"max_tokens": 2})
                assert reply.started.source == pb.CACHE_SOURCE_HOT
    finally:
        balancer.terminate()
        balancer.wait(30)
    shown = one.done(*fleet.typed("kvasir fleet status"), "--json").value["engines"]
    hot = [{each["agent_id"] for each in row["hot"]} & {*agents} for row in shown]
    assert hot[0] | hot[1] == {*agents}
    assert hot[0]
    assert hot[1]


@pytest.mark.parametrize("kind", ["nginx", "envoy"])
def test_a_printed_configuration_names_every_engine_and_no_socket_whose_owner_each_caller_would_be(kind: str) -> None:
    engines = ("--engine", "127.0.0.1:7001", "--engine", "127.0.0.1:7002")
    text = in_process("fleet", "config", kind, *engines).out
    found = json.loads(text) if kind == "envoy" else text
    assert all(port in str(found) for port in ("7001", "7002", "kvasir", "place"))
    for words, told in (
        ((*engines, "--engine", "unix:/tmp/e.sock"), "would be its owner"),
        ((*engines, "--engine", "127.0.0.1:7001"), "given twice"),
        (("--engine", "10.0.0.1:7001"), "TLS is needed: --ca-file"),
        ((*engines, "--listen", "0.0.0.0:1"), "TLS is needed: --tls-cert"),
        (("--engine", "127.0.0.1:7001;:1"), "expected"),
        ((*engines, "--tls-cert", "a; root /etc", "--tls-key", "k"), "no configuration can quote"),
    ):
        refused = in_process("fleet", "config", kind, *words, "--json")
        assert (refused.code, told in refused.value["error"]["message"]) == (2, True), refused


def test_a_printed_configuration_pins_the_engines_names_and_has_absolute_paths(tmp_path: Path) -> None:
    engines = ["engine.local:7001", "10.0.0.1:7002"]
    balancer = Balancer("0.0.0.0:1", engines, Path("b.crt"), Path("b.key"), tmp_path / "engines.crt")
    balancer.check()
    [cluster] = json.loads(envoy(balancer))["static_resources"]["clusters"]
    validation = cluster["transport_socket"]["typed_config"]["common_tls_context"]["validation_context"]
    names = {(each["san_type"], each["matcher"]["exact"]) for each in validation["match_typed_subject_alt_names"]}
    assert names == {("DNS", "engine.local"), ("IP_ADDRESS", "10.0.0.1")}
    assert f"ssl_certificate {Path('b.crt').absolute()};" in nginx(balancer)


def test_a_turns_place_is_its_agents_name_alone_and_no_name() -> None:
    [(key, place)] = place_of("ada")
    assert (key, len(place), place_of("")) == ("kvasir-place", 16, ())
    assert place_of("ada") == ((key, place),) != place_of("adb")
    assert "ada" not in place
