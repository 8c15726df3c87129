"""`kvasir up` of homes of their own: over TCP, with limits, on two Macs, in the background."""

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.address import parse_address
from kvasir.cli.running.health import STORE_SERVICE
from kvasir.cli.running.holding import holders, is_led
from kvasir.cli.running.home import Home
from kvasir.options.gateway import DEFAULT_LISTEN

from tests.cli.running import QUIET, Cli, answers, free_port, in_process, process_exists, wait_until_ready
from tests.made_models.tiny_encoder import write_encoder
from tests.running import in_memory
from tests.running.system_fixtures import running_house
from tests.running.trace_collector import collecting
from tests.running.waiting import eventually


@pytest.mark.long(5)
def test_up_over_tcp_requests_its_token_hands_its_kv_policy_on_and_ends_whole(tmp_path: Path) -> None:
    """(LESSONS 17)"""
    home = in_memory.home()
    cli = Cli(home)
    ports = [free_port(), free_port()]
    addresses = ("--listen", f"127.0.0.1:{ports[0]}", "--store-listen", f"127.0.0.1:{ports[1]}")
    ben = in_process("--home", home, "tokens", "new", "ben", "--namespace", "red", "--json").value["token_file"]
    words = f"words={write_encoder(tmp_path / 'encoder')}"
    asked = ("--kv-policy", "q4-rotated", "--kv-exact-layers", "last", "--embeddings", words)
    with cli.running("up", "--no-http", *addresses, *asked) as up:
        running = wait_until_ready(home, up)
        assert answers(running.store, STORE_SERVICE)
        turn = json.loads(cli.done("chat", "ada", "--json", "--max-tokens", "4", stdin="Hello.\n").out)
        assert turn["snapshot"] == "committed"
        of_red = ("--token-file", ben)
        assert "committed" in cli.done(*of_red, "chat", "eve", "--json", "--max-tokens", "4", stdin="Hello.\n").out
        for words, agent in ((), "ada"), (of_red, "eve"):
            assert [each["agent_id"] for each in cli.done(*words, "agents", "ls", "--json").value] == [agent]
        assert f"token:  {running.token_file}" in up.err
        cli.done("--engine", f"127.0.0.1:{ports[0]}", "stats")  # the home's own engine needs no --token-file
        bare = Cli(tmp_path)("--address", running.store, "agents", "ls")
        assert bare.code == 4
        assert "--token-file" in bare.err
        assert [each["name"] for each in cli.done("models", "ls", "--json").value] == ["kvasir-tiny", "words"]
        model = cli.done("doctor", "--json").value["engine"]["model"]
        assert model["kv_policy"] == "q4-rotated, layer 7 exact"
        assert model["applied_layers"] == model["layer_count"] == 8
        assert "KV policy q4-rotated, layer 7 exact, applied to 8 of 8 layers" in cli.done("doctor").out
        pids = [running.store_pid, running.engine_pid]
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(timeout=60) == 0
        assert "All have stopped." in up.err
    assert not any(process_exists(pid) for pid in pids)
    assert Home(home).running() is None
    shutil.rmtree(home)


@pytest.mark.long(9)
def test_up_applies_the_limits_that_it_is_given() -> None:
    home = in_memory.home()
    cli = Cli(home)
    limits = ("--memory-gib", "0.25", "--context-tokens", "300", "--store-quota-gib", "0.001")
    limits += ("--keep-versions", "3", "--log-format", "json", "--log-level", "warning")
    with (
        collecting() as (collector, port),
        cli.running("up", "--no-http", *limits, "--traces-to", f"http://127.0.0.1:{port}") as up,
    ):
        wait_until_ready(home, up)
        assert cli.done("stats", "--json").value["engine"]["kv_memory_bytes"] == 1 << 28
        assert cli.done("models", "ls", "--json").value[0]["context_tokens"] == 300
        assert cli.done("store", "stats", "--json").value["quota_bytes"] == (1 << 30) // 1000
        turns = [
            json.loads(cli.done("chat", f"agent {n}", "--json", "--max-tokens", "4", stdin=f"Hello {n}. " * 30).out)
            for n in range(9)
        ]
        assert turns[0]["snapshot"] == "committed"
        eventually(lambda: collector.services == {"kvasir-engine", "kvasir-store"})
        assert cli.done("agents", "show", "agent 0", "--json").value["retained_versions"] == 3
        logged = [line for name in ("store", "engine") for line in Home(home).logs.joinpath(f"{name}.log").open()]
        assert not any('"level": "info"' in line for line in logged)
        assert turns[-1]["snapshot"] == "failed", "nine memories of 130 KB and more are more than the quota"
        long = cli("chat", "eve", "--json", stdin="Hello. " * 200)
        assert (long.code, long.value["error"]["reason"]) == (4, "CONTEXT_EXCEEDED")
    shutil.rmtree(home)


@pytest.mark.long(6)
def test_an_agent_moves_between_two_macs_as_compose_says(tmp_path: Path) -> None:
    studio, laptop = (Cli(in_memory.home()) for _ in range(2))
    with studio.running("up", "--no-http") as up, laptop.running("up", "--no-http") as other:
        wait_until_ready(studio.home, up)
        wait_until_ready(laptop.home, other)
        studio.done("chat", "ada", "--json", "--max-tokens", "4", stdin="Hello.\n")
        with studio.running("pair", "--name", "studio", "--json") as waiting:
            shown = json.loads(eventually(lambda: waiting.out))
            wrong = laptop("pair", "0000-0000", "--at", shown["address"], "--json")
            assert (wrong.code, wrong.value["error"]["reason"]) == (4, "PAIRING_REFUSED")
            paired = laptop.done("pair", shown["line"], "--name", "laptop", "--takes", "copy").out
            assert "Paired with studio" in paired
            assert "studio may here: default=read; it may bring: default=copy" in " ".join(paired.split())
            assert waiting.process.wait(60) == 0
            events = [json.loads(line)["event"] for line in waiting.out.splitlines()]
        assert events == ["waiting", "refused", "paired"]
        planned = laptop.done("agents", "pull", "studio", "ada", "--dry-run", "--json").value
        assert planned["bytes_sent"] > 0
        assert laptop("agents", "show", "ada").code == 5
        pulled = laptop.done("agents", "pull", "studio", "ada", "--json").value
        assert (pulled["origin"], pulled["origin_detail"]) == ("pull", "studio/ada@1")
        again = laptop.done("agents", "pull", "studio", "ada", "--as", "again").out
        assert re.search(r"tokens, [\d.]+ KiB; 0 B sent in [\d.]+ s, [\d.]+ KiB were there", " ".join(again.split()))
        there = laptop.done("chat", "ada", "--json", "--max-tokens", "4", stdin="Are you there?\n").value
        here = studio.done("chat", "ada", "--json", "--max-tokens", "4", stdin="Are you there?\n").value
        back = studio.done("agents", "pull", "laptop", "ada", "--as", "ada-of-laptop", "--json").value
        assert back["origin_detail"] == "laptop/ada@2"
        assert studio.done("peers", "rm", "laptop", "--json").value["store"]["is_running"]
        assert laptop("agents", "pull", "studio", "ada", "--as", "late", "--json").code == 3
    assert (there["source"], here["source"]) == ("warm", "hot")
    assert there["reply"] == here["reply"]
    shutil.rmtree(studio.home)
    shutil.rmtree(laptop.home)


@pytest.mark.long(14)
@pytest.mark.parametrize(("ram_gib", "device_gib"), [(8, 5.33), (16, 10.67), (64, 48.0), (1, 0.25)])
def test_two_homes_and_a_tests_engine_stay_within_a_macs_memory(
    ram_gib: int, device_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played by the number that Metal recommends for so much RAM. What each engine may take is what it claims."""
    monkeypatch.setitem(QUIET, "TMPDIR", str(tmp_path))  # where no other test's engine claims memory
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = tmp_path / "kvasir.toml"
    config.write_text(f"[engine]\ndevice-gib = {device_gib}\n")
    first, second = (Cli(in_memory.home()) for _ in range(2))
    up = ("up", "--no-http", "--config", config)
    with first.running(*up) as one, second.running(*up) as other:
        wait_until_ready(first.home, one)
        wait_until_ready(second.home, other)
        budgets = [each.done("stats", "--json").value["engine"]["kv_memory_bytes"] for each in (first, second)]
        with running_house(tmp_path / "house", engine_options=("--device-gib", str(device_gib))) as house:
            with house.client() as client:
                budgets.append(client.get_stats().engine.kv_memory_bytes)
            claims = (tmp_path / f"kvasir-memory-{os.getuid()}").iterdir()
            claimed = sorted(int(file.read_text()) for file in claims if file.name != "lock")
    assert len(claimed) == 3
    assert all(budgets)
    assert sum(budgets) < sum(claimed) <= device_gib * 2**30 * 7 / 8, "KV and weights"
    for each in (first, second):
        shutil.rmtree(each.home)


@contextlib.contextmanager
def _usual_http_port_taken() -> Iterator[None]:
    """As by a `kvasir up` of another home."""
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # somebody has it already
            other.bind(("127.0.0.1", parse_address(DEFAULT_LISTEN).port))
            other.listen()
        yield


@pytest.mark.long(7)
def test_a_home_of_the_background_is_taken_over_after_a_kill_and_goes_down() -> None:
    home = in_memory.home()
    cli = Cli(home)
    try:
        first = cli.done("up", "-d", "--no-http", "--json").value
        client = str(Home(home).tokens / "client.token")
        assert (first["engine"], first["token_file"]) == (f"unix:{home}/run/engine.sock", client)
        os.kill(first["pid"], signal.SIGKILL)
        eventually(lambda: not is_led(Home(home)))
        orphans = [first["engine_pid"], first["store_pid"]]
        assert set(orphans) <= set(holders(Home(home).services_lock_file))
        killed = cli("doctor", "--json")
        assert (killed.code, killed.value["engine"]["state"]) == (1, "ready")
        assert "was killed here" in killed.value["problems"][0]
        told = cli("status")
        assert (told.code, "starts no service again" in told.out) == (1, True)
        assert f"and `kvasir --home {cli.home} up -d` does" in told.out
        full = home / "full.toml"
        logs = 'log-format = "json"\nlog-level = "error"\n'
        full.write_text(f"{logs}[store]\nfree-disk-reserve-bytes = {1 << 60}\n")
        with _usual_http_port_taken():
            up = cli.done("up", "--detach", "--config", str(full)).out
            assert re.search(r"http:   http://127.0.0.1:86(4[4-9]|5[01])/v1", up), (
                "the next free one, but for `kvasir pair`"
            )
            assert "127.0.0.1:8642 is in use; `--http 127.0.0.1:86" in up
            assert f"`kvasir --home {home} down` stops it" in up
        assert not set(orphans) & set(holders(Home(home).services_lock_file)), "two groups would share a home"
        full_disk = cli("status", "--json")
        states = full_disk.value["services"]
        assert (full_disk.code, "DISK_FULL" in states[0]["problems"][0]) == (1, True)
        assert [(row["name"], row["state"]) for row in states[:2]] == [("store", "ready"), ("engine", "ready")]
        assert states[2]["address"] in up
        log = cli.done("logs", "up").out
        assert "HTTP: 127.0.0.1:8642 is in use; " in cli("status").out
        assert re.search(
            r"engine is ready \(pid \d+, [\d.]+ s: import [\d.]+, weights .*, probing .*, kernels .*, store ", log
        )
        assert cli("chat", "ada", "--once", "Hello.", "--max-tokens", "4").code == 1
        down = cli("down", "--json")
        assert (down.code, down.value["not_stored"]) == (1, 1)
        ended = down.value["ended"]
        assert ended == [ended[0]], "it ends its services itself"
        assert holders(Home(home).services_lock_file) == []
        assert cli("status").code == 3
        assert "nothing runs" in cli.done("down").out
    finally:
        cli("down")
        shutil.rmtree(home)


@pytest.mark.long(7)
def test_a_home_on_a_full_disk_reports_at_its_end_what_it_did_not_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's log, which takes no line either, had no number, and all seemed to be stored."""
    cli = Cli(in_memory.home())
    try:
        (full := cli.home / "full.toml").write_text(f"[store]\nfree-disk-reserve-bytes = {1 << 60}\n")
        up = cli.done("up", "-d", "--no-http", "--json", "--config", str(full)).value
        assert cli("chat", "ada", "--once", "Hello.", "--max-tokens", "4").code == 1
        if sys.platform == "linux":  # elsewhere its log takes the line, and has the same number
            resource.prlimit(up["engine_pid"], resource.RLIMIT_FSIZE, (0, 0))
        usage = shutil.disk_usage(cli.home)
        monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=0))
        down = in_process("--home", cli.home, "--json", "down")
        assert (down.code, down.value["not_stored"]) == (1, 1)
    finally:
        cli("down")
        shutil.rmtree(cli.home)


@pytest.mark.skipif(sys.platform != "linux", reason="another process gets limits there alone")
@pytest.mark.long(7)
def test_a_home_whose_disk_takes_no_change_is_reported_and_at_its_end_each_turn_that_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that the system made read-only after an error: its services go on in RAM, and their logs take no line."""

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    cli = Cli(in_memory.home())
    try:
        up = cli.done("up", "-d", "--no-http", "--json").value
        for service in ("store_pid", "engine_pid"):
            resource.prlimit(up[service], resource.RLIMIT_FSIZE, (0, 0))
        assert "not stored yet" in cli.done("chat", "ada", "--once", "Hello.", "--max-tokens", "4").err
        monkeypatch.setattr("kvasir.cli.running.holding.try_file", read_only)
        [store, _] = in_process("--home", cli.home, "--json", "status").value["services"]
        assert "Read-only file system (DISK_FAILED)" in store["problems"][0]
        monkeypatch.setattr(type(Home(cli.home).running_file), "unlink", lambda *_, **__: read_only())
        down = in_process("--home", cli.home, "--json", "down")
        assert (down.code, down.value["not_stored"], down.value["engine_killed"]) == (1, 1, False)
    finally:
        monkeypatch.undo()
        cli("down")
        shutil.rmtree(cli.home)
