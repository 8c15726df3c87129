"""Scenarios: agents who speak with each other in phases, and remember. A client of the engine like any other."""

from kvasir_orchestrator.scenario import Scenario
from kvasir_orchestrator.yaml_lines import Problem, ScenarioInvalid

__all__ = ["Problem", "Scenario", "ScenarioInvalid"]
