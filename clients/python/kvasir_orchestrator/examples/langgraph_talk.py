"""A scenario as a node of a LangGraph graph: python -m kvasir_orchestrator.examples.langgraph_talk [ENGINE [SCENARIO]].

The graph streams each turn as it is done, and decides by the outcomes how it goes on. Needs `pip install langgraph`."""

import asyncio
import sys
from pathlib import Path
from typing import Any, TypedDict

from kvasir.clients import AioInferenceClient
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph

from kvasir_orchestrator import EngineMemory, OutcomeChecked, Scenario, TurnDone, run


class State(TypedDict, total=False):
    """What the nodes hand on."""

    scenario: str
    unmet: list[str]
    verdict: str


def graph_of(client: AioInferenceClient) -> Any:
    """talk → praise, or talk → complain, as the outcomes are."""

    async def talk(state: State) -> State:
        write, unmet = get_stream_writer(), []
        async for event in run(Scenario.shipped(state["scenario"]), EngineMemory(client)):
            if isinstance(event, TurnDone):
                write(f"{event.turn.agent}: {event.answer.text} [{event.answer.cached_tokens} tokens reused]")
            if isinstance(event, OutcomeChecked) and not event.is_met:
                unmet.append(event.outcome.label)
        return {"unmet": unmet}

    graph = StateGraph(State)
    graph.add_node("talk", talk)
    graph.add_node("praise", lambda _state: {"verdict": "all outcomes are met"})
    graph.add_node("complain", lambda state: {"verdict": f"not met: {', '.join(state['unmet'])}"})
    graph.add_edge(START, "talk")
    graph.add_conditional_edges("talk", lambda state: "complain" if state["unmet"] else "praise")
    graph.add_edge("praise", END)
    graph.add_edge("complain", END)
    return graph.compile()


async def main(address: str, name: str) -> bool:
    """Whether all outcomes are met."""
    async with AioInferenceClient.connect(address) as client:
        verdict = ""
        async for kind, value in graph_of(client).astream({"scenario": name}, stream_mode=["custom", "values"]):
            if kind == "custom":
                print(value)
            else:
                verdict = value.get("verdict", "")
        print(verdict)
        return bool(verdict == "all outcomes are met")


if __name__ == "__main__":
    defaults = [f"unix:{Path.home()}/.kvasir/run/engine.sock", "gossip"]
    given = sys.argv[1:]
    sys.exit(0 if asyncio.run(main(*given, *defaults[len(given) :])) else 1)
