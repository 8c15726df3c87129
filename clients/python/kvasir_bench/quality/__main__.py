"""What KV policies, or fewer bits of weights, cost a model: `python -m kvasir_bench.quality`, for the command."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.policy import AUTO, LADDER, PolicyRequest, Rung, tried_by_auto
from inference_svc.model import kvasir_tiny
from inference_svc.model.blas import load_optimized_blas
from inference_svc.model.model_identity import tokenizer_digest
from inference_svc.model.quality.conversations import Conversations
from inference_svc.model.quality.findings import cheapest, judged
from inference_svc.model.quality.material import FULL, QUICK, Extent, Sheet
from inference_svc.model.quality.tasks import read_tasks
from kvasir_bench.program import printed, progress
from kvasir_bench.quality.given import LONGEST, SHORTEST, given_sheets, read_text, windows_of
from kvasir_bench.quality.mixing import CHOOSING, with_intervals

if TYPE_CHECKING:
    from inference_svc.model.model_runner import ModelRunner
    from inference_svc.model.quality.exam import Subject

MIXED = tuple(rung.value for rung in LADDER if rung is not Rung.FP)  # under fp every layer is exact already


@dataclass(frozen=True, slots=True)
class _Bench:
    asked: argparse.Namespace
    runner: "ModelRunner"
    tokenizer: Any
    policies: Mapping[str, identity_pb2.KvPolicy]
    context_tokens: int
    given: Sequence[Sheet]
    clock: Callable[[], float]
    say: Callable[[str], None]

    def on_material(self, directory: Path) -> dict[str, Any]:
        """Given tasks, conversations or the canary; and what auto would choose."""
        from inference_svc.model.quality import exam

        subject, extent = self._subject(directory), self._extent
        found = exam.examine(subject, self.policies, extent, clock=self.clock, say=self.say, with_peers=True)
        tried = tried_by_auto([each.name for each in found.rungs])
        winner, why = cheapest([each for each in found.rungs if each.name in tried], found.exact)
        verdicts = {each.name: judged(each, found.exact) for each in found.rungs}
        return {
            "material": found.material,
            "reference": found.exact.as_json(),
            "rungs": [
                each.as_json() | {"passes": verdicts[each.name].passes, "why": verdicts[each.name].why}
                for each in found.rungs
            ],
            "peers": [each.as_json() for each in found.peers],
            "refused": found.refused,
            # As at load: what nothing below is good enough for gets the last rung.
            "auto": {"chooses": winner.name if winner else LADDER[-1].value, "why": why},
        }

    def of_weights(self, directory: Path) -> dict[str, Any]:
        """The same material for the model's own weights, and with fewer bits of some of them."""
        from inference_svc.model.quality.weights import OWN_BITS, examine_weights

        found = examine_weights(
            self._subject(directory), self._extent, by_layer=not self.asked.quick, clock=self.clock, say=self.say
        )
        own = {"effective_bits": OWN_BITS, "weights_bytes": found.weights_bytes}
        return {
            "material": found.material,
            "reference": found.exact.as_json() | own,
            "weights": [cost.as_json() for cost in found.costs],
            "refused": dict(found.refused),
        }

    def _subject(self, directory: Path) -> "Subject":
        from inference_svc.model.quality.exam import Subject

        conversations = Conversations.read_for(kvasir_tiny.conversations_path(), tokenizer_digest(directory))
        return Subject(self.runner, self.tokenizer, lambda: conversations, self.context_tokens, self.given)

    @property
    def _extent(self) -> Extent:
        return QUICK if self.asked.quick else FULL

    def on_text(self, sheets: list[Sheet]) -> dict[str, Any]:
        from kvasir_bench.quality.text_exam import Mixture, examine_text

        mixture = Mixture(self.asked.kv_policy, self.asked.kv_bytes)
        found = examine_text(self.runner, sheets, self.policies, mixture, clock=self.clock, say=self.say)
        is_mixed = found.mixed is not None and found.suggests == found.mixed.name
        exact_layers = found.exact_layers if is_mixed else self.policies[found.suggests].exact_layers
        return {
            "material": "text",
            "text": {"file": str(self.asked.text), "windows": len(sheets), "window_tokens": len(sheets[0].ids)},
            "reference": with_intervals(found.exact, found.exact),
            "rungs": [with_intervals(each, found.exact) for each in found.rungs],
            "peers": [with_intervals(each, found.exact) for each in found.peers],
            "refused": found.refused,
            "layers": {
                "policy": mixture.policy,
                "windows": len(sheets[CHOOSING]),
                "rows": [cost.as_json() for cost in found.layers],
            },
            "mixed": with_intervals(found.mixed, found.exact) if found.mixed else None,
            "suggestion": {
                "budget_bytes": found.budget_bytes,
                "kv_policy": mixture.policy if is_mixed else found.suggests,
                "kv_exact_layers": ",".join(map(str, exact_layers)),
                "why": found.why,
            },
        }


def measured(asked: argparse.Namespace, clock: Callable[[], float], say: Callable[[str], None]) -> dict[str, Any]:
    """All findings. Raises as Engine.open does; NotFound or InvalidArgument for a text, layers or a budget."""
    text = read_text(asked.text) if asked.text else ""
    tasks = read_tasks(asked.tasks) if asked.tasks else ()
    blas = load_optimized_blas()
    # These import MLX, and then it is too late for a BLAS.
    from inference_svc.model.loading import device, find_model, load
    from inference_svc.model.model_runner import ModelRunner

    directory, began = find_model(asked.model or kvasir_tiny.path()), clock()
    loaded = load(directory, asked.compute_type)
    runner = ModelRunner(loaded.model)
    request = PolicyRequest.parse(AUTO, asked.kv_exact_layers)
    policies = {rung.value: request.policy(rung, runner.compute_type, len(runner.layers)) for rung in LADDER}
    given = given_sheets(asked.tasks, tasks, loaded.tokenizer, loaded.context_tokens)
    bench = _Bench(asked, runner, loaded.tokenizer, policies, loaded.context_tokens, given, clock, say)
    if asked.weights:
        found = bench.of_weights(directory)
    elif asked.text:
        longest = min(loaded.context_tokens - 1, SHORTEST if asked.quick else LONGEST)
        found = bench.on_text(windows_of(asked.text, text, loaded.tokenizer, longest))
    else:
        found = bench.on_material(directory)
    return {
        "model": kvasir_tiny.name_of(directory),
        "exact_layers": list(policies["q4"].exact_layers),
        **found,
        "compute_type": runner.compute_type,
        "device": device(),
        "blas": blas or "",
        "seconds": round(clock() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.quality", description=__doc__)
    parser.add_argument("--model", default="", help="directory or name; the shipped model if left out")
    parser.add_argument("--kv-exact-layers", default="", help='"last" or indexes with commas between')
    parser.add_argument("--compute-type", choices=["float32", "float16", "bfloat16"], help="as the engine's option")
    parser.add_argument(
        "--quick", action="store_true", help="read fewer texts and ask fewer questions, for a first look"
    )
    parser.add_argument("--weights", action="store_true", help="measure fewer bits of weights, and no KV policy")
    parser.add_argument("--text", type=Path, help="read this file instead, and measure each layer")
    parser.add_argument("--tasks", type=Path, help="give these tasks instead, JSON lines")
    parser.add_argument("--kv-policy", default=MIXED[0], choices=MIXED, help="with --text: of the measured layers")
    parser.add_argument("--kv-bytes", type=int, help="with --text: a token, for the policy with its exact layers")
    given = parser.parse_args()
    return printed(lambda: measured(given, time.monotonic, progress))


if __name__ == "__main__":
    sys.exit(main())
