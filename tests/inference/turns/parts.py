"""The parts of an engine, of which a test has a few."""

from dataclasses import fields
from typing import Any

from inference_svc.turns.engine_parts import EngineParts


def parts_of(**given: Any) -> EngineParts:
    """Those that are given; nobody asks for the others."""
    nothing: dict[str, Any] = {field.name: None for field in fields(EngineParts)}
    return EngineParts(**(nothing | {"stores": {}, "leases": {}, "clock": lambda: 0.0} | given))
