"""The tables' cases share this: how much is measured, the loaded model's facts, and services of their own."""

import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvasir.cli.running.program import run_program

from kvasir_bench.memory_path.campaign import SPARE_TOKENS
from kvasir_bench.memory_path.services import MeasuredServices, measured_services
from kvasir_bench.program import measured_by

_QUICK_TOKENS = 1100
_ROOM = 3  # memories of the longest length that the engine has room for
_LEAST_GIB, _GIB = 1.0, 1 << 30


@dataclass
class Bench:
    """Facts, and services until `started` ends, at the first need. `server`: another one's URL, model and key."""

    say: Callable[[str], None]
    model: str
    repeats: int
    is_quick: bool
    home: Path
    server: tuple[str, str, str] | None = None
    started: ExitStack = field(default_factory=ExitStack)
    _probes: dict[tuple[int, str, int], dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """As `kvasir doctor` has them, and the free disk. Raises FailedPrecondition for a model that cannot be used."""
        self.say("loading the model")
        model = ["--model", self.model] if self.model else []
        facts = run_program("inference_svc.describe", model, "the model cannot be used")
        return {**facts, "free_disk_bytes": shutil.disk_usage(self.home).free}

    @property
    def longest_tokens(self) -> int:
        fits = int(self.facts["context_tokens"]) - SPARE_TOKENS
        return min(fits, _QUICK_TOKENS) if self.is_quick else fits

    def lengths_of(self, wanted: Sequence[int]) -> list[int]:
        """Those that fit, and the longest that does where the model's context leaves some out, or nothing fits."""
        fits = {length for length in wanted if length <= self.longest_tokens}
        if len(fits) < len({*wanted}) and not (self.is_quick and fits):
            fits.add(self.longest_tokens)
        return sorted(fits)

    def why_left_out(self, length: int) -> str:
        context = int(self.facts["context_tokens"])
        if length + SPARE_TOKENS > context:
            return f"beyond the model's context of {context:,}"
        return "left out by --quick" if length > self.longest_tokens else ""

    @cached_property
    def services(self) -> MeasuredServices:
        with socket.create_server(("127.0.0.1", 0)) as free:
            http = f"127.0.0.1:{free.getsockname()[1]}"
        of_one = self.facts["kv_bytes_per_token"] * self.longest_tokens + self.facts["window_bytes"]
        room = max(_LEAST_GIB, _ROOM * of_one / _GIB)
        made = measured_services(self.home, http=http, model=self.model, memory_gib=room, played=())
        services = self.started.enter_context(made)
        services.read_nothing_ahead()
        self.say("starting the services")
        services.start()
        return services

    def of_bench(self, name: str, failure: str, *words: str, **options: object) -> dict[str, Any]:
        given = {f"--{option}": value for option, value in options.items()}
        return measured_by(name, failure, given, self.say, *words)

    def bytes_of(self, tokens: int, kv: str, cell_tokens: int) -> dict[str, Any]:
        """Of one prompt, in a process of its own, measured once."""
        key = (tokens, kv, cell_tokens)
        if key not in self._probes:
            self.say(f"memory of {tokens:,} tokens, {kv}, {cell_tokens:,} at a time")
            options = {"--model": self.model, "--tokens": tokens, "--cell": cell_tokens, "--kv": kv}
            self._probes[key] = measured_by("engine.memory_probe", "the memory probe failed", options)
        return self._probes[key]
