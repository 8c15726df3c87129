"""Facts of this machine: versions, chip, memory, disk, and how it behaves for programs that serve all day."""

import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import kvasir
from blake3 import blake3
from kvasir.cli.running.program import version_of
from kvasir.syncing import synced_write_s
from kvasir.waits import PAUSE_S, uptime_s

from kvasir_bench.memory_path.services import measured_services
from kvasir_bench.prove.power import slept_s
from kvasir_bench.prove.step import ProofScope, Report, Value, claim
from kvasir_bench.system import SHORT_HOME, chip, output_of, sysctl, text_of

_PACKAGES = ("mlx", "mlx-lm", "grpcio", "protobuf", "safetensors", "cryptography", "mkl")
_SOURCES = ("kvasir", "kvasir_bench", "inference_svc", "cachestore_svc")


def versions() -> dict[str, Any]:
    """Of everything that a result depends on; `source` is a digest of our own code."""
    found = {name: version_of(name) for name in _PACKAGES}
    source = _digest_of_sources()
    return {"kvasir": kvasir.__version__, "source": source, "python": platform.python_version(), "packages": found}


def machine(_scope: ProofScope, _report: Report) -> Value:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    mac = {
        "model": sysctl("hw.model"),
        "fast_cores": sysctl("hw.perflevel0.physicalcpu"),
        "slow_cores": sysctl("hw.perflevel1.physicalcpu"),
        "gpu_wired_limit_mb": sysctl("iogpu.wired_limit_mb"),
    }
    return {
        "chip": chip(),
        "cores": os.cpu_count(),
        "memory_bytes": pages,
        "system": platform.platform(),
        "free_disk_bytes": shutil.disk_usage(SHORT_HOME).free,
        "load": round(os.getloadavg()[0], 2),
        "times_mean_something": os.getloadavg()[0] < max(1.0, (os.cpu_count() or 1) / 2),
        **(mac if sys.platform == "darwin" else {}),
    }


def first_day(scope: ProofScope, report: Report) -> Value:
    """Clocks, disk, limits and memory, before, while and after a store and an engine run without work."""
    report("synced writes")
    ticked = uptime_s()
    began = time.monotonic()
    time.sleep(PAUSE_S)
    drift = abs((uptime_s() - ticked) - (time.monotonic() - began))
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _memory()
    with measured_services(SHORT_HOME, model=scope.model, played=(), memory_gib=1.0) as services:
        report("a store and an engine without work")
        ready = services.start()
        with services.client() as client:
            client.get_model()
        during = _memory()
    after = _memory()
    return {
        "claims": [claim("awake, the clock of leases is the system's", drift < PAUSE_S / 4)],
        "slept_since_start_s": slept_s(),
        "synced_write_s": synced_write_s(SHORT_HOME, time.perf_counter),
        "open_files": files,
        "most_open_files": most_files,
        "stays_awake": shutil.which("caffeinate") is not None,
        "store_ready_s": ready["store_s"],
        "engine_ready_s": ready["engine_s"],
        **{name: [each[name] for each in (before, during, after)] for name in before},
    }


def _memory() -> dict[str, Any]:
    """Bytes in use that cannot be paged out, and available ones, in GB; and the system's own measure of pressure."""
    if sys.platform == "darwin":
        pages = {name: int(count) for name, count in re.findall(r"^(.+?):\s+(\d+)\.$", output_of("vm_stat"), re.M)}
        size = os.sysconf("SC_PAGE_SIZE")
        free = sum(pages.get(f"Pages {kind}", 0) for kind in ("free", "inactive", "speculative", "purgeable"))
        wired, pressure = pages.get("Pages wired down", 0) * size, sysctl("kern.memorystatus_vm_pressure_level")
        return {"wired_gb": round(wired / 1e9, 2), "available_gb": round(free * size / 1e9, 2), "pressure": pressure}
    text = text_of("/proc/meminfo")
    kib = {name: int(count) for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
    wired, free = kib.get("Unevictable", 0), kib.get("MemAvailable", 0)
    pressure = text_of("/proc/pressure/memory").partition("\n")[0]
    return {"wired_gb": round(wired * 1024 / 1e9, 2), "available_gb": round(free * 1024 / 1e9, 2), "pressure": pressure}


def _digest_of_sources() -> str:
    """Of the Python files, kernels and JSON of our packages, in the order of their names."""
    hasher = blake3()
    for name in _SOURCES:
        found = importlib.util.find_spec(name)
        for root in map(Path, found.submodule_search_locations or () if found else ()):
            for file in sorted(root.rglob("*")):
                if file.suffix in (".py", ".h", ".json", ".jsonl"):
                    hasher.update(f"{name}/{file.relative_to(root)}\0".encode())
                    hasher.update(file.read_bytes())
    return hasher.hexdigest()[:16]
