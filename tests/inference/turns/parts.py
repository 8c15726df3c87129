"""The parts of an engine, of which a test has a few."""

from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from inference_svc.engine.api import Cold, Reuse
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.reuse_plan import Prepared
from inference_svc.turns.engine_parts import EngineParts


def parts_of(**given: Any) -> EngineParts:
    """Those that are given; nobody asks for the others."""
    nothing: dict[str, Any] = {each.name: None for each in fields(EngineParts)}
    reads_nothing = {"planner": SimpleNamespace(expect=lambda *_: None), "admission": SimpleNamespace(restoring=None)}
    return EngineParts(**(nothing | reads_nothing | {"stores": {}, "clock": lambda: 0.0} | given))


@dataclass(frozen=True, slots=True)
class Opened(Prepared):
    """A prepared prompt with the KV that it reuses."""

    reuse: Reuse = field(default_factory=Cold)


def opened(prepared: Prepared) -> Opened:
    known: dict[str, Any] = {each.name: getattr(prepared, each.name) for each in fields(prepared)}
    return Opened(**known, reuse=prepared.kv.take() or Cold())


def line_parts(**given: Any) -> LineParts:
    """The same for the lines of an engine."""
    nothing: dict[str, Any] = {each.name: None for each in fields(LineParts)}
    clocks = dict.fromkeys(("clock", "lease_clock"), lambda: 0.0)
    return LineParts(**(nothing | {"owner": "engine-1", "on_deleted": lambda _: None} | clocks | given))
