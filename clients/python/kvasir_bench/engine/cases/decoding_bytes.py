"""Bytes that eight agents hold while all of them decode, scratch included, beside 16-bit KV of the same tokens."""

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.model.device_memory import active_bytes, peak_bytes, restart_peak
from kvasir_bench.arithmetic import Target
from kvasir_bench.engine.lab import Case, Lab

_MOST_RATIO = 0.35
_REPLY_TOKENS = 16


def run(lab: Lab) -> Case:
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
    targets = [Target(what, ratio, _MOST_RATIO, is_most=True)] if lab.is_gpu else []
    return Case("Bytes of agents that decode", [row], targets)


def exact_bytes(identity: identity_pb2.KvIdentity, tokens: int) -> int:
    """Bytes of one sequence's KV at 16 bits a value, a window's layers with their last tokens only."""
    return sum(
        2 * min(tokens, layer.window or tokens) * layer.kv_heads * (layer.key_dim + layer.value_dim)
        for layer in identity.layers
    )
