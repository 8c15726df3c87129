"""`kvasir bench paper`: each table of the papers has its measured rows, whose every figure comes from a measurement."""

import asyncio
import copy
import csv
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import InvalidArgument, Unavailable
from kvasir_bench.commands.paper import conversations
from kvasir_bench.commands.paper.cases import CASES, chosen, with_field
from kvasir_bench.load.arithmetic import Arrived, TurnFailed
from kvasir_bench.paper import measured_rows as of
from kvasir_bench.paper import report
from kvasir_bench.paper.tables import HERE, SOURCES, Table, content, rows_of, tables
from kvasir_bench.pictures import series
from kvasir_bench.tables import markdown_table

# The papers' sections with tables, and the other papers.
WANTED = {
    *("3.1", "3.2", "3.4", "4.4", "5.2", "5.3", "5.4", "5.5", "5.6", "5.7", "5.8", "5.9", "5.10", "6.6"),
    *("001", "002", "003"),
}


def agent(length: int, scale: float) -> dict[str, Any]:
    def turn(first_s: float) -> dict[str, Any]:
        times = {
            "first_token_s": first_s * scale,
            "last_token_s": first_s * scale + 2,
            "last_event_s": first_s * scale + 3,
        }
        return {**times, "restore_s": 0.3 * scale, "tokens": 50, "source": "warm"}

    phases = {"cold": turn(2.0), "hot": turn(0.2), "both_killed": turn(0.5)}
    return {"context_tokens": length, "file_bytes": 1000 * length, **phases}


def of_way(name: str, share: float) -> dict[str, Any]:
    facts = {"share_of_prefill": share, "accuracy": 0.9 * share, "first_token_p50_s": 0.1, "prefilled_tokens": 700}
    return {"way": name, **facts}


def rung(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "bytes_per_token": size, "perplexity": 2.5, "kl": 0.01}


def window(size: int, threshold: float = 0.3) -> dict[str, Any]:
    facts = {"speedup": 1.2, "tokens_per_pass": 2.0, "p_cache": 0.4}
    return {"context_tokens": 512, "window": size, "threshold": threshold, "tokens_per_s": 40.0 + size, **facts}


def coded(name: str, bits: float) -> dict[str, Any]:
    sizes = {"effective_bits": bits, "weights_bytes": int(1000 * bits)}
    return {"name": name, **sizes, "recall": {"share": 0.9, "right": 9, "n": 10}}


def prompt(length: int) -> dict[str, Any]:
    sizes = {"q4_bytes": 300 * length, "q4_peak_bytes": 500 * length, "fp16_bytes": 1000 * length}
    chunk = {"one_chunk_bytes": 300 * length, "one_chunk_peak_bytes": 10_000 * length}
    cells = {"cells_bytes": 300 * length, "cells_peak_bytes": 900 * length}
    return {"context_tokens": length, **sizes, "fp16_peak_bytes": 2000 * length, **chunk, **cells}


LAYERS = [{"kind": "full", "window": 0}, {"kind": "window", "window": 512}, {"kind": "full", "window": 0}]
FAMILY = {
    "layers": [{"kind": "full", "window": 0, "count": 32}],
    "kv_bytes_per_token": 36_864,
    "kv_bytes_per_token_fp16": 131_072,
}
FINDINGS: Mapping[str, Any] = {
    "facts": {
        "name": "tiny",
        "layers": LAYERS,
        "kv_bytes_per_token": 1152,
        "kv_bytes_per_token_fp16": 4096,
        "families": {"Llama 3.1 8B": FAMILY},
        "memory": {"most_kv_bytes": 9 << 30, "weights_bytes": 5 << 20},
        "free_disk_bytes": 70 << 30,
    },
    "kv_bytes": [prompt(500), prompt(4096)],
    "peaks": [prompt(4096), prompt(7552)],
    "growth": [
        {"kv": name, "context_tokens": length, "kv_bytes": 300 * length, "kv_peak_bytes": 700 * length}
        for name in ("kvasir, q4", "mlx-lm")
        for length in (512, 1024)
    ],
    "path": [agent(1024, 1.0), agent(1024, 1.4), agent(4096, 3.0)],
    "three_turns": [
        {"context_tokens": 2000, "turn": turn, "end_to_end_s": 3.0 / turn, "tokens": 60} for turn in (1, 2, 3)
    ],
    "prefix": [
        {"context_tokens": 1000, "request": name, "end_to_end_s": seconds, "tokens": 60}
        for name, seconds in (("A (cold)", 2.0), ("B (shared)", 1.0))
    ],
    "over_http": [
        {"context_tokens": 1024, "mode": mode, "first_token_s": first_s, "end_to_end_s": 3.0, "tokens": 60}
        for mode, first_s in (("streaming", 1.0), ("whole", 3.0))
    ],
    "servers": [
        {"server": "Kvasir", "turn_1_s": 2.0, "turn_2_s": 1.0, "turn_3_s": 1.1},
        {"server": "mlx_lm.server", "left_out": "it does not know the model"},
    ],
    "open_loop": {
        "rate_per_s": 1.0,
        "tokens_per_s": 31.0,
        "phases": {"ramp": 6, "steady": 24, "tail_s": 0.7},
        "first_token_s": {"p50": 0.2, "p95": 0.4},
    },
    "pairs": [
        {
            "context_tokens": 1024,
            "arrival": arrival,
            "end_to_end_s": 4.0,
            "tokens_per_s": 64.0,
            "stream_tokens_per_s": 40.0,
            "first_s": 0.5,
            "second_s": 0.7,
        }
        for arrival in ("sequential", "simultaneous", "staggered")
    ],
    "staggered": [
        {"context_tokens": 1024, "alone_first_s": 0.5, "first_s": 0.6, "sequential_s": 4.0, "staggered_s": 1.0}
    ],
    "matching": [
        {
            "context_tokens": 153,
            "chat": chat,
            "turn": turn,
            "prompt_tokens": 200,
            "by_tokens": 50,
            "by_characters": 150,
            "by_tokens_s": 0.4,
            "by_characters_s": 0.1,
        }
        for chat in ("messages", "transcript")
        for turn in ("1", "3", "all")
    ],
    "parts": [{"context_tokens": 512, "tokenize_s": 0.01, "prefill_s": 0.3, "decode_s": 1.0, "all_s": 1.31}],
    "peer": [{"context_tokens": "512", "engine_tokens_per_s": 100.0, "peer_tokens_per_s": 120.0}],
    "attention": {
        "rows": [
            {
                "who": "fused",
                "batch": 8,
                "tokens": 4096,
                "bits": 4,
                "call_s": 1e-4,
                "read_bytes_per_s": 1e12,
                "error": 0.01,
            }
        ]
    },
    "quality": {"reference": rung("fp", 4096), "rungs": [rung("q4", 1152)], "peers": [rung("mlx-lm q4", 1152)]},
    "weights": [
        {
            "loading": name,
            "load_s": 0.3,
            "first_logits_s": 0.6,
            "own_bytes": 5_000_000,
            "mapped_bytes": 7_000_000,
            "weights": "float32",
            "weights_bytes": 8_000_000,
        }
        for name in ("mapped", "copied")
    ],
    "windows": {"windows": [window(1), window(8), window(16)], "own": [window(16)], "thresholds": [window(16, 1.0)]},
    "fewer_bits": {
        "reference": coded("mlx-lm fp", 16.0),
        "weights": [coded("4 bits, all", 4.5), coded("4 bits, selective", 5.2), coded("4 bits, q_proj alone", 15.0)],
    },
    "scenarios": {
        "shapes": {"gossip": {"phases": 3, "agents": 3}},
        "rows": [
            {"scenario": scenario, **of_way(name, share)}
            for scenario in ("gossip", "all")
            for name, share in (("kv", 0.3), ("prefill", 1.0))
        ],
    },
}
BUILT = [table for table in tables() if table.source.cases]


def measured_rows(table: Table, findings: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(table, [findings[case] for case in table.source.cases], ALL, lambda _: "")
    return [row for row in rows if row["by"] == HERE and not row["note"]]


ALL = [*range(1 << 16)]


def leaves(found: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all numbers of findings that were measured."""
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for name, value in parts:
        if type(value) in (int, float) and name not in ("context_tokens", "turn", "window", "rate_per_s"):
            yield (*way, name)
        yield from leaves(value, (*way, name))


def changed(findings: Mapping[str, Any], way: tuple[Any, ...]) -> dict[str, Any]:
    other: Any = copy.deepcopy(dict(findings))
    at = other
    for name in way[:-1]:
        at = at[name]
    at[way[-1]] = at[way[-1]] * 2 + 1
    return other


def test_every_table_of_the_papers_is_declared_with_a_source() -> None:
    assert {table.number for table in tables()} == set(SOURCES)
    assert all(any(table.is_called(name) for table in tables()) for name in WANTED)
    assert {table.paper for table in tables()} == set(content()["papers"])
    assert {case for source in SOURCES.values() for case in source.cases} == set(CASES) == set(FINDINGS)
    assert len(chosen(["5.5"])) == 2
    assert len(chosen(["002", "5.6"])) == 9
    with pytest.raises(InvalidArgument, match=r"5\.5 end to end"):
        chosen(["9.9"])


def test_published_figures_lie_in_the_data_file_alone() -> None:
    bench = Path(report.__file__).parents[1]
    sources = " ".join(path.read_text() for path in bench.glob("**/paper/*.py"))
    figures = {
        figure
        for table in tables()
        for row in table.published
        for name, figure in row.items()
        if name in table.values and isinstance(figure, float) and figure != round(figure, 1)
    }
    assert len(figures) > 100
    assert not figures & {float(text) for text in re.findall(r"(?<![\w.])\d+\.\d+", sources)}


@pytest.mark.parametrize("table", BUILT, ids=lambda table: table.number)
def test_each_measured_cell_changes_with_its_measurement(table: Table) -> None:
    findings = {case: FINDINGS[case] for case in table.source.cases}
    rows = measured_rows(table, findings)
    assert rows, "nothing was measured"
    left = {(place, name) for place, row in enumerate(rows) for name in table.values if type(row[name]) in (int, float)}
    filled = {name for _, name in left} | {
        name for name in table.values if any(isinstance(row[name], str) for row in rows)
    }
    assert filled == {*table.values} - ({"tokens_per_s"} if table.number == "002 selective" else set())
    for way in leaves(findings):
        others = measured_rows(table, changed(findings, way))
        left -= {(place, name) for place, name in left if rows[place][name] != others[place][name]}
    assert not left


def test_a_context_that_was_left_out_has_the_reason_and_no_figure() -> None:
    [table] = [table for table in tables() if table.number == "5.5"]
    reasons = {16384: "beyond the model's context of 8,192"}
    rows = list(rows_of(table, [FINDINGS["path"]], [1024, 4096], lambda length: reasons.get(length, "")))
    longest = [row for row in rows if row["context_tokens"] == 16384]
    assert [row["by"] for row in longest] == ["Gemma 3 12B", HERE]
    assert (longest[0]["hot_s"], longest[1]["hot_s"]) == (0.844, None)
    assert longest[1]["note"] == reasons[16384]
    here = {row["context_tokens"]: row for row in rows if row["by"] == HERE}
    assert here[1024]["cold_s"] == pytest.approx(2.4)
    assert here[1024]["cold_to_hot"] == pytest.approx(10.0)
    failed = list(rows_of(table, (), [1024], lambda _: "", "the engine ended"))
    assert {row["note"] for row in failed if row["by"] == HERE} == {"the engine ended"}


def test_rows_of_another_context_than_the_titles_have_it_as_their_note() -> None:
    for number, case in (("5.4", "three_turns"), ("5.9", "servers")):
        [table] = [table for table in tables() if table.number == number]
        for context, note in ((1100, "behind 1,100 tokens"), (2000, "")):
            findings = [{**row, "context_tokens": context} for row in FINDINGS[case] if "left_out" not in row]
            rows = [row for row in rows_of(table, [findings], [context], lambda _: "") if row["by"] == HERE]
            assert {row["note"] for row in rows} - {table.source.missing} == {note}


def test_contexts_that_a_case_chooses_itself_are_all_shown() -> None:
    [table] = chosen(["001 attention"])
    [row] = rows_of(table, [FINDINGS["attention"]], [], lambda _: "")
    assert (row["attention"], row["context_tokens"], row["by"]) == ("fused", 4096, HERE)
    [table] = [table for table in chosen(["5.3"]) if table.number == "5.3"]
    contexts = {row["context_tokens"] for row in rows_of(table, [FINDINGS["path"]], [4000], lambda _: "")}
    assert 4000 in contexts
    assert not contexts & {1024, 4096}, "of other tables"


def test_choices_of_coded_weights_stand_beside_the_paper_s() -> None:
    [table] = [table for table in tables() if table.number == "002 selective"]
    shown = rows_of(table, [FINDINGS["fewer_bits"]], ALL, lambda _: "")
    rows = {row["weights"]: row for row in shown if row["by"] == HERE}
    assert rows["4 bits, all layers"]["effective_bits"] == 4.5
    assert rows["bfloat16"]["accuracy"] == 0.9
    assert rows["4 bits, lm_head alone"]["note"] == "no such matrix in this model"
    other = {**FINDINGS["fewer_bits"], "weights": [{"name": "4 bits, all", "top1_agreement": 0.7}]}
    [agreed] = [row for row in of.fewer_bits(other) if row["weights"] == "4 bits, all layers"]
    assert agreed["accuracy"] == 0.7


def test_windows_and_thresholds_stand_beside_the_paper_s() -> None:
    [table] = [table for table in tables() if table.number == "002 decoding"]
    shown = list(rows_of(table, [FINDINGS["windows"]], [512], lambda _: ""))
    here = {row["method"]: row for row in shown if row["by"] == HERE}
    assert here["autoregressive"]["speedup"] is None
    assert here["WeDLM, window 16"]["tokens_per_s"] == 56.0
    assert here["WeDLM, window 32"]["note"].startswith("needs a WeDLM model")
    assert set(here) == {
        "autoregressive", "WeDLM, window 8", "WeDLM, window 16", "WeDLM, window 32", "WeDLM, window 16, 1.0 nats"
    }  # fmt: skip
    [kept] = of.cacheability(FINDINGS["windows"])
    assert (kept["prompts"], kept["p_cache"]) == ("all", 0.4)


def test_a_model_stands_again_with_another_field(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "again").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "wedlm", "wedlm_entropy_threshold": 0.3}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    with_field(tmp_path / "model", tmp_path / "again", wedlm_entropy_threshold=1.0)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config == {"model_type": "wedlm", "wedlm_entropy_threshold": 1.0}
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == b"weights"
    assert "0.3" in (tmp_path / "model" / "config.json").read_text()


def test_methods_that_are_not_built_have_published_rows_alone() -> None:
    for table in tables():
        if not table.source.cases:
            rows = list(rows_of(table, (), (), lambda _: ""))
            assert len(rows) == 2 * len(table.published)
            assert all(row["note"].startswith("not built") for row in rows if row["by"] == HERE)
            assert all(row[name] is None for row in rows if row["by"] == HERE for name in table.values)


def results() -> dict[str, Any]:
    machine = {"platform": "Linux", "device": "cpu", "cores": 2, "mlx": "0.32", "load_before": 1.0, "load_after": 2.0}
    shown = [
        {
            **{name: getattr(table, name) for name in ("number", "paper", "title", "keys", "values", "note")},
            "rows": list(rows_of(table, [FINDINGS[case] for case in table.source.cases], ALL, lambda _: "")),
        }
        for table in tables()
    ]
    settings = {"repeats": 3, "is_quick": False}
    return {
        "machine": machine,
        "model": {"name": "tiny", "compute_type": "float32"},
        "settings": settings,
        "tables": shown,
    }


def test_text_markdown_and_csv_have_every_table(tmp_path: Path) -> None:
    found = results()
    text, page = "\n".join(report.lines(found)), "\n".join(report.lines(found, markdown_table))
    for table in tables():
        assert f"{table.number}: {table.title}" in text
        assert f"### {table.number}: {table.title}" in page
    assert "| 1,024 | Gemma 3 12B | 3.62 s | 949 ms | 654 ms | 2 | 5.5 |" in page
    written = report.write_csv(found, tmp_path)
    assert len(written) == len(tables())
    with (tmp_path / "paper_5.5.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["cold_s"], rows[0]["by"], rows[1]["by"]) == ("3.618", "Gemma 3 12B", HERE)


def test_the_kept_tables_have_the_published_figures_and_the_page_names_all_and_shows_some_as_kept() -> None:
    measured = Path(__file__).parents[2] / "tools/measured"
    kept = json.loads((measured / "papers-2026-11.json").read_text())
    for found in kept["tables"]:
        [table] = [table for table in tables() if table.number == found["number"]]
        declared = [row for row in rows_of(table, (), (), lambda _: "", "not measured") if row["by"] != HERE]
        assert [row for row in found["rows"] if row["by"] != HERE] == declared
        assert found["note"] == table.note
    page = (measured / "papers.md").read_text()
    made_on, *made = re.split(r"\n(?=#)", "\n".join(report.lines(kept, markdown_table)))
    whole = [part.strip() for part in re.split(r"\n(?=#)", page) if part.startswith("### ")]
    assert made_on.strip() in page
    assert len(whole) > 4
    assert [part for part in whole if part not in {each.strip() for each in made}] == []
    assert [found["number"] for found in kept["tables"] if f"\n| {found['number']} |" not in page] == []


def test_a_turn_that_a_server_fails_is_a_case_s_failure_and_not_the_run_s() -> None:
    class Full:
        async def turn(self, *_: Any) -> AsyncGenerator[Arrived, None]:
            raise TurnFailed("HTTP 503")
            yield Arrived()

    with pytest.raises(Unavailable, match="a turn failed: HTTP 503"):
        asyncio.run(conversations._streamed(Full(), "ada", []))


@pytest.mark.long(5)
def test_a_picture_has_published_and_measured_lines_of_one_unit(tmp_path: Path) -> None:
    plots = report.plots(results())
    picture, rows = plots.drawn["paper_5.5_s"]
    lines = series(picture, rows)
    assert lines["row Gemma 3 12B, cold s"][0] == [1024, 2048, 4096, 8192, 16384]
    assert lines["row here, hot s"][0] == [1024, 4096]
    picture, rows = plots.drawn["paper_5.4_s"]
    assert (picture.by, len(rows)) == ("", 9)
    few = {name: plots.drawn[name] for name in ("paper_5.5_s", "paper_5.4_s")}
    written = type(plots)(plots.note, few).write(tmp_path)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
