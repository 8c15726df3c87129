"""`python -m kvasir_bench.engine`: measures the engine in one run and prints JSON; progress goes to stderr."""

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.cli.running.program import version_of

from inference_svc.kv.policy import PolicyRequest
from inference_svc.model import kvasir_tiny
from inference_svc.model.device_memory import device_bytes, device_name
from kvasir_bench.arithmetic import rounded, rounded_row
from kvasir_bench.engine import report
from kvasir_bench.engine.cases import (
    cancelling,
    decode,
    first_token,
    interruptions,
    matching,
    memory_bytes,
    parts,
    peer,
    shared_prefix,
    two_agents,
)
from kvasir_bench.engine.cases.several_tokens import ahead, windows
from kvasir_bench.engine.lab import Case, Lab, MeasuredEngine, Scope
from kvasir_bench.program import keep, printed, progress
from kvasir_bench.system import chip

CASES: Mapping[str, Callable[[Lab], Case]] = {
    "decode": decode.run,
    "peer": peer.run,
    "first_token": first_token.run,
    "parts": parts.run,
    "pairs": two_agents.pairs,
    "staggered": two_agents.staggered,
    "gaps": interruptions.run,
    "cancel": cancelling.run,
    "decoding_bytes": memory_bytes.of_agents,
    "memory": memory_bytes.of_prompt,
    "matching": matching.run,
    "shared_prefix": shared_prefix.run,
    "ahead": ahead.run,
    "windows": windows.run,
}

# How long each takes on two cores, of a hundred parts of a whole run: for the time that is left.
_PARTS = dict(zip(CASES, (15, 21, 17, 1, 3, 5, 3, 2, 1, 9, 1, 3, 16, 3), strict=True))


def measured(lab: Lab, cases: Sequence[str], keep_known: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The values of all names in `keys.json`. `keep_known` gets them after each row."""
    about = _machine(lab.engine)
    found: dict[str, Case] = {}
    results = _results(lab, about, found)
    for name in lab.pace.while_there_is_time(cases):
        lab.pace.begin_case()
        lab.pace.say(f"case {len(found) + 1} of {len(cases)}: {name}{_left(lab.pace.elapsed_s, cases, len(found))}")
        lab.pace.keep = lambda rows, name=name: keep_known(_results(lab, about, {**found, name: Case(name, rows)}))  # type: ignore[misc]
        found[name] = CASES[name](lab)
        results = _results(lab, about, found)
        keep_known(results)
    return results


def _left(elapsed_s: float, cases: Sequence[str], done: int) -> str:
    """How long the cases from this one on take, by those that are done."""
    done_parts, parts = (sum(_PARTS[name] for name in names) for names in (cases[:done], cases[done:]))
    return f", about {elapsed_s * parts / done_parts:.0f} s are left" if done else ""


def _results(lab: Lab, about: Mapping[str, Any], found: Mapping[str, Case]) -> dict[str, Any]:
    settings = {key: value for key, value in asdict(lab.scope).items() if key != "has_peer"}
    return {
        "machine": {
            **about,
            "load_after": round(os.getloadavg()[0], 2),
            "links_bytes_per_s": rounded_row(asdict(lab.links)) if "first_token" in found else None,
        },
        "model": _model(lab.engine),
        "settings": {
            **settings,
            "fewest_repeats": lab.pace.fewest_repeats,
            "elapsed_s": rounded(lab.pace.elapsed_s),
        },
        "cases": {
            name: {"title": case.title, "rows": [rounded_row(row) for row in case.rows]} for name, case in found.items()
        },
        "targets": [{"case": name} | target.row() for name, case in found.items() for target in case.targets],
    }


def _machine(engine: MeasuredEngine) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": chip(),
        "cores": os.cpu_count(),
        "device": engine.device,
        "device_name": device_name(),
        "device_bytes": device_bytes(),
        "blas": engine.blas,
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("mlx", "mlx-lm", "mkl")},
        "load_before": round(os.getloadavg()[0], 2),
    }


def _model(engine: MeasuredEngine) -> dict[str, Any]:
    info = engine.model
    policy = info.kv_identity.policy
    facts = ("name", "context_tokens", "compute_type", "cell_tokens", "kv_bytes_per_token")
    bits = ("key_bits", "value_bits", "group_size")
    found = {name: getattr(info, name) for name in facts} | {name: getattr(policy, name) for name in bits}
    return {**found, "layers": info.layer_count}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvasir_bench.engine",
        description=__doc__,
        epilog=report.help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="", help="directory or name; the shipped model if left out")
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--peer", choices=("mlx-lm",), help="measure this one too, in the same run")
    parser.add_argument("--repeats", type=int, help="of each measurement (default 5, or fewer long ones)")
    parser.add_argument("--quick", action="store_true", help="small and once, for a look")
    parser.add_argument("--lengths", type=_counts, default=(), help="contexts, with commas between; else each case's")
    parser.add_argument("--batches", type=_counts, default=(), help="rows that decode together, with commas between")
    parser.add_argument(
        "--texts", type=_texts, default=(), help=f"of ahead, with commas between: {', '.join(ahead.TEXTS)}"
    )
    parser.add_argument("--time-limit-s", type=float, help="begin nothing new after this, and print the results so far")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="for KV (default %(default)s)")
    parser.add_argument("--longest-gap-ms", type=float, help="of a step beside decoding; the engine's own if left out")
    parser.add_argument("--kv-policy", default="", help="as for the engine (default q4)")
    parser.add_argument("--cache-dir", type=Path, help="where digests of weights are kept; nowhere if left out")
    parser.add_argument("--keep", type=Path, help="write what is known to this file after each row")
    return parser.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if any(not (part.isascii() and part.isdigit() and int(part)) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers above 0 with commas between, got {text!r}")
    return tuple(map(int, parts))


def _texts(text: str) -> tuple[str, ...]:
    if unknown := set(names := text.split(",")) - set(ahead.TEXTS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(ahead.TEXTS)}, got {', '.join(sorted(unknown))}")
    return tuple(names)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the probes that a case has started end, too
    arguments = _arguments()
    return printed(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises KvasirError where no engine can be opened."""
    cases = list(arguments.only or (name for name in CASES if name != "peer"))
    if arguments.peer and not arguments.only:
        cases.append("peer")
    model = arguments.model or kvasir_tiny.path()
    scope = Scope(
        repeats=1 if arguments.quick else arguments.repeats or 5,
        enough_s=None if arguments.quick or arguments.repeats else 15.0,
        is_quick=arguments.quick,
        lengths=arguments.lengths,
        batches=arguments.batches,
        texts=arguments.texts,
        time_limit_s=arguments.time_limit_s,
        has_peer=bool(arguments.peer),
    )
    with tempfile.TemporaryDirectory() as nowhere:
        cache_dir = arguments.cache_dir or Path(nowhere)
        engine = MeasuredEngine.opened(
            model,
            cache_dir,
            int(arguments.memory_gib * (1 << 30)),
            PolicyRequest.parse(arguments.kv_policy, "") if arguments.kv_policy else None,
            **({"longest_gap_s": arguments.longest_gap_ms / 1000} if arguments.longest_gap_ms else {}),
        )
        lab = Lab(engine, model, time.perf_counter, scope, cache_dir=cache_dir, say=progress)
        try:
            return measured(lab, cases, partial(keep, arguments.keep))
        finally:
            lab.close()
            engine.close()


if __name__ == "__main__":
    sys.exit(main())
