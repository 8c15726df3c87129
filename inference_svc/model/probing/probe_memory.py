"""What probing a model and checking kernels have shown, kept under its conditions: weights, types, device, system,
driver, MLX, CUDA's libraries, mlx-lm and our own code. Only a shortcut: else it is found out again.
"""

import json
import platform
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from google.protobuf.message import DecodeError
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.kept_checks import KeptChecks
from inference_svc.kv.kept_files import KeptDirs, keep_bytes, kept_bytes, named_for
from inference_svc.kv.layout import Layout
from inference_svc.model.device_memory import card, device_bytes, device_name, device_settings

_FOLDER, _CHECKS = "probes", "checks"
_OURS = Path(__file__).parents[2]
_DRIVER = Path("/proc/driver/nvidia/version")
_TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}


@dataclass(frozen=True)
class Probed:
    """What only computing shows. `width`: of the rows that the head gets, if it may get the last alone; else 0."""

    layout: Layout
    vocabulary_size: int
    width: int


class ProbeMemory:
    def __init__(self, directory: Path, weights_digest: str, compute_type: str | None, kernels: str) -> None:
        named = named_for(weights_digest, compute_type or "default", kernels, *_conditions())
        self._path = directory / _FOLDER / f"{named}.json"

    def read(self) -> Probed | None:
        try:
            return _probed(json.loads(kept_bytes(self._path) or b""))
        except (ValueError, TypeError, KeyError, AttributeError, DecodeError):
            return None

    def write(self, probed: Probed) -> None:
        """Keep facts. A disk that takes no file costs a probe at the next start."""
        keep_bytes(self._path, json.dumps(_as_json(probed)).encode())


def kept_checks(kept: KeptDirs | None) -> KeptChecks | None:
    """Of this device's kernels; None where it has none, or its driver is not known."""
    is_gpu = mx.default_device().type == mx.DeviceType.gpu
    if kept is None or kept.user is None or not is_gpu or not (mx.metal.is_available() or _driver()):
        return None
    return KeptChecks(kept.user / _CHECKS, _conditions())


def _conditions() -> tuple[str, ...]:
    device = device_name(), card(), str(device_bytes()), device_settings()
    return (*device, platform.platform(), _driver(), *_mlx(), version("mlx-lm"), _code_digest())


def _mlx() -> tuple[str, ...]:
    """Wheels for other devices have the same version, and another library. CUDA's compiler and libraries have wheels of
    their own, which may be renewed alone.
    """
    room = Path(mx.__file__).parent
    library = next((room / "lib").glob("libmlx.*"), Path(mx.__file__))
    cuda = sorted(each.name for each in room.parent.glob("nvidia_*.dist-info"))
    return version("mlx"), str(library), str(library.stat().st_size), *cuda


def _as_json(probed: Probed) -> dict[str, Any]:
    layout = probed.layout
    return {
        "entries": [entry.SerializeToString(deterministic=True).hex() for entry in layout.entries],
        "by_cache": layout.by_cache,
        "kv_type": _TYPE_NAMES[layout.kv_type],
        "reads_pages": layout.reads_pages,
        "vocabulary_size": probed.vocabulary_size,
        "width": probed.width,
    }


def _probed(kept: dict[str, Any]) -> Probed:
    entries = tuple(identity_pb2.LayerLayout.FromString(bytes.fromhex(entry)) for entry in kept["entries"])
    by_cache = tuple(tuple(each) if isinstance(each, list) else int(each) for each in kept["by_cache"])
    layout = Layout(entries, by_cache, _TYPES[kept["kv_type"]], bool(kept["reads_pages"]))
    return Probed(layout, int(kept["vocabulary_size"]), int(kept["width"]))


def _driver() -> str:
    """Of an NVIDIA GPU; a Mac's comes with its system."""
    try:
        return _DRIVER.read_text()
    except OSError:
        return ""


@cache
def _code_digest() -> str:
    hasher = blake2b(digest_size=16)
    for room in ("kv", "model"):
        for path in sorted((_OURS / room).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                hasher.update(path.read_bytes())
    return hasher.hexdigest()
