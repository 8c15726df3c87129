"""`kvasir doctor`: which layers of a model are kept, what computes, what runs, and what to do about problems."""

import json
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

import kvasir
from kvasir.cli.agents import store_client, unclaimed
from kvasir.cli.caller import Caller
from kvasir.cli.demo.self_test import self_test
from kvasir.cli.failures import PROBLEMS
from kvasir.cli.rows import counted, fields_of, size, stats_row
from kvasir.cli.running.checks import check_engine_option, check_exact_layers
from kvasir.cli.running.group import ServiceState, service_states
from kvasir.cli.running.health import Health
from kvasir.cli.running.holding import is_led
from kvasir.cli.running.program import run_program, version_of
from kvasir.cli.showing.arguments import option
from kvasir.cli.showing.tables import table
from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.options.engine import AUTO, KvPolicy

_PACKAGES = ("mlx", "mlx-lm", "grpcio", "protobuf", "safetensors", "sqlite-utils", "mkl")
GIB = 1 << 30
_LITTLE_DISK_BYTES = 2 << 30
_FASTER = (
    "MLX computes on the reference BLAS, about 20 times slower than it could; "
    "install `mkl` (pip, x86-64) or `libopenblas0-pthread` (Debian)"
)


def doctor(
    caller: Caller,
    model: Annotated[str, option("A directory or name of an mlx-lm model. Default: the shipped model.")] = "",
    kv_policy: Annotated[
        KvPolicy | None,
        option("As for `kvasir up`; auto measures the model, unless an engine of this home has done so."),
    ] = None,
    kv_exact_layers: Annotated[str, option("As for `kvasir up`.")] = "",
    memory_gib: Annotated[str | None, option("As for `kvasir up`.", metavar="GIB|auto")] = None,
    does_self_test: Annotated[
        bool, option("Also start both services, tell an agent a fact, kill -9 both, and ask.", "--self-test")
    ] = False,
) -> None:
    """Show which layers of a model Kvasir can keep, the device, the running services, and what to do about problems."""
    check_engine_option("memory_gib", memory_gib)
    check_exact_layers(kv_exact_layers, kv_policy, [])
    gib = None if memory_gib == AUTO else memory_gib
    given = [("--kv-policy", kv_policy), ("--kv-exact-layers", kv_exact_layers), ("--memory-gib", gib)]
    report = examined(caller, model, [str(part) for option in given if option[1] for part in option])
    if does_self_test:
        with caller.busy("storing a fact, killing both services, asking"):
            report["self_test"] = self_test(model)
        report["problems"] += report["self_test"]["problems"]
    caller.result(report, lambda out: _show(out, report))
    if report["problems"]:
        raise typer.Exit(PROBLEMS)


def examined(caller: Caller, model: str, options: Sequence[str]) -> dict[str, Any]:
    """The report without the self-test. `problems` are sentences with the remedy."""
    problems: list[str] = []
    home = caller.home.root
    services = {state.name: state for state in service_states(caller)}
    problems += service_problems(caller, services.values())
    # The home's engine may have measured the model before. No home is made for this.
    remembered = ["--cache-dir", str(caller.home.engine_state)] if caller.home.engine_state.is_dir() else []
    with caller.busy("loading the model"):
        facts = model_facts(model, [*options, *remembered], problems)
    disk = shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists()))
    if disk.free < _LITTLE_DISK_BYTES:
        problems.append(f"{home}: only {size(disk.free)} of disk are free")
    if facts and facts["device"] == "cpu" and sys.platform == "linux" and not facts["blas"]:
        problems.append(_FASTER)
    engine = services.get("engine", ServiceState("engine", "", 0, Health.STOPPED))  # `kvasir store serve` has none
    serving = engine.facts.get("kernels", {})
    problems += kernel_problems((facts or {}).get("kernels", {}), serving)
    if facts and facts["memory"]["kv_memory_bytes"] > facts["memory"]["most_kv_bytes"]:
        most = facts["memory"]["most_kv_bytes"] / GIB
        problems.append(f"this machine has no room for so much KV beside the weights: take --memory-gib {most:.1f}")
    return {
        "kvasir": kvasir.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "model": facts,
        "home": {"path": str(home), "free_disk_bytes": disk.free},
        "store": _service(services["store"]) | _store_stats(caller, problems),
        "engine": _service(engine) | _loaded_model(caller) | {"kernels": serving},
        "problems": problems,
    }


def model_facts(model: str, options: Sequence[str], problems: list[str]) -> dict[str, Any] | None:
    """The report of `inference_svc.describe`. None, with one problem more, if the model cannot be kept."""
    try:
        words = [*(["--model", model] if model else []), *options]
        return run_program("inference_svc.describe", words, "the model cannot be used")
    except FailedPrecondition as error:
        problems.append(error.message)
        return None


def kernel_problems(found: dict[str, Any], serving: dict[str, Any]) -> Iterator[str]:
    """Faults that the check of kernels found on this device, for all KV policies, and in the running engine."""
    if failure := serving.get("failure") or found.get("failure"):
        yield f"kernels are wrong here, so the engine uses MLX's own operations, and is slow: {failure}"
    for policy, why in found.get("policies", {}).items():
        if why:
            yield f"kernels are wrong here for KV policy {policy}, with which an engine is slow: {why}"


def _service(state: ServiceState) -> dict[str, Any]:
    ready = {"address": state.address, "is_ready": state.state == Health.READY}
    return {**ready, **fields_of(state, "state", "pid", "metrics"), "problems": list(state.problems)}


def service_problems(caller: Caller, states: Iterable[ServiceState]) -> Iterator[str]:
    """What is wrong with the services. That nothing runs is no problem; that what should run does not is one."""
    running, is_up = caller.home.running(), is_led(caller.home)
    if running is not None and not is_up:
        yield (
            f"a `kvasir up` (pid {running.pid}) was killed here; `kvasir up` ends what it left and starts again, "
            "`kvasir down` only ends it"
        )
    named = {"store": caller.store_address, "engine": caller.engine_address}
    for each in states:
        if each.state == "hangs":
            remedy = f"; kill -9 {each.pid}, and `kvasir up` starts it again" if each.pid else ""
            yield f"the {each.name} hangs: something listens at {each.address} and does not answer{remedy}"
        elif each.state != Health.READY and (is_up or named.get(each.name)):
            told = f": {'; '.join(each.problems)}" if each.problems else ""
            look = "look at `kvasir status` there" if each.is_elsewhere else f"look at `kvasir logs {each.name}`"
            yield f"{each.name} should run at {each.address}: {each.state}{told}; {look}"
        else:
            yield from (f"{each.name} is not well: {problem}" for problem in each.problems)


def _loaded_model(caller: Caller) -> dict[str, Any]:
    """The running engine's own report of its model, from its live memory."""
    try:
        with caller.engine.engine_client() as client:
            model = client.get_model()
    except (KvasirError, ValueError):
        return {"model": None}
    policy = fields_of(model, "name", "kv_policy", "kv_policy_why")
    return {"model": {**policy, "applied_layers": model.policy_applied_layers, "layer_count": model.layer_count}}


def _store_stats(caller: Caller, problems: list[str]) -> dict[str, Any]:
    try:
        with store_client(caller) as client:
            if waiting := unclaimed(client):
                problems.append(
                    f"a recovery brought {counted(len(waiting), 'agent')} back, {waiting[0]!r} the first, without the "
                    "right to go on: `kvasir agents claim --recovered` queries the peers, and takes the agents that "
                    "no peer owns"
                )
            return {"stats": stats_row(client.get_stats())}
    except (KvasirError, ValueError):
        return {"stats": None}


def _show(out: Console, report: dict[str, Any]) -> None:
    write = out.print
    write(f"kvasir {report['kvasir']}, Python {report['python']}, {report['platform']}")
    write(", ".join(f"{name} {version or '–'}" for name, version in report["packages"].items()))
    if report["model"]:
        _show_model(out, report["model"])
        _show_memory(out, report["model"]["memory"], is_metal=report["model"]["device"] == "metal")
        _show_families(out, report["model"]["families"])
    write(f"home: {report['home']['path']}, {size(report['home']['free_disk_bytes'])} free")
    for name in ("store", "engine"):
        service = report[name]
        pid = f" (pid {service['pid']})" if service["pid"] else ""
        if service["address"]:
            write(f"{name}: {service['state']} at {service['address']}{pid}")
    if loaded := report["engine"]["model"]:
        write(f"serving: {loaded['name']}, KV policy {_applied(loaded['kv_policy'], loaded['kv_policy_why'], loaded)}")
    if report["store"]["stats"]:
        stats = report["store"]["stats"]
        held = f"{counted(stats['agent_count'], 'agent')}, {counted(stats['blob_count'], 'blob')}"
        write(f"stored: {held}, {size(stats['blob_bytes'])}")
    for step in report.get("self_test", {}).get("steps", []):
        write(f"self-test: {step}")
    for problem in report["problems"]:
        out.print("problem:", style="bold red", end=" ")
        write(problem)
    if not report["problems"]:
        out.print("no problems found", style="green")


def _show_model(out: Console, facts: dict[str, Any]) -> None:
    compute = f"{facts['device']}, {facts['compute_type']}" + (f", {facts['blas']}" if facts["blas"] else "")
    out.print(f"model: {facts['name']}, {facts['context_tokens']} tokens of context, on {compute}")
    out.print(f"weights: {facts['weights_placement']}")
    kernels = facts["kernels"]
    out.print(f"attention: {kernels['attention']}; encoding: {kernels['encoding']}; products: {kernels['products']}")
    policy = facts["policy"]
    columns, rows = ("layers", "keeps", "kv heads", "key dim", "value dim", "persists"), list[tuple[object, ...]]()
    stored = [_stored(policy, index) for index in range(len(facts["layers"]))]
    for alike, count in Counter(zip(map(json.dumps, facts["layers"]), stored, strict=True)).items():
        row, bits = json.loads(alike[0]), alike[1]
        if row["state_shapes"]:
            rows.append((count, "state, at rewind points", "", "", "", "as computed"))
            continue
        keeps = f"window of {row['window']}" if row["window"] else f"{row['kind']}, every token"
        rows.append((count, keeps, row["kv_heads"], row["key_dim"], row["value_dim"], bits))
    out.print(table(columns, rows, numbers=("layers", "kv heads", "key dim", "value dim")))
    ratio = facts["kv_bytes_per_token"] / max(1, facts["kv_bytes_per_token_fp16"])
    windows = f"; {size(facts['window_bytes'])} in windows" if facts["window_bytes"] else ""
    states = f"; {size(facts['state_bytes'])} of state per rewind point" if facts["state_bytes"] else ""
    out.print(
        f"{facts['kv_bytes_per_token']} bytes per token instead of {facts['kv_bytes_per_token_fp16']} at fp16 "
        f"({ratio:.3f}){windows}{states}"
    )
    out.print(f"KV policy {_applied(policy['name'], policy['why'], policy)}")


def _show_memory(out: Console, memory: dict[str, Any], *, is_metal: bool) -> None:
    """How many agents fit: into the KV memory that `kvasir up` takes, and at most on this machine."""
    out.print(
        f"memory: {size(memory['device_bytes'])}, {size(memory['weights_bytes'])} of them for weights; "
        f"{_taken(memory['claimed_bytes'], memory['held_bytes'])}"
        f"KV gets {size(memory['kv_memory_bytes'])} (--memory-gib{' auto' if memory['is_auto'] else ''}), "
        f"at most {size(memory['most_kv_bytes'])}"
    )
    if is_metal:
        out.print(
            "Metal recommends to keep no more than that in RAM. `sudo sysctl iogpu.wired_limit_mb=N` raises the limit "
            "until the Mac starts again; leave a quarter of RAM, or 8 GiB, to the system."
        )
    columns = ("agents that fit", "at most", "tokens each", "bytes each")
    rows = (
        (*(f"{row[name]:,}" for name in ("fit", "fit_at_most", "tokens")), size(row["agent_bytes"]))
        for row in memory["agents"]
    )
    out.print(table(columns, rows, numbers=columns))


def _taken(claimed_bytes: int, held_bytes: int) -> str:
    """`held_bytes`: of a card, by all programs, this one's driver included."""
    if held_bytes > claimed_bytes:
        return f"{size(held_bytes)} are in use; "
    return f"other engines here claim {size(claimed_bytes)}; " if claimed_bytes else ""


def _show_families(out: Console, families: dict[str, Any]) -> None:
    """Sizes of memories of well-known models, by their published layouts."""
    numbers, rows = ("bytes/token q4", "fp16", "windows, states q4", "fp16"), list[tuple[object, ...]]()
    for name, row in families.items():
        layers = ", ".join(
            f"{kind['count']} {kind['kind']}" + (f" of {kind['window']}" if kind["window"] else "")
            for kind in row["layers"]
        )
        others = [row[f"window_bytes{bits}"] + row[f"state_bytes{bits}"] for bits in ("", "_fp16")]
        shown = [size(count) if count else "–" for count in others]
        rows.append((name, layers, row["kv_bytes_per_token"], row["kv_bytes_per_token_fp16"], *shown))
    known = table(("model", "layers", *numbers), rows, numbers=numbers)
    known.title = "well-known models, by their layouts"
    out.print(known)


def _stored(policy: dict[str, Any], layer: int) -> str:
    if policy["key_bits"] == policy["value_bits"] == 16 or layer in policy["exact_layers"]:
        return "16 bits"
    rotated = ", rotated" if policy["key_rotation"] != "none" else ""
    return f"K {policy['key_bits']} bits{rotated}, V {policy['value_bits']} bits, groups of {policy['group_size']}"


def _applied(name: str, why: str, counts: dict[str, Any]) -> str:
    return f"{name}, applied to {counts['applied_layers']} of {counts['layer_count']} layers ({why})"
