"""`kvasir up` before anything starts: options that are wrong, addresses that are taken, files that others can read."""

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from kvasir.address import AddressError, parse_address
from kvasir.cli import failures
from kvasir.cli.caller import Caller
from kvasir.cli.running import checks
from kvasir.cli.running.group import service_states
from kvasir.cli.running.health import Health, http_health
from kvasir.cli.running.holding import claimer
from kvasir.cli.running.home import Home, Running
from kvasir.cli.running.own_credentials import make_credentials
from kvasir.cli.running.plan import Plan, plan_of
from kvasir.cli.running.starting import detached
from kvasir.cli.running.supervisor import NotStartedError
from kvasir.cli.settings.asked import asked_of
from kvasir.cli.settings.flags import given_flags
from kvasir.credentials import read_credentials, read_token
from kvasir.errors import FailedPrecondition, Unavailable

from inference_svc.model import kvasir_tiny
from tests.cli.certificates import make_certificate
from tests.cli.running import in_process
from tests.running import in_memory
from tests.running.ports import free_port
from tests.running.programs import Program
from tests.running.waiting import eventually

WRONG = {
    "a policy": ("--kv-policy", "q3"),
    "an address": ("--listen", "19552"),
    "a socket": ("--listen", "unix:/tmp/x"),
    "no port": ("--store-listen", "127.0.0.1:0"),
    "one port twice": ("--listen", "127.0.0.1:7801", "--metrics-listen", "127.0.0.1:7801"),
    "HTTP for all": ("--http", "0.0.0.0:7801"),
    "HTTP and none": ("--http", "127.0.0.1:7801", "--no-http"),
    "a strict gateway and none": ("--strict", "--no-http"),
    "an alias of no model": ("--alias", "gpt-4o=gpt-4"),
    "an alias that is a model": ("--alias", "kvasir-tiny=kvasir-tiny"),
    "an alias twice": ("--alias", "a=kvasir-tiny", "--alias", "a=kvasir-tiny"),
    "an alias and no gateway": ("--alias", "a=kvasir-tiny", "--no-http"),
    "metrics for all": ("--metrics-listen", "0.0.0.0:7801"),
    "metrics where HTTP is": ("--metrics-listen", "127.0.0.1:7801", "--http", "127.0.0.1:7803"),
    "the last port": ("--metrics-listen", "127.0.0.1:65535"),
    "traces in the clear": ("--traces-to", "http://192.0.2.1:4317"),
    "no TLS": ("--store-listen", "0.0.0.0:7801"),
    "half of TLS": ("--tls-cert", "/tmp/cert.pem"),
    "no model": ("--model", "nonsense"),
    "no configuration": ("--model", "/tmp"),
    "no embedding model": ("--embeddings", "nonsense"),
    "an embedding model of a model's name": ("--embeddings", f"kvasir-tiny={kvasir_tiny.path()}"),
    "layers": ("--kv-exact-layers", "1,x"),
    "layers of fp": ("--kv-exact-layers", "1", "--kv-policy", "fp"),
    "a far layer": ("--model", str(kvasir_tiny.path()), "--kv-exact-layers", "8"),
    "one name twice": ("--model", f"a={kvasir_tiny.path()}", "--model", f"a={kvasir_tiny.path()}"),
    "a time": ("--keep-alive", "10"),
    "a level": ("--log-level", "loud"),
    "memory": ("--memory-gib", "-1"),
    "endless memory": ("--memory-gib", "inf"),
    "no certificate": ("--tls-cert", "/tmp/kv-nowhere.pem", "--tls-key", "/dev/null"),
    "a peer at no address": ("--peer", "b=nonsense"),
    "a peer without its token": ("--peer", "b=127.0.0.1:7801"),
    "a peer without its certificate": ("--peer", "b=192.0.2.1:7801", "--peer-token-file", f"b={__file__}"),
    "a peer's token that is not there": ("--peer", "b=unix:/tmp/x", "--peer-token-file", "b=/tmp/kv-nowhere"),
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_wrong_usage_before_anything_is_made(options: tuple[str, ...], tmp_path: Path) -> None:
    refused = in_process("--home", tmp_path / "home", "up", *options, "--json")
    assert (refused.code, refused.value["error"]["reason"]) == (2, "WRONG_USAGE")
    assert refused.value["error"]["field"] in options
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", f"[::1]:{'9' * 5000}"])
def test_a_port_that_is_too_large_is_refused_with_the_largest(address: str) -> None:
    with pytest.raises(AddressError, match="expected a port of at most 65535"):
        parse_address(address)


@pytest.mark.parametrize("option", ["--http", "--listen", "--store-listen", "--metrics-listen"])
def test_an_option_that_takes_no_socket_offers_none(option: str, tmp_path: Path) -> None:
    refused = in_process("--home", tmp_path / "home", "up", option, "localhost", "--json").value["error"]
    assert refused["message"] == f"{option}: 'localhost': expected host:port or [v6 address]:port"


@pytest.mark.parametrize("name", ["a%20b", "x" * 100], ids=["percent", "long"])
@pytest.mark.parametrize("words", [("up",), ("status",), ("chat", "ada", "--once", "x")], ids=["up", "status", "chat"])
def test_a_home_below_which_no_socket_can_be_is_refused_as_one(name: str, words: tuple[str, ...]) -> None:
    home = in_memory.home() / name
    refused = in_process("--home", home, *words, "--json")
    assert (refused.code, "socket" in refused.value["error"]["message"]) == (4, True), refused
    assert not home.exists()
    home.parent.rmdir()


def test_a_home_of_another_user_or_that_others_write_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: 54_321)
        for words in (("up",), ("keys", "ls")):
            refused = in_process("--home", home, *words, "--json")
            assert (refused.code, "belongs to another user" in refused.value["error"]["message"]) == (4, True), words
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(home / "logs" / "engine.log"))
        assert str(failures.refusal_of(denied)).endswith(f": {home} belongs to another user (uid {os.getuid()})")
    home.chmod(0o777)
    assert "others can write there" in in_process("--home", home, "up", "--json").value["error"]["message"]


def test_a_home_that_we_may_not_read_is_not_one_where_nothing_runs() -> None:
    home = in_memory.home()
    (home / "run").mkdir()
    home.chmod(0)
    ours = os.geteuid()
    os.seteuid(ours or 65_534)  # root may read all
    try:
        with pytest.raises((FailedPrecondition, PermissionError), match="another user" if ours == 0 else "denied"):
            Home(home).running()
    finally:
        os.seteuid(ours)
    home.chmod(0o700)
    shutil.rmtree(home)


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_the_remedy_for_a_home_that_others_enter_is_a_command_for_any_path(mode: int) -> None:
    parent = in_memory.home()
    home = parent / "a b"
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(FailedPrecondition) as refused:
        Home(home).make()
    subprocess.run(["sh", "-c", refused.value.message.partition("run: ")[2]], check=True)
    assert home.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(parent)


@pytest.mark.parametrize(
    ("found", "settings", "reason"),
    [
        (None, "", "STORE_MISSING"),
        ([], "", "STORE_MISSING"),
        (["lost+found", ".fseventsd"], "", "STORE_MISSING"),
        (["kvasir.sqlite3"], "", "ADDRESS_IN_USE"),
        ([], '[store]\ncatalog = "s3://bucket/agents"\n', "ADDRESS_IN_USE"),
    ],
    ids=["gone", "a mount point", "a new disk", "there", "elsewhere"],
)
def test_no_empty_store_takes_the_place_of_one_that_is_gone(
    tmp_path: Path, found: list[str] | None, settings: str, reason: str
) -> None:
    """As where its disk is not mounted. What an engine and `kvasir up` leave shows that it ran here. A store with its
    index elsewhere goes on from there."""
    home = Home(tmp_path / "home")
    home.make()
    for name in found or ():
        (home.store_data / name).mkdir(parents=True)
    if found == []:
        home.store_data.mkdir()
    rows = [{"service": "store", "option": "data-dir", "value": str(home.store_data)}]
    (home.run / "settings.json").write_text(json.dumps(rows))
    home.engine_state.mkdir(exist_ok=True)
    (home.engine_state / "lease-owner").touch()
    config = tmp_path / "settings.toml"
    config.write_text(settings)
    with socket.socket() as taken:  # nothing starts, whatever is checked
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = in_process("--home", home.root, "up", "--config", config, "--listen", listen, "--json").value["error"]
    assert refused["reason"] == reason
    assert reason != "STORE_MISSING" or "up --accept-older` begins" in refused["message"]
    assert home.store_data.exists() == (found is not None)


def test_a_home_on_a_full_disk_is_named_before_anything_starts(tmp_path: Path) -> None:
    home = in_memory.home()
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[store]\nfree-disk-reserve-bytes = {1 << 60}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = in_process("--home", home, "up", "--config", settings, "--listen", listen)
    assert (refused.code, "1048576.0 TiB must stay free" in " ".join(refused.err.split())) == (4, True), refused
    shutil.rmtree(home)


def test_credentials_appear_only_after_their_tokens(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    (home.tokens / "peer.token").mkdir()  # in the way: the first attempt ends between the files
    with pytest.raises(OSError):
        make_credentials(home)
    assert not home.credentials_file.exists()
    (home.tokens / "peer.token").rmdir()
    make_credentials(home)
    token = read_token(home.tokens / "client.token")
    assert read_credentials(home.credentials_file).principal_of(token) is not None


def test_what_is_in_use_is_reported_before_anything_starts() -> None:
    home = in_memory.home()
    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as other:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ("--listen", "--metrics-listen"):
            refused = in_process("--home", home, "up", option, f"127.0.0.1:{port}", "--json")
            assert (refused.code, refused.value["error"]["reason"]) == (4, "ADDRESS_IN_USE")
        other.bind(f"{home}/run/engine.sock")
        other.listen()
        refused = in_process("--home", home, "up", "--json")
        assert (refused.code, refused.value["error"]["reason"]) == (4, "ADDRESS_IN_USE")
    certificate, key = home / "cert.pem", home / "key.pem"
    make_certificate(certificate, key)
    key.chmod(0o644)
    refused = in_process("--home", home, "up", "--tls-cert", certificate, "--tls-key", key)
    assert (refused.code, "chmod 600" in refused.err) == (4, True)
    refused = in_process("--home", home, "up", "--tls-cert", certificate, "--tls-key", "/dev/null")
    assert refused.code == 4
    assert not list((home / "logs").iterdir())
    shutil.rmtree(home)


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_an_address_of_a_program_that_listens_on_all_is_taken(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS binds 127.0.0.1 beside it, as this socket, which only seems to."""

    class Beside(socket.socket):
        def bind(self, address: object) -> None:
            if platform == "linux":
                super().bind(address)

    monkeypatch.setattr("sys.platform", platform)
    with socket.create_server(("0.0.0.0", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setattr(checks.socket, "socket", Beside)
        with pytest.raises(FailedPrecondition, match="stop what is there") as refused:
            checks.check_free(address, "--http")
        assert refused.value.reason == "ADDRESS_IN_USE"
    checks.check_free(address, "--http")


def test_two_homes_that_start_at_once_choose_two_ports_for_their_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gateway listens only once its engine is there: the second home took the first one's for its own."""
    chosen: list[str] = []

    async def begins(_caller: object, plan: Plan, *_: object) -> None:
        assert plan.gateway is not None
        chosen.append(plan.gateway.endpoint.address)
        if len(chosen) == 1:
            assert (await asyncio.to_thread(in_process, "--home", tmp_path / "other", "up")).code == 0

    monkeypatch.setattr("kvasir.cli.running.up.run_group", begins)
    assert in_process("--home", tmp_path / "one", "up").code == 0
    assert len(set(chosen)) == 2
    assert in_process("--home", tmp_path / "one", "up").code == 0
    assert chosen[2] == chosen[0], "it is free again"


def _hosts() -> Iterator[str]:
    """Of this machine alone, which may lack IPv6."""
    yield "127.0.0.1"
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        yield "[::1]"


HOSTS = [*_hosts()]
_CLAIMS = """
import sys
from kvasir.cli.running.checks import claim

claimed = claim(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_an_address_that_another_home_has_for_its_gateway_is_refused_by_its_name(
    platform: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that started at once the second ended when its engine was there, by a line of its gateway's log."""
    address, begun = f"{host}:{free_port()}", list[object]()

    async def begins(*given: object) -> None:
        begun.append(given)

    monkeypatch.setattr("kvasir.cli.running.up.run_group", begins)
    monkeypatch.setattr("sys.platform", platform)
    words = ("--home", tmp_path / "home", "up", "--json", "--http", address)
    for other, is_refused in ((("/bin/kvasir", "--home", "/other", "up"), True), (("a resolver",), False)):
        argv = [sys.executable, "-c", _CLAIMS, address, *other]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdout.readline()
            answer = in_process(*words)
            assert answer.code == (4 if is_refused else 0)
            if is_refused:
                has = f"cannot listen on {address}: `kvasir --home /other up` (pid {holder.pid}) has it"
                assert has in answer.value["error"]["message"]
            holder.stdin.close()
    assert len(begun) == 1


def test_a_port_is_claimed_for_each_host_by_itself() -> None:
    port = free_port()
    with ExitStack() as held:
        for host in HOSTS:
            claimed = checks.claim(f"{host}:{port}")
            assert claimed is not None
            held.enter_context(claimed)
            assert checks.claim(f"{host}:{port}") is None


def test_a_descriptor_that_closes_meanwhile_hides_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts closes many."""
    port, readlink = free_port(), Path.readlink
    argv = [sys.executable, "-c", _CLAIMS, f"127.0.0.1:{port}", "/bin/kvasir", b"--home", b"/\xff", "up"]

    def closes(link: Path) -> Path:
        if link.name == "0":
            raise FileNotFoundError(link)
        return readlink(link)

    monkeypatch.setattr(Path, "readlink", closes)
    monkeypatch.setattr("sys.platform", "linux")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert claimer(port) == f"`kvasir --home '/\ufffd' up` (pid {holder.pid}) has it"
        holder.communicate()


def test_a_home_takes_no_other_homes_gateway_for_its_own(tmp_path: Path) -> None:
    """Of two homes that started at once at one address, the second reported that it was ready at the first one's."""
    address = f"127.0.0.1:{free_port()}"
    homes = [Home(tmp_path / name) for name in ("one", "other")]
    with ExitStack() as exits:
        for home in homes:
            home.make()
            make_credentials(home)
            (home.run / "engine.sock").touch()  # then its gateway does not wait for it
        of_one, of_other = (plan_of(asked_of(home, given_flags({"http": address}), None)).gateway for home in homes)
        assert of_one is not None
        assert of_other is not None
        log = tmp_path / "one.log"
        program = Program("kvasir_gateway", of_one.argv()[3:], out=log, err=log)
        exits.callback(program.kill)
        eventually(lambda: asyncio.run(of_one.service().is_ready()))
        assert not asyncio.run(of_other.service().is_ready()), "it has no key yet"
        shutil.copytree(homes[0].gateway_state, homes[1].gateway_state, dirs_exist_ok=True)
        assert not asyncio.run(of_other.service().is_ready()), "a copy of a home is another home"
        (tmp_path / "link").symlink_to(homes[0].root)
        for name, state in (("one", "not ready"), ("link", "not ready"), ("other", "another program's")):
            home = Home(tmp_path / name)
            home.write_running(Running(1, "unix:/s", "unix:/e", http=address, http_url=f"http://{address}/v1"))
            [http] = [each for each in service_states(Caller(home)) if each.name == "http"]
            assert (http.state, bool(http.problems)) == (state, name != "other")
        refused = in_process("--home", homes[1].root, "open", "--print", "--json")
        assert (refused.code, "another program answers" in refused.value["error"]["message"]) == (3, True)
        assert in_process("--home", homes[0].root, "open", "--print", "--json").code == 0


def test_a_gateway_lives_while_its_engine_hangs(tmp_path: Path) -> None:
    """It was to be killed by hand, because it waits for such an engine longer than it was waited for."""
    home = Home(tmp_path / "home")
    home.make()
    make_credentials(home)
    gateway = plan_of(asked_of(home, given_flags({"http": f"127.0.0.1:{free_port()}"}), None)).gateway
    assert gateway is not None
    with ExitStack() as exits:
        going_on = threading.Event()
        hangs = grpc.unary_unary_rpc_method_handler(lambda *_: bytes(going_on.wait(60)))
        engine = grpc.server(ThreadPoolExecutor(8))
        engine.add_generic_rpc_handlers((SimpleNamespace(service=lambda _: hangs),))
        engine.add_insecure_port(f"unix:{home.run / 'engine.sock'}")
        engine.start()
        exits.callback(engine.stop, None)
        exits.callback(going_on.set)
        log = tmp_path / "http.log"
        program = Program("kvasir_gateway", gateway.argv()[3:], out=log, err=log)
        exits.callback(program.kill)
        eventually(lambda: asyncio.run(http_health(home, gateway.endpoint.address, 30)) is Health.NOT_READY)
        assert asyncio.run(gateway.service().is_ready())


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_group_begins_again_only_where_another_program_took_its_gateways_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    tried: list[str] = []
    with ExitStack() as exits:

        async def begins(_caller: object, plan: Plan, *_: object) -> None:
            assert plan.gateway is not None
            tried.append(plan.gateway.endpoint.address)
            if len(tried) > 1:
                return
            if is_taken:
                address = parse_address(plan.gateway.endpoint.address)
                exits.enter_context(socket.create_server((address.host, address.port)))
            raise NotStartedError("http ended with exit code 1 at its start", reason="SERVICE_DID_NOT_START")

        monkeypatch.setattr("kvasir.cli.running.up.run_group", begins)
        code = in_process("--home", tmp_path, "up").code
    assert (code == 0, len(tried), len(set(tried))) == ((True, 2, 2) if is_taken else (False, 1, 1))


def test_a_start_in_the_background_that_ends_without_a_word_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that `kvasir down` of another terminal ends."""
    home = Home(tmp_path)
    home.logs.mkdir()
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    with pytest.raises(Unavailable, match=r"ended before all was ready, as by `kvasir .*down`") as caught:
        detached(Caller(home=home))
    assert f"(exit code 0, log: {home.logs / 'up.log'})" in caught.value.message
    assert failures.hint(caught.value, home) == "", "nothing is there to report"
