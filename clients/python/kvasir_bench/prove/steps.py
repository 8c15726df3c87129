"""The steps of `kvasir prove`, in their order: first what is quick and exact, then what takes time."""

from collections.abc import Callable, Mapping
from typing import Any

from kvasir_bench.attention import report as attention_report
from kvasir_bench.engine.report import plots as engine_plots
from kvasir_bench.memory_path import findings
from kvasir_bench.memory_path.campaign import PathScope
from kvasir_bench.memory_path.campaign import measure as measure_path
from kvasir_bench.memory_path.services import measured_services, memory_gib_for
from kvasir_bench.program import measured_by
from kvasir_bench.prove import exactness, machine
from kvasir_bench.prove.step import ProofScope, Report, Shown, Step, Table, Value, claim
from kvasir_bench.system import SHORT_HOME
from kvasir_bench.tables import cells, verdicts

_SHAPE, _QUICK_SHAPE = "llama-3.1-8b", "llama-3.1-8b-2l"
_LENGTHS, _QUICK_LENGTHS = (2048, 8192), (600,)
_PREFILL_PER_S = 2000


def _attention(scope: ProofScope, report: Report) -> Value:
    return measured_by("attention", "attention was not measured", {"--quick": scope.is_quick}, report)


def _engine(*cases: str) -> Callable[[ProofScope, Report], Value]:
    def measure(scope: ProofScope, report: Report) -> Value:
        options = {
            "--model": scope.model,
            "--peer": "mlx-lm",
            "--repeats": 3,
            "--time-limit-s": 30,  # nothing new is begun after it, and nothing is repeated
            "--quick": scope.is_quick,
        }
        return measured_by("engine", "the engine was not measured", options, report, "--only", *cases)

    return measure


def _memory_path(scope: ProofScope, report: Report) -> Value:
    """Pages of a real model's size are filled, not computed: it is about disk, wire and memory."""
    lengths = _QUICK_LENGTHS if scope.is_quick else _LENGTHS
    played = ("--shape", _QUICK_SHAPE if scope.is_quick else _SHAPE, "--prefill-tokens-per-s", str(_PREFILL_PER_S))
    room = memory_gib_for(max(lengths))
    with measured_services(SHORT_HOME, model="", played=played, memory_gib=room) as services:
        found = measure_path(PathScope(lengths, 1, is_quick=scope.is_quick), services, report)
    what = "after each loss an agent's reply is the one that it gives while it is hot, token for token"
    return {"claims": [claim(what, all(row["is_exact"] for row in found["rows"]))], **found}


def _shown_attention(value: Mapping[str, Any]) -> Shown:
    return [("", attention_report.table(value)), *_targets(value)], None


def _shown_engine(value: Mapping[str, Any]) -> Shown:
    tables = [(case["title"], cells(case["rows"])) for case in value["cases"].values() if case["rows"]]
    return [*tables, *_targets(value)], engine_plots(value)


def _shown_path(value: Mapping[str, Any]) -> Shown:
    shown = ("length", "memory_bytes", "cold_s", "hot_s", *(f"{phase}_s" for phase in findings.RESTORED), "is_exact")
    rows = cells([{key: row[key] for key in shown} for row in value["rows"]])
    rates = {**value["machine"], **value["device"]}.items()
    found = [(name.replace("_", " "), f"{rate / 1e9:.2f} GB/s") for name, rate in rates]
    tables: list[Table] = [("First tokens", rows), ("Rates of this machine", [("", "found"), *found])]
    return [*tables, *_targets(value)], findings.plots(value)


def _targets(value: Mapping[str, Any]) -> list[Table]:
    return [("Targets", verdicts(value["targets"]))] if value["targets"] else []


_SUITES = {
    "kv-attention": ("tests/inference/kv/attention",),
    "kv": ("tests/inference/kv", "--ignore=tests/inference/kv/attention"),
    "engine-turns": ("tests/inference/engine/turns",),
    "engine-others": ("tests/inference/engine", "--ignore=tests/inference/engine/turns"),
}
STEPS = (
    Step("machine", "The machine", 3, 3, machine.machine),
    Step("kernels", "Kernels against the reference", 10, 8, exactness.kernels),
    Step("batch", "A batch as alone", 25, 12, exactness.batch_as_alone),
    Step("kill", "Kill and restore", 20, 20, exactness.kill_and_restore),
    Step("first-day", "Clocks, disk, limits and memory", 10, 8, machine.first_day),
    *(Step(f"suite-{name}", f"Tests: {name}", 75, 0, exactness.suite(*folders)) for name, folders in _SUITES.items()),
    Step("attention", "Attention over pages", 30, 4, _attention, _shown_attention),
    Step("decode", "Decoding, beside mlx-lm", 60, 15, _engine("decode", "peer"), _shown_engine),
    Step("first-token", "First tokens, beside mlx-lm", 90, 15, _engine("first_token"), _shown_engine),
    Step("pairs", "Agents together", 60, 0, _engine("pairs", "staggered"), _shown_engine),
    Step("gaps", "Gaps and cancels", 60, 0, _engine("gaps", "cancel"), _shown_engine),
    Step("memory", "Bytes of memories", 60, 0, _engine("memory", "decoding_bytes"), _shown_engine),
    Step("reuse", "Tokens of memories that are reused", 60, 0, _engine("matching", "shared_prefix"), _shown_engine),
    Step("memory-path", "Memories to the store and back", 90, 20, _memory_path, _shown_path),
)


def steps_of(scope: ProofScope) -> tuple[Step, ...]:
    """A quick proof leaves the long ones out; without a checkout there are no tests."""
    has_tests = exactness.source() is not None
    return tuple(step for step in STEPS if step.expected_s(scope) and (has_tests or not step.name.startswith("suite-")))


def shown(record: Mapping[str, Any]) -> Shown:
    """The tables and pictures of a step's record; none of one that failed, or that this version does not know."""
    step = next((step for step in STEPS if step.name == record["name"]), None)
    return step.shown(record["value"]) if step and "value" in record else ([], None)
