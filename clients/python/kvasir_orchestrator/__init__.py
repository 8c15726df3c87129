"""Scenarios: agents that talk with each other in phases, and remember. A client of the engine like any other."""

from kvasir_orchestrator.engine_memory import EngineMemory
from kvasir_orchestrator.events import (
    Event,
    OutcomeChecked,
    ReplyPiece,
    RunDone,
    RunStarted,
    TurnDone,
    TurnRetried,
    TurnStarted,
)
from kvasir_orchestrator.journal import Journal
from kvasir_orchestrator.memory import Answer, Memory, ReplyRequest
from kvasir_orchestrator.running import Retries, forget, run
from kvasir_orchestrator.scenario import Scenario, shipped_names
from kvasir_orchestrator.yaml_lines import Problem, ScenarioInvalid

__all__ = [
    "Answer",
    "EngineMemory",
    "Event",
    "Journal",
    "Memory",
    "OutcomeChecked",
    "Problem",
    "ReplyPiece",
    "ReplyRequest",
    "Retries",
    "RunDone",
    "RunStarted",
    "Scenario",
    "ScenarioInvalid",
    "TurnDone",
    "TurnRetried",
    "TurnStarted",
    "forget",
    "run",
    "shipped_names",
]
