"""Run a scenario from Python: python -m kvasir_orchestrator.examples.plain_asyncio [ENGINE [SCENARIO]]."""

import asyncio
import sys
from pathlib import Path

from kvasir.clients import AioInferenceClient

from kvasir_orchestrator import EngineMemory, OutcomeChecked, RunDone, Scenario, TurnDone, run


async def main(address: str, name: str) -> bool:
    """Whether all outcomes are met."""
    scenario = Scenario.shipped(name)  # or Scenario.read("mine.yaml")
    async with AioInferenceClient.connect(address) as client:
        async for event in run(scenario, EngineMemory(client)):
            match event:
                case TurnDone(turn, _, answer):
                    print(
                        f"{turn.agent}: {answer.text} [{answer.cached_tokens} tokens reused, {answer.new_tokens} new]"
                    )
                case OutcomeChecked(outcome, is_met=is_met):
                    print(f"{'met' if is_met else 'NOT MET'}: {outcome.label}")
                case RunDone():
                    return event.outcomes_met == event.outcomes
    return False


if __name__ == "__main__":
    defaults = [f"unix:{Path.home()}/.kvasir/run/engine.sock", "gossip"]
    given = sys.argv[1:]
    sys.exit(0 if asyncio.run(main(*given, *defaults[len(given) :])) else 1)
