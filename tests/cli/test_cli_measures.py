"""The commands that measure and examine: the self-test tells, kills and asks; the bench says rates and targets."""

import json
import tempfile
from pathlib import Path

import pytest
from kvasir_bench.quality.report import lines as lines_of

from tests.cli.running import Cli, in_process
from tests.inference.engine.tiny_models import LLAMA, write_model


@pytest.mark.long(16)
def test_the_self_test_finds_that_memory_comes_back(tmp_path: Path) -> None:
    report = Cli(tmp_path)("doctor", "--self-test", "--json", timeout_s=240)
    assert report.code == 0, report.out
    steps = report.value["self_test"]["steps"]
    assert any("killed with -9" in step for step in steps)
    assert any("came warm" in step for step in steps)
    assert not any("wrong" in step for step in steps)


@pytest.mark.long(9)
def test_the_bench_says_rates_and_targets_as_json(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as home:
        results = Cli(Path(home)).done("bench", "store", "--quick", "--json", "--keep", str(kept)).value
    assert results == json.loads(kept.read_text())
    assert [size["name"] for size in results["sizes"]] == ["kvasir-tiny", "llama-3.1-8b"]
    assert 9.0e6 < results["sizes"][1]["block_bytes"] < 9.8e6
    for size in results["sizes"]:
        assert set(size["mb_per_s"]) == {
            *("tcp", "write_fsync", "blake3", "blake3_all", "read"),
            *("put", "get", "pull", "put_files", "get_files", "sealed_put", "sealed_get"),
        }
        assert all(rate > 0 for rate in size["mb_per_s"].values())
    assert results["startup"]["blobs"] == 500
    assert {"what", "found", "wanted", "is_met"} == set(results["targets"][0])
    assert len(results["targets"]) == 11


def test_a_memory_path_of_no_tokens_or_of_two_models_is_refused() -> None:
    wrong = in_process("bench", "memory-path", "--lengths", "1024,many", "--json")
    both = in_process("bench", "memory-path", "--model", ".", "--shape", "llama-3.1-8b", "--json")
    assert (wrong.code, both.code) == (2, 2)
    assert ("--lengths" in wrong.out + wrong.err, "--shape" in both.out + both.err) == (True, True)


@pytest.mark.long(32)
def test_the_memory_path_is_measured_from_cold_to_a_page_cache_that_was_dropped(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as home:
        command = ("bench", "memory-path", "--shape", "llama-3.1-8b-2l", "--lengths", "600,900", "--repeats", "1")
        options = ("--quick", "--prefill-tokens-per-s", "500", "--home", home, "--keep", str(kept), "--json")
        ended = Cli(Path(home))(*command, *options, timeout_s=240)
    assert ended.code == 0, ended.out + ended.err
    results = ended.value
    assert results == json.loads(kept.read_text())
    assert [row["length"] for row in results["rows"]] == [600, 900]
    for row in results["rows"]:
        assert (row["is_exact"], row["not_stored"], row["failed_at_first"]) == (True, 0, 0)
    for agent in results["agents"]:
        sources = [agent[phase]["source"] for phase in ("cold", "hot", "from_ram", "engine_killed", "both_killed")]
        assert sources == ["cold", "hot", "warm", "warm", "warm"]
    assert set(results["ready"]) == {"first", "from_ram", "engine_killed", "both_killed"}
    assert len(results["first_turns"]) == 3
    assert (tmp_path / "kept.json.engine.log").exists()


@pytest.mark.long(26)
def test_the_quality_bench_measures_every_rung_beside_exact_kv_and_mlx_lms_own() -> None:
    """Key names that scripts rely on; and the order that bits must give."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as home:
        command = ("bench", "quality", "--quick", "--kv-exact-layers", "last", "--json")
        results = Cli(Path(home))(*command, timeout_s=280).value
    every = {"name", "bytes_per_token", "kl", "kl_worst", "top1_agreement", "perplexity", "positions", "seconds"}
    every |= {"recall", "tool_calls", "tasks"}
    assert every == set(results["reference"]) == set(results["peers"][0])
    assert every | {"passes", "why"} == set(results["rungs"][0])
    assert [rung["name"] for rung in results["rungs"]] == ["q4", "q4-rotated", "k8v4", "q8", "fp"]
    assert [peer["name"] for peer in results["peers"]] == ["mlx-lm q4", "mlx-lm q8"]
    assert results["exact_layers"] == [7]
    cost = [rung["bytes_per_token"] for rung in results["rungs"]]
    assert (cost, cost[0], cost[-1]) == (sorted(cost), 7 * 144 + 512, 8 * 512)
    kl = {found["name"]: found["kl"] for found in results["rungs"]}
    assert kl["q4"] > kl["k8v4"] > kl["q8"] > kl["fp"] >= 0
    assert kl["q4-rotated"] > kl["k8v4"]
    right = [rung["recall"]["right"] for rung in results["rungs"]]
    assert set(results["reference"]["tasks"]) == {"corrections", "summaries", "tool_arguments"}
    assert results["auto"]["chooses"] == "q4-rotated"
    assert right == [results["reference"]["recall"]["right"]] * len(right)


def test_the_quality_bench_reports_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    refused = Cli(tmp_path)("bench", "quality", "--quick", "--model", str(tmp_path))
    assert refused.code != 0
    assert "config.json" in refused.err


@pytest.mark.long(7)
def test_the_quality_bench_reads_a_text_of_ones_own_and_suggests_layers_to_keep_exact(tmp_path: Path) -> None:
    cli, model, text = Cli(tmp_path), write_model(tmp_path / "model", LLAMA), tmp_path / "notes.txt"
    text.write_text("Grüße an die Küche: " + "the quick brown fox jumps over the lazy dog; " * 60)
    command = ("bench", "quality", "--quick", "--model", model, "--text", text, "--kv-bytes", 1000)
    results = cli(*command, "--json", "--plots", tmp_path / "plots", timeout_s=120).value
    assert (results["material"], results["text"]["windows"]) == ("text", 16)
    every = {"name", "bytes_per_token", "kl", "kl_worst", "top1_agreement", "perplexity", "positions", "seconds"}
    every |= {"kl_low", "kl_high", "top1_low", "top1_high"}
    every |= {f"perplexity_rise{end}" for end in ("", "_low", "_high")}
    assert {frozenset(each) for each in (results["reference"], *results["rungs"], results["mixed"])} == {
        frozenset(every)
    }
    for each in results["rungs"]:
        assert each["kl_low"] <= each["kl"] <= each["kl_high"]
    layers = results["layers"]
    assert (layers["policy"], layers["windows"], [row["layer"] for row in layers["rows"]]) == ("q4", 8, [0, 1, 2])
    costly = max(layers["rows"], key=lambda row: row["kl"])["layer"]
    assert results["mixed"]["name"] == f"q4, layer {costly} exact"
    assert results["mixed"]["bytes_per_token"] == 432 + 368
    assert set(results["suggestion"]) == {"budget_bytes", "kv_policy", "kv_exact_layers", "why"}
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "quality_layers.png",
        "quality_policies.png",
    ]
    shown = "\n".join(lines_of(results))
    assert f"q4, layer {costly} exact" in shown
    assert "within 1000 bytes a token: kvasir up --kv-policy" in shown


def test_the_quality_bench_measures_a_users_own_tasks(tmp_path: Path) -> None:
    cli, model, tasks = Cli(tmp_path), write_model(tmp_path / "model", LLAMA), tmp_path / "tasks.jsonl"
    lines = [{"task": "sums", "prompt": "1 + 1 =", "answer": " 2"}] * 2
    lines += [{"task": "talk", "messages": [{"role": "user", "content": "Hello."}], "answer": "Good day."}]
    tasks.write_text("\n".join(map(json.dumps, lines)))
    results = cli("bench", "quality", "--model", model, "--tasks", tasks, "--json", timeout_s=120).value
    assert results["material"] == "tasks"
    for each in (results["reference"], *results["rungs"]):
        assert {name: found["n"] for name, found in each["tasks"].items()} == {"sums": 2, "talk": 1}
        assert each["positions"] > 0
    assert "talk" in next(lines_of(results))


@pytest.mark.long(4)
def test_the_quality_bench_measures_fewer_bits_of_weights(tmp_path: Path) -> None:
    cli, model, tasks = Cli(tmp_path), write_model(tmp_path / "model", LLAMA), tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task": "sums", "prompt": "1 + 1 =", "answer": " 2"}))
    given = ("bench", "quality", "--weights", "--model", model, "--tasks", tasks)
    results = cli(*given, "--json", "--plots", tmp_path / "plots", timeout_s=120).value
    every = {"name", "bits", "effective_bits", "matrices", "weights_bytes"}
    every |= {"kl", "kl_worst", "top1_agreement", "perplexity", "positions", "seconds", "tasks"}
    assert {frozenset(each) for each in results["weights"]} == {frozenset(every)}
    assert len(results["weights"]) == 3 + 8 + 3
    assert results["reference"]["effective_bits"] == 16
    by_name = {each["name"]: each for each in results["weights"]}
    assert 4.5 < by_name["4 bits, all"]["effective_bits"] < by_name["4 bits, selective"]["effective_bits"] < 16
    assert not {"rungs", "peers", "auto"} & set(results)
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["quality_weights.png"]
    shown = "\n".join(lines_of(results))
    assert "4 bits, layer 2 alone" in shown
    assert "embed_tokens is its head, too" in shown
    refused = in_process("bench", "quality", "--weights", "--kv-exact-layers", "last")
    assert "--weights: expected neither --text nor --kv-exact-layers" in refused.err


def test_tasks_with_a_bad_line_or_beside_a_text_are_refused(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task": "sums", "prompt": "1 + 1 =", "answer": " 2"}\n{"task": "sums", "prompt": "1 + 2 ="}\n')
    refused = in_process("bench", "quality", "--tasks", tasks)
    assert refused.code != 0
    assert "line 2, answer: expected a text" in refused.err
    assert "expected one of them" in in_process("bench", "quality", "--tasks", tasks, "--text", tasks).err
    assert "does not shorten" in in_process("bench", "quality", "--tasks", tasks, "--quick").err


def test_a_text_that_is_too_short_or_has_no_layers_to_measure_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("Too short. " * 20)
    refused = Cli(tmp_path)("bench", "quality", "--text", text)
    assert refused.code != 0
    assert str(text) in refused.err
    assert "at least 1,024 tokens" in refused.err
    alone = Cli(tmp_path)("bench", "quality", "--kv-bytes", "1000")
    assert alone.code != 0
    assert "belong to --text" in alone.err


@pytest.mark.long(2)
def test_a_made_model_is_one_that_doctor_can_keep(tmp_path: Path) -> None:
    cli, directory = Cli(tmp_path), tmp_path / "model"
    command = ("bench", "make-model", "--geometry", "kvasir-tiny-2l", "--bits", "4", directory)
    made = cli.done(*command, "--json").value
    assert set(made) == {"directory", "geometry", "layers", "weights_bytes", "seconds"}
    assert (made["layers"], made["directory"]) == (2, str(directory))
    model = cli("doctor", "--json", "--model", directory).value["model"]
    assert (model["policy"]["applied_layers"], model["context_tokens"]) == (2, 8192)
    again = cli(*command)
    assert again.code != 0
    assert "not empty" in again.err


def test_a_geometry_that_nobody_knows_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    refused = Cli(tmp_path)("bench", "make-model", "--geometry", "gemma-4", tmp_path / "model")
    assert refused.code != 0
    assert "llama-3.1-8b, " in refused.err
    assert not (tmp_path / "model").exists()
