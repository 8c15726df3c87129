"""Time to the first token over context: computed anew, restored from tensor files, and from the engine's memory."""

from dataclasses import dataclass

from inference_svc.bench.arithmetic import Summary
from inference_svc.bench.lab import Case, Lab, Run

_SUFFIX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class FirstTokenRow:
    """A context; keys as in `kvasir.bench.engine_keys`."""

    context_tokens: int
    cold_s: float
    cold_s_spread: float
    warm_s: float
    warm_s_spread: float
    hot_s: float
    hot_s_spread: float
    cold_to_warm: float
    cold_to_hot: float


def run(lab: Lab) -> Case:
    """A restored turn gets its files from memory: `kvasir bench store` measures disk and wire."""
    contexts = (96,) if lab.is_quick else (256, 512, 1024, 2048, 4096, 8192)
    return Case("Time to the first token", [_row(lab, lab.shortened(context)) for context in contexts])


def _row(lab: Lab, context: int) -> FirstTokenRow:
    suffix = lab.prompts.tokens(_SUFFIX_TOKENS, 1)
    memory = lab.remember(lab.prompts.tokens(context - 1, 0))
    prompt, files = (*memory.tokens, *suffix), lab.restored(memory)
    found: dict[str, list[float]] = {"cold": [], "warm": [], "hot": []}
    for counts in lab.rounds(f"first token after {context} tokens"):
        fork = lab.fork(memory)
        seconds = {
            "cold": _first_token_s(lab.start(prompt, 1)),
            "warm": _first_token_s(lab.start(prompt, 1, files)),
            "hot": _first_token_s(lab.resume(fork, suffix, 1)),
        }
        for name in found if counts else ():
            found[name].append(seconds[name])
        lab.forget([fork])
    lab.forget([memory])
    cold, warm, hot = (Summary.of(found[name]) for name in ("cold", "warm", "hot"))
    return FirstTokenRow(
        len(memory.tokens),
        cold.median,
        cold.spread,
        warm.median,
        warm.spread,
        hot.median,
        hot.spread,
        cold.median / warm.median,
        cold.median / hot.median,
    )


def _first_token_s(run: Run) -> float:
    run.end()
    return run.first_token_s
