"""The bench's lab: how much is measured, when it stops, and that each kind of model can be restored in it."""

import ast
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import kvasir_bench
import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir_bench.engine import report
from kvasir_bench.engine.__main__ import CASES, _left, measured
from kvasir_bench.engine.cases import interruptions
from kvasir_bench.engine.cases.decode import MIXED, contexts, fitting
from kvasir_bench.engine.cases.memory_bytes import exact_bytes
from kvasir_bench.engine.lab import Lab, MeasuredEngine, Pace, Scope
from kvasir_bench.engine.mlx_lm_peer import MlxLmPeer
from kvasir_bench.engine.texts import Texts
from kvasir_bench.program import keep

from inference_svc.engine.mlx_thread import MlxThread
from inference_svc.model import kvasir_tiny
from inference_svc.model.probing.real_layouts import REAL_LAYOUTS, byte_costs
from tests.inference.engine.families import FALCON_H1, GEMMA3, LLAMA31, write_family
from tests.inference.engine.wedlm.tiny_wedlm import write_wedlm


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredEngine]:
    folder = tmp_path_factory.mktemp("model")
    engine = MeasuredEngine.opened(write_family(folder / "llama", LLAMA31), folder, 64 << 20)
    yield engine
    engine.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def new_lab(engine: MeasuredEngine, said: list[str], tmp_path: Path) -> Callable[..., Lab]:
    """A lab whose clock goes on by a second each time that it is read."""
    seconds = iter(range(10_000))
    return lambda **scope: Lab(
        engine, "", lambda: float(next(seconds)), Scope(**{"repeats": 3, **scope}), cache_dir=tmp_path, say=said.append
    )


def test_a_round_warms_up_and_the_others_count(new_lab: Callable[..., Lab]) -> None:
    assert list(new_lab().pace.rounds("it")) == [False, True, True, True]


def test_behind_the_time_limit_one_round_counts_and_one_item_is_measured(
    new_lab: Callable[..., Lab], said: list[str]
) -> None:
    late = new_lab(time_limit_s=0.5)
    assert list(late.pace.rounds("it")) == [False, True]
    assert late.pace.fewest_repeats == 1, "of the repeats that were wanted"
    assert list(late.pace.while_there_is_time(["first", "second", "third"])) == ["first"]
    assert "no time is left for second, third" in said[-1]
    early = new_lab(time_limit_s=1000)
    assert list(early.pace.while_there_is_time(["first", "second"])) == ["first", "second"]
    assert "of 1000 s]" in (early.pace.say("") or said[-1])


def test_where_nothing_is_compiled_only_a_cases_first_measurement_warms_up(new_lab: Callable[..., Lab]) -> None:
    pace = new_lab().pace
    assert [[*pace.rounds("first")], [*pace.rounds("second")]] == [[False, True, True, True], [True, True, True]]
    pace.begin_case()
    assert next(iter(pace.rounds("of the next case"))) is False
    pace = Pace(pace._clock, Scope(1), lambda _: None, compiles=True)
    assert [[*pace.rounds("first")], [*pace.rounds("second")]] == [[False, True], [False, True]]


@pytest.mark.parametrize(("round_s", "repeats"), [(3, 5), (4, 5), (6, 4), (7, 3), (19, 3), (20, 2), (200, 2)])
def test_the_longer_it_takes_the_fewer_repeats_a_measurement_has(round_s: int, repeats: int) -> None:
    seconds = [0.0]
    pace = Pace(lambda: seconds[0], Scope(5, enough_s=20.0), lambda _: None)
    counted = 0
    for counts in pace.rounds("it"):
        counted += counts
        seconds[0] += round_s if counts else 0
    assert (counted, pace.fewest_repeats) == (repeats, repeats)


def test_the_time_that_is_left_follows_from_the_cases_that_are_done() -> None:
    cases = [name for name in CASES if name != "peer"]
    assert _left(400.0, cases, 0) == ""
    assert _left(400.0, [*cases, "peer"], len(cases)) == f", about {400 * 21 / 79:.0f} s are left"


def test_a_text_is_computed_once_for_all_of_its_lengths(
    new_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, computed = new_lab(), list[int]()
    start = lab.agents._start

    def counted(tokens: Any, *given: Any, **named: Any) -> Any:
        run = start(tokens, *given, **named)
        ended = run.end()
        computed.append(ended.prompt_tokens - ended.cached_tokens)
        return run

    monkeypatch.setattr(lab.agents, "_start", counted)
    before, texts = lab.engine.memory_used_bytes, Texts(lab)
    memories = [texts.remember(length, 0) for length in (100, 300, 200)]
    assert computed == [100, 200, 1], "a memory's last token is computed again for its logits"
    assert [tuple(each.tokens[:-1]) for each in memories] == [lab.prompts.tokens(n, 0) for n in (100, 300, 200)]
    memories.append(texts.remember(64, 1))
    assert computed[3:] == [64], "another text"
    texts.forget()
    lab.agents.forget(memories)
    assert lab.engine.memory_used_bytes == before


def test_lengths_requested_are_cut_to_the_context_and_stand_once(new_lab: Callable[..., Lab]) -> None:
    assert new_lab().lengths(64, 128, 512) == [128, 512]
    lab = new_lab(lengths=(32768, 1024, 8192))
    assert lab.lengths(64, 128) == [1024, lab.engine.model.context_tokens - 512]
    assert contexts(new_lab(lengths=(2048,))) == ["2048", MIXED]
    assert contexts(new_lab(lengths=(2048,), batches=(1,))) == ["2048"]
    assert contexts(new_lab(is_quick=True)) == ["64"]


@pytest.mark.long(6)
def test_each_case_measures_at_the_lengths_that_were_given(engine: MeasuredEngine, tmp_path: Path) -> None:
    scope = Scope(1, is_quick=True, lengths=(64, 80))
    lab = Lab(engine, "", perf_counter, scope, cache_dir=tmp_path, say=lambda _: None)
    keys = {"pairs": "prompt_tokens", "staggered": "prompt_tokens", "parts": "prompt_tokens"}
    for case, key in {**keys, "matching": "text_tokens", "shared_prefix": "prefix_tokens"}.items():
        assert sorted({row[key] for row in CASES[case](lab).rows}) == [64, 80], case
    assert [row["context_tokens"] for row in CASES["decoding_bytes"](lab).rows] == [80]
    longer = Lab(engine, "", perf_counter, Scope(1, lengths=(520,)), cache_dir=tmp_path, say=lambda _: None)
    assert [row["during"].split(",")[0] for row in CASES["cancel"](longer).rows] == ["decode", *["prefill of 520"] * 2]


def test_a_batch_whose_prompts_take_too_long_to_compute_is_left_out() -> None:
    assert fitting("2048", (1, 8, 16)) == [1, 8, 16]
    assert fitting("32768", (1, 4, 8)) == [1, 4]
    assert fitting(MIXED, (1, 16)) == [1, 16]


def test_exact_bytes_count_a_windows_last_tokens_only() -> None:
    for name in ("Llama 3.1 8B", "Gemma 3 12B"):
        layers = REAL_LAYOUTS[name]
        identity = identity_pb2.KvIdentity(layers=layers)
        windows = sum(2 * layer.window * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
        assert exact_bytes(identity, 4096) == 4096 * byte_costs(layers)["kv_bytes_per_token_fp16"] + windows
    assert exact_bytes(identity, 1) == 48 * 2 * 8 * 512


@pytest.mark.long(2)
@pytest.mark.parametrize("config", [LLAMA31, GEMMA3, FALCON_H1], ids=lambda config: str(config["model_type"]))
def test_a_memory_of_each_kind_of_layer_is_restored_whole(
    config: dict[str, object], engine: MeasuredEngine, tmp_path: Path
) -> None:
    directory = write_family(tmp_path / "model", config)
    engine = MeasuredEngine.opened(directory, tmp_path, 64 << 20)
    try:
        lab = Lab(engine, directory, lambda: 0.0, Scope(repeats=1), cache_dir=tmp_path, say=lambda _: None)
        memory = lab.agents.remember(lab.prompts.tokens(599, 0))
        prompt = (*memory.tokens, 5, 6)
        warm = lab.start(prompt, 4, lab.agents.restored(memory)).end()
        hot = lab.agents.resume(lab.agents.fork(memory), (5, 6), 4).end()
        cached = 600 if engine.model.has_rewind_points else 599  # the last token's KV comes with the next prompt
        assert (warm.cached_tokens, hot.cached_tokens) == (cached, cached)
        assert warm.state.token_ids == hot.state.token_ids
        files = lab.agents.restored(memory)
        assert [window.first_block for window in files.windows] == ([1] if config is GEMMA3 else [])
        assert (files.state is not None) == (config is FALCON_H1)
    finally:
        engine.close()


def test_the_peer_decodes_behind_kept_prompts_as_often_as_one_likes(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    thread = MlxThread(lambda: MlxLmPeer(directory, "float32", perf_counter), name="mlx-lm")
    prompts = [(5, 6, 7, 8), (9, 10)]

    def lengths(**how: bool) -> list[list[int]]:
        def work(peer: MlxLmPeer) -> list[list[int]]:
            assert [len(times) for times in peer.generate(prompts, 6, **how)] == [7, 7]
            return [[layer.size() for layer in cache] for cache in peer._caches]

        return thread.post(work).result()

    layers = int(LLAMA31["num_hidden_layers"])
    kept = [[3] * layers, [1] * layers]
    try:
        assert [lengths(keeps=True), lengths(goes_on=True), lengths(goes_on=True)] == [kept] * 3
        assert lengths() == []
    finally:
        thread.close()


@pytest.mark.long(2)
def test_what_is_known_is_kept_after_each_row(new_lab: Callable[..., Lab]) -> None:
    kept: list[dict[str, Any]] = []
    lab = new_lab(repeats=1, is_quick=True, lengths=(64, 80))
    results = measured(lab, ["first_token"], kept.append)
    assert [len(each["cases"]["first_token"]["rows"]) for each in kept] == [1, 2, 2]
    assert kept[0]["cases"]["first_token"]["rows"] == results["cases"]["first_token"]["rows"][:1]


@pytest.mark.long(2)
def test_gaps_are_kept_after_each_round(new_lab: Callable[..., Lab]) -> None:
    lab, kept = new_lab(repeats=1, is_quick=True, lengths=(64,)), []
    lab.pace.keep = kept.append
    assert interruptions.run(lab).rows == kept[-1]


@pytest.mark.long(4)
def test_windows_of_masks_are_measured_beside_one_token_a_pass(new_lab: Callable[..., Lab], tmp_path: Path) -> None:
    [plain] = CASES["windows"](new_lab(is_quick=True)).rows
    assert (plain["window"], plain["tokens_per_pass"], plain["p_cache"]) == (1, 1.0, 1.0)
    engine = MeasuredEngine.opened(write_wedlm(tmp_path / "wedlm", wedlm_entropy_threshold=10.0), tmp_path, 64 << 20)
    lab = Lab(engine, "", perf_counter, Scope(1, is_quick=True), cache_dir=tmp_path, say=lambda _: None)
    rows = CASES["windows"](lab).rows
    engine.close()
    assert [row["window"] for row in rows] == [1, 4, 8, 16, 32]
    assert all(list(row) == list(report.CASES["windows"]) for row in rows)
    assert (rows[0]["speedup"], rows[0]["own_window"]) == (1.0, 8)
    # Each pass computes a mask, each but the first the token before.
    assert rows[0]["tokens_per_pass"] == 1
    assert rows[0]["p_cache"] == 12 / 23
    assert rows[1]["tokens_per_pass"] == 12 / 3  # below this threshold every mask is sure
    assert all(0 < row["p_cache"] <= 1 for row in rows)


@pytest.mark.long(8)
def test_the_model_that_ships_answers_questions_by_windows(tmp_path: Path) -> None:
    engine = MeasuredEngine.opened(kvasir_tiny.shipped()[kvasir_tiny.WEDLM_NAME], tmp_path, 256 << 20)
    lab = Lab(engine, "", perf_counter, Scope(1, is_quick=True), cache_dir=tmp_path, say=lambda _: None)
    own = next(row for row in CASES["windows"](lab).rows if row["window"] == row["own_window"])
    engine.close()
    assert own["tokens_per_pass"] >= 2.5
    assert own["p_cache"] >= 0.6


def test_a_full_disk_costs_what_is_kept_neither_the_last_row_nor_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept.json"
    keep(file, {"rows": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # as if the disk had no more room
    try:
        keep(file, {"rows": "2" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(file.read_text()) == {"rows": 1}
    assert f"{file}: not kept: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]
    keep(file, {"rows": 3})
    assert json.loads(file.read_text()) == {"rows": 3}


def test_programs_that_compute_take_the_blas_before_mlx() -> None:
    """MLX's own on a Linux CPU is a 25th as fast: mlx_lm.server was measured with it, beside an engine with MKL."""
    late, packages = set[str](), ("mlx", "mlx_lm", "inference_svc")
    for file in Path(kvasir_bench.__file__).parent.rglob("*.py"):
        if '__name__ == "__main__"' in (text := file.read_text()):
            imports = [each for each in ast.parse(text).body if isinstance(each, ast.Import | ast.ImportFrom)]
            names = [each.module or "" if isinstance(each, ast.ImportFrom) else each.names[0].name for each in imports]
            first = next((name for name in names if name.split(".")[0] in packages), "inference_svc")
            late |= {file.name} if not first.startswith("inference_svc") else set()
    assert late == {"link_rates.py"}, "it copies, and computes nothing"


LOGS = """import structlog
from kvasir_bench.program import printed
printed(lambda: structlog.get_logger().warning("kernels.check_raised") or {"rows": 1})"""


def test_log_lines_of_a_program_are_not_in_its_json() -> None:
    said = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == {"rows": 1}
    assert "kernels.check_raised" in said.stderr
