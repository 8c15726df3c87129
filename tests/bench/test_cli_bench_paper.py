"""`kvasir bench paper` measures a table in services of its own, and shows it in every form. No timing is asserted."""

import csv
import json
import tempfile
from pathlib import Path

import pytest

from tests.cli.running import Cli, in_process

TABLES = ("--table", "5.4 prefix", "--table", "002 latency")


def test_an_unknown_table_and_half_a_server_are_refused() -> None:
    wrong = in_process("bench", "paper", "--table", "9.9", "--json")
    half = in_process("bench", "paper", "--http", "http://127.0.0.1:1234", "--json")
    assert (wrong.code != 0, half.code != 0) == (True, True)
    assert "--table 9.9: expected" in wrong.out + wrong.err
    assert "--http-model" in half.out + half.err


@pytest.mark.long(17)
def test_tables_are_measured_and_shown_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as home:
        cli = Cli(Path(home))
        forms = ("--csv", tmp_path / "csv", "--plots", tmp_path / "plots", "--keep", kept)
        ended = cli("bench", "paper", *TABLES, "--quick", *forms, "--json", timeout_s=240)
    assert ended.code == 0, ended.err
    results = ended.value
    assert results == json.loads(kept.read_text())
    here = {table["number"]: [row for row in table["rows"] if row["by"] == "here"] for table in results["tables"]}
    assert [row["request"] for row in here["5.4 prefix"]] == ["A (cold)", "B (shared)"]
    assert [row["part"] for row in here["002 latency"]] == ["tokenization", "prefill", "decode", "all"]
    assert not any(row["note"] for rows in here.values() for row in rows)
    assert all(row["end_to_end_s"] > 0 < row["tokens_per_s"] for row in here["5.4 prefix"])
    assert all(row["seconds_s"] > 0 < row["share"] for row in here["002 latency"])
    with (tmp_path / "csv" / "paper_5.4_prefix.csv").open() as file:
        assert [row["by"] for row in csv.DictReader(file)].count("here") == 2
    assert {path.stem for path in (tmp_path / "plots").iterdir()} >= {"paper_5.4_prefix_s", "paper_002_latency_s"}
    shown = in_process("bench", "paper", "--results", kept, "--results", kept, "--markdown")
    assert shown.out.count("### 5.4 prefix: ") == 1
    kept.write_text("{}")
    assert in_process("bench", "paper", "--results", kept).code == 2
