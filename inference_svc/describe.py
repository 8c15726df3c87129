"""What of a model persists, as JSON for `kvasir doctor`; exit code 1 for a model that the engine would refuse."""

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import KvasirError
from kvasir.options.texts import path_of
from kvasir.syncing import Scratch

from inference_svc.kv.policy import PolicyRequest
from inference_svc.model import kvasir_tiny
from inference_svc.model.blas import load_optimized_blas
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.probing.real_layouts import REAL_LAYOUTS, agent_bytes, byte_costs, window_bytes

if TYPE_CHECKING:
    from inference_svc.machine.kv_budget import Device

_PROBE_MEMORY_BYTES = 1 << 30
_LENGTHS = (1024, 4096, 8192, 32768)


def described(
    model: str | Path,
    cache_dir: Path,
    request: PolicyRequest,
    kv_memory_bytes: int | None = None,
    device_gib: float | None = None,
) -> dict[str, Any]:
    """Facts about a model, read after a probe. `kv_memory_bytes`: None for `auto`. Raises what Engine.open raises."""
    load_optimized_blas()
    # Importing the engine imports MLX, and then it is too late for a BLAS.
    from inference_svc.engine.engine import Engine
    from inference_svc.kv.attention.choice import checked_policies
    from inference_svc.machine.kv_budget import Device, claims_of_device, held_of, total_bytes

    claims = claims_of_device()  # before anything is loaded: it may be refused
    engine = Engine.open(
        model,
        cache_dir=cache_dir,
        memory_budget_bytes=_PROBE_MEMORY_BYTES,
        policy=request,
        conversations_file=kvasir_tiny.conversations_path(),
    )
    try:
        info, total = engine.model, total_bytes(device_gib)
        device = Device(total, claims.of_others(), held_of(total))
        return {
            "name": info.name,
            "kv_identity_hash": info.kv_identity_hash,
            "weights_digest": info.kv_identity.weights_digest,
            "layers": [_layer(layer) for layer in info.kv_identity.layers],
            "policy": _policy(info),
            "context_tokens": info.context_tokens,
            "cell_tokens": info.cell_tokens,
            "compute_type": info.compute_type,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "kv_bytes_per_token_fp16": info.kv_bytes_per_token_fp16,
            "window_bytes": window_bytes(info.kv_identity),
            "state_bytes": info.state_bytes,
            "weights_placement": info.weights_placement,
            "memory": room(info, device, kv_memory_bytes),
            "families": {name: byte_costs(layers) for name, layers in REAL_LAYOUTS.items()},
            "device": engine.device,
            "blas": engine.blas,
            "kernels": asdict(engine.kernels)
            | {"policies": checked_policies(info.kv_identity.layers, info.compute_type)},
            "versions": {"python": platform.python_version(), "mlx": version("mlx"), "mlx-lm": version("mlx-lm")},
        }
    finally:
        claims.close()
        engine.close()


def _policy(info: ModelInfo) -> dict[str, Any]:
    policy = info.kv_identity.policy
    return {
        "name": info.policy_name,
        "why": info.policy_why,
        "key_bits": policy.key_bits,
        "value_bits": policy.value_bits,
        "group_size": policy.group_size,
        "scale_type": identity_pb2.ScaleType.Name(policy.scale_type).removeprefix("SCALE_TYPE_").lower(),
        "key_rotation": identity_pb2.KeyRotation.Name(policy.key_rotation).removeprefix("KEY_ROTATION_").lower(),
        "exact_layers": list(policy.exact_layers),
        "applied_layers": info.policy_applied_layers,
        "layer_count": info.layer_count,
    }


def room(info: ModelInfo, device: "Device", kv_memory_bytes: int | None) -> dict[str, Any]:
    """How many agents fit into the KV memory, and into all that the device has for KV. Raises NoRoom."""
    most, is_auto = device.most_kv_bytes(info), kv_memory_bytes is None
    kv_memory_bytes = device.auto_kv_bytes(info) if kv_memory_bytes is None else kv_memory_bytes
    lengths = sorted({length for length in _LENGTHS if length < info.context_tokens} | {info.context_tokens})
    sizes = {length: agent_bytes(info.kv_identity, length) for length in lengths}
    return {
        "device_bytes": device.total_bytes,
        "claimed_bytes": device.claimed_bytes,
        "held_bytes": device.held_bytes,
        "is_auto": is_auto,
        "weights_bytes": info.weights_bytes,
        "kv_memory_bytes": kv_memory_bytes,
        "most_kv_bytes": most,
        "agents": [
            {"tokens": length, "agent_bytes": size, "fit": kv_memory_bytes // size, "fit_at_most": most // size}
            for length, size in sizes.items()
        ],
    }


def _layer(layer: identity_pb2.LayerLayout) -> Mapping[str, object]:
    return {
        "kind": identity_pb2.LayerKind.Name(layer.kind).removeprefix("LAYER_KIND_").lower(),
        "window": layer.window,
        "kv_heads": layer.kv_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "state_shapes": [list(tensor.shape) for tensor in layer.state_tensors],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m inference_svc.describe", description=__doc__)
    parser.add_argument("--model", default="", help="directory or name; the shipped model if left out")
    parser.add_argument("--cache-dir", type=path_of, help="where digests of weights are kept; nowhere if left out")
    parser.add_argument("--kv-policy", default="q4", help="as the engine's option; auto measures, unless it did before")
    parser.add_argument("--kv-exact-layers", default="", help="as the engine's option")
    parser.add_argument("--memory-gib", type=float, help="as the engine's option; left out: auto")
    parser.add_argument("--device-gib", type=float, help="as the engine's option")
    arguments = parser.parse_args()
    # Measurements are reported on stderr on the way; stdout is for the facts.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with Scratch("kvasir-describe-") as nowhere:
        try:
            request = PolicyRequest.parse(arguments.kv_policy, arguments.kv_exact_layers)
            facts = described(
                arguments.model or kvasir_tiny.path(),
                arguments.cache_dir or nowhere,
                request,
                None if arguments.memory_gib is None else int(arguments.memory_gib * (1 << 30)),
                arguments.device_gib,
            )
        except KvasirError as error:
            sys.stderr.write(f"{error.message}\n")
            return 1
    json.dump(facts, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
