"""The tables' cases share this: how much is measured, the loaded model's facts, and services of their own."""

import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kvasir.cli.running.program import run_program

from kvasir_bench.memory_path.campaign import SPARE_TOKENS
from kvasir_bench.memory_path.services import MeasuredServices, measured_services
from kvasir_bench.program import measured_by

_QUICK_TOKENS = 1100
_ROOM = 3  # memories of the longest length that the engine has room for
_LEAST_GIB, _GIB = 1.0, 1 << 30


@dataclass(frozen=True, slots=True)
class PaperScope:
    """How much is measured, and of which model. `server`: URL, model and key of another HTTP server."""

    model: str = ""
    repeats: int = 3
    is_quick: bool = False
    home: Path = Path("/tmp")  # noqa: S108 - short: a socket's path must fit into a hundred bytes
    server: tuple[str, str, str] | None = None


class Bench:
    """The scope; facts and services are loaded and started when a case first needs them."""

    def __init__(self, scope: PaperScope, say: Callable[[str], None]) -> None:
        self.scope = scope
        self.say = say
        self._started = ExitStack()
        self.probed = cache(self._probed)

    def close(self) -> None:
        """End the services."""
        self._started.close()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """As `kvasir doctor` has them, and the free disk. Raises FailedPrecondition for a model that cannot be used."""
        self.say("loading the model")
        model = ["--model", self.scope.model] if self.scope.model else []
        facts = run_program("inference_svc.describe", model, "the model cannot be used")
        return {**facts, "free_disk_bytes": shutil.disk_usage(self.scope.home).free}

    @property
    def repeats(self) -> int:
        return 1 if self.scope.is_quick else self.scope.repeats

    @property
    def longest_tokens(self) -> int:
        """The longest context that is measured."""
        fits = int(self.facts["context_tokens"]) - SPARE_TOKENS
        return min(fits, _QUICK_TOKENS) if self.scope.is_quick else fits

    def lengths_of(self, wanted: Sequence[int]) -> list[int]:
        """Those that fit, and the longest that does where the model's context leaves some out, or nothing fits."""
        fits = {length for length in wanted if length <= self.longest_tokens}
        if len(fits) < len({*wanted}) and not (self.scope.is_quick and fits):
            fits.add(self.longest_tokens)
        return sorted(fits)

    def why_left_out(self, length: int) -> str:
        """Why a length is not measured."""
        context = int(self.facts["context_tokens"])
        if length + SPARE_TOKENS > context:
            return f"beyond the model's context of {context:,}"
        return "left out by --quick" if length > self.longest_tokens else ""

    @cached_property
    def services(self) -> MeasuredServices:
        """A store, an engine and a gateway."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            http = f"127.0.0.1:{free.getsockname()[1]}"
        of_one = self.facts["kv_bytes_per_token"] * self.longest_tokens + self.facts["window_bytes"]
        memory_gib = max(_LEAST_GIB, _ROOM * of_one / _GIB)
        options = {"model": self.scope.model, "memory_gib": memory_gib, "played": ()}
        services = self._started.enter_context(measured_services(self.scope.home, http=http, **options))
        self.say("starting the services")
        services.start()
        return services

    def engine_case(self, name: str, lengths: Sequence[int], **options: object) -> list[dict[str, Any]]:
        """The rows of a case of `kvasir bench engine` at these contexts."""
        given: Mapping[str, object] = {
            "--model": self.scope.model,
            "--lengths": ",".join(map(str, lengths)),
            "--repeats": self.repeats,
            **{f"--{option}": value for option, value in options.items()},
        }
        found = measured_by("engine", "the engine could not be measured", given, self.say, "--only", name)
        rows: list[dict[str, Any]] = found["cases"][name]["rows"]
        return rows

    def _probed(self, tokens: int, kv: str, cell_tokens: int) -> dict[str, Any]:
        """Bytes of one prompt in a process of its own."""
        self.say(f"memory of {tokens:,} tokens, {kv}, {cell_tokens:,} at a time")
        options = {"--model": self.scope.model, "--tokens": tokens, "--cell": cell_tokens, "--kv": kv}
        return measured_by("engine.memory_probe", "the memory probe failed", options)
