"""The peak and the lasting memory of one long prompt, as JSON, in a process of its own: two peaks would mix."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from inference_svc.engine.mlx_thread import MlxThread
from inference_svc.kv.policy import PolicyRequest
from inference_svc.model import kvasir_tiny
from inference_svc.model.device_memory import peak_bytes, restart_peak
from kvasir_bench.engine.lab import Lab, MeasuredEngine, Scope
from kvasir_bench.engine.mlx_lm_peer import MlxLmPeer
from kvasir_bench.engine.prompts import Prompts
from kvasir_bench.program import MEASURED_WITHIN_S, printed

BUDGET_BYTES = 8 << 30
PEER = "mlx-lm"


def probed(model: str | Path, cache_dir: Path | None, tokens: int, cell_tokens: int, kv: str) -> dict[str, int]:
    """Bytes before the prompt, at the peak, and after the prompt while its KV is still in memory."""
    with tempfile.TemporaryDirectory() as nowhere:
        cache_dir = cache_dir or Path(nowhere)
        policy = None if kv == PEER else PolicyRequest.parse(kv, "")
        engine = MeasuredEngine.opened(model, cache_dir, BUDGET_BYTES, policy, cell_tokens)
        try:
            if kv == PEER:
                return _peer(model, Prompts(engine.tokenizer).tokens(tokens, 0), cell_tokens, engine)
            lab = Lab(engine, model, time.monotonic, Scope(repeats=1), cache_dir=cache_dir, say=lambda _: None)
            prompt = lab.prompts.tokens(tokens, 0)
            before = restart_peak()
            turn = lab.start(prompt, 1, key=lab.agents.new_key())
            turn.end()
            engine.memories.drop(lab.agents.new_key()).result(MEASURED_WITHIN_S)  # frees the last step's arrays, too
            cells = -(-tokens // cell_tokens)
            if len(turn.cell_times) != cells:
                raise RuntimeError(f"cells: expected {cells}, the engine took {len(turn.cell_times)}")
            # What the engine counts: the arrays of its pool may be larger, and were there before.
            return _bytes(before, before + engine.memory_used_bytes)
        finally:
            engine.close()


def _peer(model: str | Path, prompt: tuple[int, ...], chunk_tokens: int, engine: MeasuredEngine) -> dict[str, int]:
    compute_type = engine.model.compute_type
    engine.close()
    peer = MlxThread(lambda: MlxLmPeer(model, compute_type, time.monotonic), name="mlx-lm")
    try:
        before = restart_peak()
        after = peer.post(lambda worker: worker.remember(prompt, chunk_tokens)).result(MEASURED_WITHIN_S)
        return _bytes(before, after)
    finally:
        peer.close()


def _bytes(before: int, after: int) -> dict[str, int]:
    return {"before_bytes": before, "peak_bytes": peak_bytes(), "after_bytes": after}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.engine.memory_probe", description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--cache-dir", type=Path, help="digests of the weights; nowhere if left out")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cell", type=int, default=256)
    parser.add_argument("--kv", choices=("q4", "fp", PEER), default="q4")
    arguments = parser.parse_args()
    model = arguments.model or kvasir_tiny.path()
    return printed(lambda: probed(model, arguments.cache_dir, arguments.tokens, arguments.cell, arguments.kv))


if __name__ == "__main__":
    sys.exit(main())
