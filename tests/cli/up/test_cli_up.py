"""`kvasir up`, `chat` and `doctor` with real services: supervised as one, spoken to through a pipe, examined."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.address import parse_address
from kvasir.cli.running.health import ENGINE_SERVICE
from kvasir.cli.running.home import Home
from kvasir.cli.talking.turn import TurnResult, follow_turn
from kvasir.clients import GenerateOptions, message
from kvasir.credentials import read_token

from tests.cli.running import Cli, answers, free_port, in_process, three_free_ports, wait_until_ready
from tests.made_models.tiny_encoder import write_encoder
from tests.running import in_memory
from tests.running.scraping import health, scrape
from tests.running.waiting import eventually

TURN_KEYS = {
    "agent_id",
    "reply",
    "source",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "context_tokens",
    "kept",
    "left_out_messages",
    "memory_tokens",
    "parted",
    "first_token_s",
    "version",
    "snapshot",
}


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Short, because a socket's path must fit into a hundred bytes."""
    home = in_memory.home()
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def cli(home: Path) -> Iterator[Cli]:
    """A home with a running group."""
    cli = Cli(home)
    addresses = ("--http", f"127.0.0.1:{free_port()}", "--metrics-listen", f"127.0.0.1:{three_free_ports()}")
    with cli.running("up", *addresses, "--strict", is_fresh=True) as up:
        # A service that still imports hears of a reload when it can, and does not end by it.
        eventually(lambda: (running := Home(home).running()) is not None and running.http_pid, within_s=90)
        assert cli.done("reload", "--json").value["http"]["outcome"] == "allowed"
        wait_until_ready(home, up)
        yield cli


@pytest.mark.long(8)
def test_chat_through_a_pipe_remembers_between_calls(cli: Cli) -> None:
    first = cli.done("chat", "ada", "--json", "--max-tokens", "8", stdin="My name is Marco.\n")
    turn = json.loads(first.out)
    assert set(turn) == TURN_KEYS
    assert (turn["version"], turn["snapshot"], turn["source"]) == (1, "committed", "cold")
    second = json.loads(cli.done("chat", "ada", "--json", "--max-tokens", "8", stdin="What is my name?\n").out)
    assert (second["version"], second["source"]) == (2, "hot")
    assert second["cached_tokens"] == turn["prompt_tokens"] + turn["completion_tokens"]


def test_chat_shows_people_the_reply_and_what_was_cached(cli: Cli) -> None:
    said = cli.done("chat", "eve", "--max-tokens", "8", stdin="Hello.\n")
    assert said.out.strip()
    assert "tokens cached (cold: nothing is remembered), first token after" in said.err
    assert "version 1" in said.err


@pytest.mark.long(3)
def test_chat_forks_rolls_back_and_shows_what_is_remembered(cli: Cli) -> None:
    said = cli.done(
        "chat",
        "bo",
        "--system",
        "You are Bo.",
        "--max-tokens",
        "4",
        stdin="Hello.\nHow are you?\n/rollback 1\n/memory\n/fork bo two\nAre you there?\n/help\n/quit\nnever said\n",
    )
    assert "bo is at version 3, which is version 1 again" in said.err
    assert "You are Bo." in said.err
    assert "versions: 1 (turn), 2 (turn), 3 (rollback)" in said.err
    assert "never said" not in cli.done("agents", "history", "bo two", "--json").out
    lines = {row["agent_id"]: row["lines"][0] for row in cli.done("agents", "ls", "--prefix", "bo", "--json").value}
    assert (lines["bo"]["version"], lines["bo two"]["version"]) == (3, 2)


def test_chat_with_a_refusal_ends_a_pipe_with_its_code(cli: Cli) -> None:
    refused = cli("chat", "a\u200bb", "--json", stdin="Hello.\n")
    assert refused.code == 4
    assert refused.value["error"]["field"] == "agent_id"


@pytest.mark.long(6)
def test_a_killed_engine_is_started_again_and_the_agent_goes_on_from_the_store(cli: Cli) -> None:
    cli.done("chat", "zoe", "--json", "--max-tokens", "4", stdin="Hello.\n")
    running = Home(cli.home).running()
    assert running is not None
    os.kill(running.engine_pid, signal.SIGKILL)

    def is_back() -> bool:
        now = Home(cli.home).running()
        return now is not None and now.engine_pid not in (0, running.engine_pid) and answers(now.engine, ENGINE_SERVICE)

    eventually(is_back, within_s=90)
    turn = json.loads(cli.done("chat", "zoe", "--json", "--max-tokens", "4", stdin="Are you there?\n").out)
    assert turn["source"] == "warm"


def test_the_gateway_is_a_service_like_the_others(cli: Cli) -> None:
    eventually(lambda: cli("status", "--json").code == 0)  # a test before may have killed what this one asks
    states = cli.done("status", "--json").value
    assert [(row["name"], row["state"]) for row in states["services"]] == [
        ("store", "ready"),
        ("engine", "ready"),
        ("http", "ready"),
    ]
    running = json.loads((cli.home / "run" / "up.json").read_text())
    assert running["http_url"] == f"http://{states['services'][2]['address']}/v1"
    key = Path(states["token_file"]).read_text().strip()
    answers_to = [_answered(states["services"][2]["address"], each) for each in ("", key)]
    assert [(status, "kvasir-tiny" in text) for status, text in answers_to] == [(401, False), (200, True)]
    tokens, text = _answered(states["services"][2]["address"], key, path="/v1/messages/count_tokens", unknown_field=1)
    assert (tokens, "unknown_field" in text) == (400, True), "it was started with --strict"


def _answered(address: str, key: str, path: str = "/v1/models", **fields: object) -> tuple[int, str]:
    """What the gateway answers who has this key, and posts these fields."""
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} if key else {}
        said = {"model": "kvasir-tiny", "messages": [{"role": "user", "content": "Hello."}], **fields}
        connection.request("POST" if fields else "GET", path, json.dumps(said) if fields else None, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_a_second_up_of_the_same_home_is_refused_clearly(cli: Cli) -> None:
    refused = cli("up")
    assert refused.code == 4
    assert "already running" in refused.err
    assert len(refused.err.splitlines()) == 1


@pytest.mark.long(5)
def test_a_load_of_turns_is_measured_at_the_running_engine(cli: Cli) -> None:
    options = ("--rate", "4", "--seconds", "4", "--ramp", "1", "--in", "40", "--out", "8")
    found = cli.done("bench", "load", *options, "--seed", "3", "--json").value
    assert found["settings"]["rate_per_s"] == 4.0
    assert found["phases"]["steady"] > 3
    assert 0 < found["first_token_s"]["count"] <= found["phases"]["steady"]
    assert 0 < found["first_token_s"]["p50"] <= found["first_token_s"]["p99"] <= found["end_to_end_s"]["largest"]
    assert found["gap_s"]["count"] > 0
    assert found["tokens_per_s"] > 0
    assert (found["failures"], found["good_share"]) == ({}, None)
    nobody = Cli(cli.home)("--engine", "unix:/tmp/kv-nobody", "bench", "load", "--seconds", "1", "--json")
    assert (nobody.code, nobody.value["error"]["message"]) == (3, "no engine answers at unix:/tmp/kv-nobody")


@pytest.mark.long(2)
def test_agents_of_a_load_come_back_to_their_memories_and_leave_none(cli: Cli) -> None:
    shape = ("--in", "20-40", "--out", "4~8", "--shared-prefix", "30", "--turns", "2")
    limits = ("--first-token-ms", "60000", "--gap-ms", "60000")
    found = cli.done("bench", "load", "--at-once", "3", "--requests", "6", *shape, *limits, "--json").value
    assert (found["failures"], found["phases"]) == ({}, {"ramp": 0, "steady": 6, "tail_s": 0.0})
    assert (found["good_share"], found["offered_tokens_per_s"]) == (1.0, None)
    assert found["good_requests_per_s"] == found["requests_per_s"] == pytest.approx(6 / found["wall_s"])
    assert 6 <= found["reply_tokens"] <= 48
    assert (found["settings"]["prompt_tokens"], found["settings"]["reply_tokens"]) == ("20-40", "4~8")
    assert [each for each in cli.done("agents", "ls", "--all", "--json").value if "bench-load" in str(each)] == []


@pytest.mark.long(4)
def test_a_load_is_sent_to_mlx_lms_server_too_and_shown_beside_it(cli: Cli, tmp_path: Path) -> None:
    options = ("--at-once", "3", "--requests", "3", "--in", "40", "--out", "8", "--plots", tmp_path / "plots")
    found = cli.done("bench", "load", *options, "--mlx-lm", "kvasir-tiny", "--json").value
    peer = found["peer"]
    assert (peer["failures"], peer["phases"]["steady"]) == ({}, 3)
    assert peer["serves"].startswith("up to 32 rows and 8 prompts in a batch, in float32")  # on Linux by its BLAS
    assert 0.8 * found["reply_tokens"] <= peer["reply_tokens"] <= 1.25 * found["reply_tokens"]
    assert found["ratios"]["wall_s"] == found["wall_s"] / peer["wall_s"]
    assert len(list((tmp_path / "plots").iterdir())) == 4
    by_wheel = cli.done("bench", "load", *options[:8], "--mlx-lm", "kvasir-tiny", "--wheels-blas", "--json").value
    assert sys.platform != "linux" or by_wheel["peer"]["serves"].endswith("in float32 by the reference BLAS")
    write_encoder(tmp_path / "encoder")
    left_out = cli.done("bench", "load", *options[:8], "--mlx-lm", tmp_path / "encoder")
    assert "mlx_lm.server was left out: " in left_out.out


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("--in", ("--in", "many")),
        ("--out", ("--out", "9-8")),
        ("--rate", ("--rate", "1", "--at-once", "2")),
        ("requests", ("--requests", "2", "--seconds", "2")),
        ("ramp", ("--requests", "2", "--ramp", "1")),
        ("--mlx-lm", ("--mlx-lm", "/tmp")),
    ],
)
def test_a_load_that_is_none_is_refused_by_its_option(field: str, wrong: tuple[str, ...]) -> None:
    refused = in_process("bench", "load", *wrong, "--json")
    assert (refused.code, refused.value["error"]["field"]) == (2, field)


@pytest.mark.long(3)
def test_doctor_finds_the_model_and_the_services(cli: Cli) -> None:
    eventually(lambda: cli("status", "--json").code == 0)  # the gateway is the last to be ready
    report = cli.done("doctor", "--json").value
    assert report["model"]["policy"]["applied_layers"] == report["model"]["policy"]["layer_count"]
    assert (report["model"]["policy"]["name"], report["model"]["policy"]["why"]) == ("q4", "asked for")
    assert report["model"]["kv_bytes_per_token"] < 0.3 * report["model"]["kv_bytes_per_token_fp16"]
    assert report["store"]["is_ready"]
    assert report["engine"]["is_ready"]
    assert report["engine"]["model"] == {
        "name": "kvasir-tiny",
        "kv_policy": "q4",
        "kv_policy_why": "asked for",
        "applied_layers": 8,
        "layer_count": 8,
    }
    kernels = dict.fromkeys(("attention", "encoding", "products"), "reference (MLX operations)") | {"failure": ""}
    assert report["engine"]["kernels"] == kernels == cli.done("status", "--json").value["kernels"]
    assert report["model"]["kernels"] == kernels | {"policies": {}}
    memory = report["model"]["memory"]
    kv_bytes = memory["kv_memory_bytes"]
    assert memory["is_auto"]
    assert memory["claimed_bytes"] > 0, "the running engine's"
    assert kv_bytes <= 64 * 1152 * 8192
    assert [(row["tokens"], row["agent_bytes"], row["fit"]) for row in memory["agents"]] == [
        (tokens, 1152 * tokens, kv_bytes // (1152 * tokens)) for tokens in (1024, 4096, 8192)
    ]
    assert 10e6 < memory["weights_bytes"] < 40e6
    assert report["problems"] == []
    assert report["model"]["families"]["GPT-OSS 20B"]["kv_bytes_per_token"] == 6912
    shown = cli("doctor").out
    assert "agents that fit" in shown
    assert "12 window of 128, 12 full" in shown
    assert "DeepSeek V2 Lite" in shown


@pytest.mark.long(2)
def test_doctor_reports_what_is_wrong_with_a_model(cli: Cli, tmp_path: Path) -> None:
    found = cli("doctor", "--model", str(tmp_path))
    assert found.code == 1
    assert "config.json" in found.out
    greedy = cli("doctor", "--memory-gib", "1000000", "--json")
    assert greedy.code == 1
    assert greedy.value["model"]["memory"]["kv_memory_bytes"] == 10**6 << 30
    assert "take --memory-gib" in greedy.value["problems"][0]


def test_home_and_what_lies_in_it_are_the_owners_alone(cli: Cli) -> None:
    for path in (cli.home, *cli.home.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_reload_is_heard_by_each_service_and_reported_in_the_audit(cli: Cli) -> None:
    told = cli.done("reload", "--json").value
    assert {name: (line["outcome"], line["parts"]) for name, line in told.items()} == {
        "store": ("allowed", "credentials peers"),
        "engine": ("allowed", "credentials store_tokens"),
        "http": ("allowed", "credentials"),
    }
    cli.done("agents", "ls")
    lines = [json.loads(line) for line in cli.done("audit", "--since", "1h", "--json").out.splitlines()]
    assert {line["service"] for line in lines if line["what"] == "reload"} == {"store", "engine", "http"}
    assert "reload" in cli.done("audit").out
    assert cli.done("audit", "--agent", "nobody").out == "nothing needs attention\n"
    assert cli("audit", "--since", "later").code == 2


@pytest.mark.long(4)
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_token_that_is_removed_ends_at_the_gateway_though_the_store_hangs(cli: Cli, is_interrupted: bool) -> None:
    eventually(lambda: cli("status", "--json").code == 0)
    running = Home(cli.home).running()
    assert running is not None
    key = read_token(Path(cli.done("tokens", "new", "leaver", "--json").value["token_file"]))
    cli.done("reload")
    assert _answered(running.http, key)[0] == 200
    cli.done("tokens", "rm", "leaver")
    os.kill(running.store_pid, signal.SIGSTOP)
    try:
        with cli.running("reload") as reload:
            eventually(lambda: "reloading" in reload.err)
            if is_interrupted:
                reload.process.send_signal(signal.SIGTERM)
                assert reload.process.wait(60) == 143
            eventually(lambda: _answered(running.http, key)[0] == 401, within_s=9)
            os.kill(running.store_pid, signal.SIGCONT)
            assert is_interrupted or reload.process.wait(60) == 0
    finally:
        os.kill(running.store_pid, signal.SIGCONT)


def test_a_new_namespace_remembers_after_a_reload(cli: Cli) -> None:
    made = cli.done("tokens", "new", "ben", "--namespace", "red", "--json").value
    assert made["then"] == f"kvasir --home {cli.home} reload"
    cli.done("reload")
    listen = cli.done(
        "--token-file", made["token_file"], "chat", "ada", "--once", "Hello.", "--json", "--max-tokens", "4"
    )
    assert (listen.value["version"], listen.value["snapshot"]) == (1, "committed")


@pytest.mark.long(3)
def test_status_reports_where_the_metrics_of_each_are(cli: Cli) -> None:
    eventually(lambda: cli("status", "--json").code == 0)
    rows = {row["name"]: row for row in cli.done("status", "--json").value["services"]}
    ports = [parse_address(rows[name]["metrics"]).port for name in ("engine", "store", "http")]
    assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
    for name, port in zip(("engine", "store", "gateway"), ports, strict=True):
        assert scrape(port).labels("kvasir_build_info")["service"] == name
        assert health(port)[0] == 200
    assert f"metrics at 127.0.0.1:{ports[1]}" in cli.done("status").out
    assert "scrub" not in cli.done("status").out, "no pass has hashed a blob: that is no news"
    assert "no pass has hashed a blob yet" in cli.done("store", "scrub", "--status").out


@pytest.mark.long(12)
def test_an_engine_that_hangs_is_distinguished_from_one_that_does_not_run(cli: Cli) -> None:
    running = Home(cli.home).running()
    assert running is not None
    eventually(lambda: in_process("--home", cli.home, "status").code == 0)  # the gateway is there, too
    os.kill(running.engine_pid, signal.SIGSTOP)
    try:
        asked = ("chat", "hung", "--once", "Hello.", "--within", "2")
        with (  # they wait together
            cli.running("doctor", "--json") as doctor,
            cli.running("stats") as stats,
            cli.running(*asked) as chat,
        ):
            found = in_process("--home", cli.home, "status", "--json")
            assert (chat.process.wait(8), doctor.process.wait(60), stats.process.wait(60)) == (3, 1, 3)
            problems, silent = json.loads(doctor.out)["problems"], stats.err
        assert (found.code, [row["state"] for row in found.value["services"]]) == (3, ["ready", "hangs", "not ready"])
        assert "ENGINE_HANGS" in found.value["services"][2]["problems"][0]
        assert f"kill -9 {running.engine_pid}" in problems[0]
        assert "ENGINE_HANGS" in problems[1]
        assert f"the engine (pid {running.engine_pid}) lives" in silent
    finally:
        os.kill(running.engine_pid, signal.SIGCONT)
    nowhere = cli("--engine", "unix:/tmp/kv-nobody", "doctor", "--json")
    assert (nowhere.code, nowhere.value["engine"]["state"]) == (1, "stopped")


def test_the_problems_of_long_logs_are_shown_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    info = "2026-11-26T20:25:32.1Z [info     ] turn.finished [inference_svc]\n" * 300
    of_store = "2026-11-26T20:25:32.1Z [warning  ] disk.slow [cachestore]\n"
    of_gateway = "2026-11-26 20:52:21,530 ERROR reload.failed\n"
    (tmp_path / "logs/store.log").write_text(of_store.replace("slow", "old") + of_store + info)
    (tmp_path / "logs/http.log").write_text(info + of_gateway + info)
    crash = "store ended with SIGKILL; starting it again in 0.5 s\n"
    (tmp_path / "logs/up.log").write_text(f"{crash}store is ready (pid 7, 3.8 s)\nstore: {of_store}{info}")
    shown = in_process("--home", tmp_path, "logs", "--problems", "-n", "1").out
    assert shown == f"http: {of_gateway}store: {of_store}up: {crash}"
    assert in_process("--home", tmp_path, "logs", "--problems", "-n", "0").out == ""
    assert "disk.slow" not in in_process("--home", tmp_path, "logs").out


def test_the_logs_of_the_services_are_shown_and_followed(cli: Cli) -> None:
    rows = [json.loads(line) for line in cli.done("logs", "--json", "-n", "5").out.splitlines()]
    assert {row["service"] for row in rows} == {"store", "engine", "http"}
    assert "engine.ready" in cli.done("logs", "engine", "-n", "100").out
    assert cli("logs", "nonsense").code == 2
    assert in_process("--home", "/tmp/kv-nowhere", "logs").code == 5
    with cli.running("logs", "-f", "-n", "1", "store") as followed:
        eventually(lambda: followed.out)
        with (cli.home / "logs" / "store.log").open("a") as log:
            log.write("a new line\n")
        eventually(lambda: followed.out.endswith("\na new line\n"))


@pytest.mark.long(4)
def test_an_agent_of_a_restored_home_goes_on_token_for_token(cli: Cli, tmp_path: Path) -> None:
    def turn(home: Path) -> TurnResult:
        with Home(home).endpoint("engine").engine_client(60) as engine:
            asked = [message("user", "What is my dog called?")]
            options = GenerateOptions(max_tokens=40)
            return follow_turn(engine.generate(append_messages=asked, agent_id="copied", options=options))

    cli.done("chat", "copied", "--once", "My name is Marco. My dog is called Rex.")
    cli.done("backup", tmp_path / "backup")
    stayed = turn(cli.home)
    new = in_memory.home()
    try:
        Cli(new).done("restore", tmp_path / "backup")
        with Cli(new).running("up", "--no-http") as up:
            wait_until_ready(new, up)
            restored = turn(new)
    finally:
        shutil.rmtree(new)
    assert (stayed.source, restored.source) == ("hot", "warm")
    assert "Rex" in stayed.reply
    assert (restored.token_ids, restored.cached_tokens) == (stayed.token_ids, stayed.cached_tokens)
    assert (restored.stored.version, restored.memory_tokens) == (2, stayed.memory_tokens)
