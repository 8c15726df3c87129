"""Scenarios: agents that talk with each other in phases, and remember. A client of the engine like any other."""

from kvasir_orchestrator.engine_memory import EngineMemory
from kvasir_orchestrator.events import (
    Event,
    OutcomeChecked,
    RunDone,
    RunStarted,
    Said,
    TurnDone,
    TurnRetried,
    TurnStarted,
)
from kvasir_orchestrator.journal import Journal
from kvasir_orchestrator.memory import Answer, Asked, Memory
from kvasir_orchestrator.running import Retries, forget, run
from kvasir_orchestrator.scenario import Scenario, shipped_names
from kvasir_orchestrator.yaml_lines import Problem, ScenarioInvalid

__all__ = [
    "Answer",
    "Asked",
    "EngineMemory",
    "Event",
    "Journal",
    "Memory",
    "OutcomeChecked",
    "Problem",
    "Retries",
    "RunDone",
    "RunStarted",
    "Said",
    "Scenario",
    "ScenarioInvalid",
    "TurnDone",
    "TurnRetried",
    "TurnStarted",
    "forget",
    "run",
    "shipped_names",
]
