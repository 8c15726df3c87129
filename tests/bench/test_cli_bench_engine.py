"""`kvasir bench engine` measures every case, and says it under the names in its help. No timing is asserted."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kvasir_bench.engine import report as engine_keys
from kvasir_bench.engine.report import PICTURES, lines, plots
from kvasir_bench.pictures import series
from kvasir_bench.tables import cells, markdown_table

from tests.cli.running import KVASIR, Cli
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.running.waiting import eventually

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """One quick run of everything, and where its pictures are."""
    folder = tmp_path_factory.mktemp("bench")
    model = write_model(folder / "model", LLAMA)  # three layers; the shipped model has eight
    options = ("--quick", "--model", model, "--peer", "mlx-lm", "--plots", folder / "plots", "--json")
    run = Cli(folder)("bench", "engine", *options, timeout_s=280)
    assert run.code == 0, run.err
    return run.value, folder / "plots"


@pytest.mark.long(25)
def test_a_quick_run_says_every_promised_name_and_no_other(found: tuple[Any, Path]) -> None:
    results, _ = found
    assert set(results) == set(engine_keys.TOP)
    assert set(results["cases"]) == set(engine_keys.CASES)
    for name, case in results["cases"].items():
        assert case["rows"], name
        for row in case["rows"]:
            assert list(row) == list(engine_keys.CASES[name]), name
    assert all(set(target) == {"case", "what", "found", "wanted", "is_met"} for target in results["targets"])


@pytest.mark.long(9)
def test_what_is_measured_is_something(found: tuple[Any, Path]) -> None:
    cases = found[0]["cases"]
    for name, case in cases.items():
        for row in case["rows"]:
            assert all(
                value > 0 for key, value in row.items() if key.endswith(("_s", "_bytes")) and key != "budget_s"
            ), name
    resident = {row["how"].split(",")[0]: row["resident_bytes"] for row in cases["memory"]["rows"]}
    assert resident["q4"] < 0.4 * resident["16 bits"] < 0.4 * resident["mlx-lm's own KV"]
    transcript = [row for row in cases["matching"]["rows"] if row["chat"] == "transcript"]
    assert transcript[-1]["by_characters"] == sum(row["by_characters"] for row in transcript[:-1])
    assert transcript[-1]["by_characters"] > transcript[-1]["by_tokens"]


@pytest.mark.long(9)
def test_a_picture_is_written_for_each_case(found: tuple[Any, Path]) -> None:
    results, pictures = found
    assert {path.stem for path in pictures.iterdir()} == set(results["cases"]) == set(PICTURES)
    assert all(path.read_bytes().startswith(PNG) for path in pictures.iterdir())


@pytest.mark.long(4)
def test_the_help_names_every_key(tmp_path: Path) -> None:
    told = re.sub(r"\s+", " ", Cli(tmp_path).done("bench", "engine", "--help").out)
    for case, keys in engine_keys.CASES.items():
        assert f"{case}: " in told
        assert all(f"{key}: " in told for key, meaning in keys.items() if meaning), case


def test_an_engine_that_cannot_be_measured_reports_why(tmp_path: Path) -> None:
    ended = Cli(tmp_path)("bench", "engine", "--quick", "--only", "matching", "--model", str(tmp_path))
    assert ended.code != 0
    assert "config.json" in ended.err


@pytest.mark.long(4)
def test_texts_and_batches_choose_rows_of_tokens_ahead(tmp_path: Path) -> None:
    """So that several machines, or calls with a time limit, share the long form."""
    model, only = write_model(tmp_path / "model", LLAMA), ("--quick", "--only", "ahead", "--json")
    chosen = ("--texts", "one task,new words", "--batches", "2")
    rows = Cli(tmp_path).done("bench", "engine", *only, *chosen, "--model", model).value["cases"]["ahead"]["rows"]
    assert [(row["text"], row["batch"]) for row in rows] == [("one task", 2), ("new words", 2)]
    assert (rows[0]["accepted"] > 0, rows[1]["drafts_tried"]) == (True, 0)
    ended = Cli(tmp_path)("bench", "engine", *only, "--texts", "prose", "--model", model)
    assert ended.code != 0
    assert "expected some of code, calls, talk, new words, format, one task, got prose" in ended.out


@pytest.mark.long(4)
def test_behind_its_time_limit_a_run_shows_what_is_known(tmp_path: Path) -> None:
    cli, options = Cli(tmp_path), ("--only", "decode", "--only", "cancel", "--batches", "1", "--quick", "--json")
    results = cli.done("bench", "engine", *options, "--time-limit-s", "0.001").value
    assert set(results["cases"]) == {"decode"}
    assert [row["batch"] for row in results["cases"]["decode"]["rows"]] == [1]
    assert results["settings"]["time_limit_s"] == 0.001
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(results))
    shown = cli.done("bench", "engine", "--results", kept, "--plots", tmp_path / "plots").out
    assert "Decode throughput" in shown
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["decode.png"]


@pytest.mark.long(6)
def test_an_interrupted_run_leaves_what_it_has_measured(tmp_path: Path) -> None:
    model, kept = write_model(tmp_path / "model", LLAMA), tmp_path / "kept.json"
    options = ("--only", "decode", "--batches", "1,2", "--lengths", "64,300,400,500", "--keep", kept, "--model", model)
    # As in a terminal, Ctrl-C reaches the command and the program that measures.
    with subprocess.Popen([KVASIR, "bench", "engine", *options], start_new_session=True, stderr=subprocess.PIPE) as run:
        eventually(kept.exists, within_s=60)
        os.killpg(run.pid, signal.SIGINT)
    assert run.returncode == 130
    results = json.loads(kept.read_text())
    assert "64" in {row["context"] for row in results["cases"]["decode"]["rows"]}
    assert any("tokens per s" in line for line in lines(results))


ROWS = [
    {"batch": 1, "tokens_per_s": 178.74, "tokens_per_s_spread": 0.1, "gap_s": 0.0123, "peak_bytes": 2_500_000},
    {"batch": 8, "tokens_per_s": 1234.6, "tokens_per_s_spread": 0.04, "gap_s": 1.5, "peak_bytes": 12_500_000},
]
MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "device": "cpu",
    "blas": "",
    "platform": "Linux",
    "python": "3.11",
    "mlx": "0.32",
    "mlx-lm": "0.32",
    "load_before": 0.1,
    "load_after": 2.0,
}
MODEL = {
    "name": "tiny",
    "layers": 8,
    "compute_type": "float32",
    "key_bits": 4,
    "value_bits": 4,
    "kv_bytes_per_token": 1152,
    "cell_tokens": 256,
}
RESULTS = {
    "machine": MACHINE,
    "model": MODEL,
    "settings": {"repeats": 5, "is_quick": False},
    "cases": {"decode": {"title": "Decode | throughput", "rows": ROWS}},
    "targets": [{"case": "decode", "what": "8 rows / 1 row", "found": 6.91, "wanted": ">= 3.0", "is_met": True}],
}


def test_a_table_has_units_and_spreads_beside_their_medians() -> None:
    assert cells(ROWS) == [
        ["batch", "tokens per s", "gap", "peak"],
        ["1", "179 ±5%", "12.3 ms", "2.5 MB"],
        ["8", "1,235 ±2%", "1.5 s", "12.5 MB"],
    ]


def test_markdown_is_the_same_table_with_its_machine_and_targets() -> None:
    shown = list(lines(RESULTS, markdown_table))
    assert "a processor, 2 cores" in shown[0]
    assert "| batch | tokens per s | gap | peak |" in shown
    assert "|---:|---:|---:|---:|" in shown
    assert "| 8 | 1,235 ±2% | 1.5 s | 12.5 MB |" in shown
    assert "| met | 6.91 | >= 3.0 | 8 rows / 1 row |" in shown
    assert "H200 (cuda); Linux" in next(
        lines({**RESULTS, "machine": {**MACHINE, "device": "cuda", "device_name": "H200"}})
    )
    assert "Medians of 5;" in shown[0]
    cut_short = {**RESULTS, "settings": {**RESULTS["settings"], "fewest_repeats": 1}}
    assert "Medians of 1 to 5;" in next(lines(cut_short)), "a time limit left no more"
    assert "NOT MET" in "\n".join(lines({**RESULTS, "targets": [{**RESULTS["targets"][0], "is_met": False}]}))


@pytest.mark.long(1)
def test_a_picture_has_a_line_for_each_group_and_none_for_a_sum(tmp_path: Path) -> None:
    rows = [
        {"context": context, "batch": batch, "tokens_per_s": rate}
        for context, batch, rate in (("128", 1, 1.0), ("128", 8, 4.0), ("512", 1, 0.9), ("512", 8, 3.0))
    ]
    drawn = series(PICTURES["decode"], rows)
    assert drawn == {"context 128": ([1, 8], [1.0, 4.0]), "context 512": ([1, 8], [0.9, 3.0])}
    two = series(PICTURES["gaps"], [{"beside": "prefill", "median_gap_s": 0.01, "longest_gap_s": 0.2}])
    assert two == {"median gap s": (["prefill"], [0.01]), "longest gap s": (["prefill"], [0.2])}
    turns = [{"chat": "messages", "turn": turn, "by_characters": 9, "by_tokens": 3} for turn in ("1", "2", "all")]
    assert series(PICTURES["matching"], turns) == {
        "chat messages, by characters": (["1", "2"], [9, 9]),
        "chat messages, by tokens": (["1", "2"], [3, 3]),
    }
    firsts = {"context_tokens": 1024, "cold_s": 0.4, "warm_s": 0.2, "hot_s": 0.1}
    assert "peer cold s" not in series(PICTURES["first_token"], [firsts | {"peer_cold_s": None}])
    assert series(PICTURES["first_token"], [firsts | {"peer_cold_s": 0.3}])["peer cold s"] == ([1024], [0.3])
    [path] = plots({**RESULTS, "cases": {"decode": {"title": "", "rows": rows}}}).write(tmp_path)
    assert path.read_bytes().startswith(PNG)
