"""Facts of the machine and of the model under measurement, so that the numbers can be understood later."""

import os
import platform
from typing import Any

from kvasir.cli.running.program import version_of

from inference_svc.model.device_memory import device_bytes, device_name
from kvasir_bench.engine.lab import MeasuredEngine
from kvasir_bench.system import chip

_PACKAGES = ("mlx", "mlx-lm", "mkl")


def machine(engine: MeasuredEngine) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": chip(),
        "cores": os.cpu_count(),
        "device": engine.device,
        "device_name": device_name(),
        "device_bytes": device_bytes(),
        "blas": engine.blas,
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
        "load_before": round(os.getloadavg()[0], 2),
    }


def model(engine: MeasuredEngine) -> dict[str, Any]:
    info = engine.model
    policy = info.kv_identity.policy
    facts = ("name", "context_tokens", "compute_type", "cell_tokens", "kv_bytes_per_token")
    bits = ("key_bits", "value_bits", "group_size")
    found = {name: getattr(info, name) for name in facts} | {name: getattr(policy, name) for name in bits}
    return {**found, "layers": info.layer_count}
