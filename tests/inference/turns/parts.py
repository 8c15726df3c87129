"""The parts of an engine, of which a test has a few."""

from dataclasses import fields
from typing import Any

from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.turns.engine_parts import EngineParts


def parts_of(**given: Any) -> EngineParts:
    """Those that are given; nobody asks for the others."""
    nothing: dict[str, Any] = {field.name: None for field in fields(EngineParts)}
    return EngineParts(**(nothing | {"stores": {}, "clock": lambda: 0.0} | given))


def line_parts(**given: Any) -> LineParts:
    """The same for the lines of an engine."""
    nothing: dict[str, Any] = {field.name: None for field in fields(LineParts)}
    clocks = dict.fromkeys(("clock", "lease_clock"), lambda: 0.0)
    return LineParts(**(nothing | {"owner": "engine-1"} | clocks | given))
