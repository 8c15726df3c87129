"""Bytes of one long prompt, by cells and KV, each in its own process; and of eight agents while all of them decode."""

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.model.device_memory import active_bytes, peak_bytes, restart_peak
from kvasir_bench.arithmetic import Target
from kvasir_bench.engine.lab import Case, Lab, Row
from kvasir_bench.program import measured_by

_MOST_OF_ONE_CHUNK = 0.5
_PEER_CHUNK = 2048  # mlx-lm's own default
_MOST_OF_16_BITS = 0.35
_REPLY_TOKENS = 16


def of_prompt(lab: Lab) -> Case:
    """Bytes are counted by MLX and repeat exactly: one run of each is enough."""
    rows = lab.pace.rows(lab.lengths(600, 8192), lambda length: _rows(lab, length))
    targets = [
        Target(f"peak, cells / one chunk, {row['prompt_tokens']}", row["peak_ratio"], _MOST_OF_ONE_CHUNK, is_most=True)
        for row in rows[:: len(_ways(lab, 0))]
    ]
    return Case("Memory of one prompt", rows, targets)


def _ways(lab: Lab, tokens: int) -> dict[str, tuple[str, int]]:
    """KV and cells, by name; the targets are about the first."""
    cell = lab.engine.model.cell_tokens
    return {
        f"q4, cells of {cell}": ("q4", cell),
        "q4, one chunk": ("q4", tokens),
        f"16 bits, cells of {cell}": ("fp", cell),
        f"mlx-lm's own KV, chunks of {_PEER_CHUNK}": ("mlx-lm", _PEER_CHUNK),
    }


def _rows(lab: Lab, tokens: int) -> list[Row]:
    found: dict[str, dict[str, int]] = {}
    for how, (kv, cell_tokens) in _ways(lab, tokens).items():
        lab.pace.say(f"memory of {tokens} tokens, {how}")
        found[how] = _probe(lab, tokens, cell_tokens, kv)
    _, one_chunk, exact, _ = found.values()
    return [
        {
            "how": how,
            "prompt_tokens": tokens,
            "peak_bytes": each["peak_bytes"],
            "resident_bytes": _resident(each),
            "kv_bytes_per_token": _resident(each) / tokens,
            "peak_ratio": each["peak_bytes"] / one_chunk["peak_bytes"],
            "resident_ratio": _resident(each) / _resident(exact),
        }
        for how, each in found.items()
    ]


def _resident(found: dict[str, int]) -> int:
    return found["after_bytes"] - found["before_bytes"]


def _probe(lab: Lab, tokens: int, cell_tokens: int, kv: str) -> dict[str, int]:
    options = {
        "--model": lab.model,
        "--cache-dir": lab.cache_dir,
        "--tokens": tokens,
        "--cell": cell_tokens,
        "--kv": kv,
    }
    return measured_by("engine.memory_probe", "the memory probe failed", options)


def of_agents(lab: Lab) -> Case:
    """Bytes repeat exactly, so one round is enough."""
    agents, tokens = 2 if lab.scope.is_quick else 8, lab.lengths(300, 4096 if lab.is_gpu else 1024)[-1]
    lab.pace.say(f"bytes of {agents} decoding agents at {tokens} tokens")
    before = lab.engine.memory_used_bytes
    memories = [lab.agents.remember(lab.prompts.tokens(tokens - 1, number)) for number in range(agents)]
    kv_bytes = lab.engine.memory_used_bytes - before
    resident = restart_peak()
    # Every row decodes at the same time: a row that joins late finds the others still at work.
    runs = [lab.agents.resume(each, each.tokens[:1], _REPLY_TOKENS + agents) for each in memories]
    for each in runs:
        each.end()
    scratch_bytes = max(peak_bytes() - resident, active_bytes() - resident, 0)
    lab.agents.forget(memories)
    fp16_bytes = agents * exact_bytes(lab.engine.model.kv_identity, tokens)
    ratio = (kv_bytes + scratch_bytes) / fp16_bytes
    sizes = {"kv_bytes": kv_bytes, "scratch_bytes": scratch_bytes, "fp16_bytes": fp16_bytes}
    row = {"agents": agents, "context_tokens": tokens, **sizes, "ratio": ratio}
    what = f"bytes of {agents} decoding agents at {tokens} / 16 bits"
    targets = [Target(what, ratio, _MOST_OF_16_BITS, is_most=True)] if lab.is_gpu else []
    return Case("Bytes of agents that decode", [row], targets)


def exact_bytes(identity: identity_pb2.KvIdentity, tokens: int) -> int:
    """Bytes of one sequence's KV at 16 bits a value, a window's layers with their last tokens only."""
    return sum(
        2 * min(tokens, layer.window or tokens) * layer.kv_heads * (layer.key_dim + layer.value_dim)
        for layer in identity.layers
    )
