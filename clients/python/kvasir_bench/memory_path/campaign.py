"""The phases of `kvasir bench memory-path`: an agent's reply while hot is its reply in each of them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvasir.clients import InferenceClient

from kvasir_bench.memory_path import machine
from kvasir_bench.memory_path.findings import complete
from kvasir_bench.memory_path.services import MeasuredServices
from kvasir_bench.memory_path.turns import Agent, SeenTurn, words_per_token

REPLY_TOKENS = 50
# Of the context, for the question, the replies and the template's own tokens.
SPARE_TOKENS = 640
_SHORT_TURNS = 3
_FIRST_WORDS = 200
_FEW_TOKENS = 4
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class PathScope:
    lengths: Sequence[int]
    repeats: int = 3
    time_limit_s: float = 0.0  # begin no further repeat after so many seconds; 0: never mind
    is_quick: bool = False  # the machine's rates are measured with less, for tests


def measure(
    scope: PathScope, services: MeasuredServices, say: Callable[[str], None], keep: Keep = lambda _: None
) -> dict[str, Any]:
    """All phases; `keep` gets the results after each. Raises KvasirError when a turn or a start fails."""
    began_s = time.monotonic()
    results: dict[str, Any] = {"settings": {**asdict(scope), "lengths": list(scope.lengths)}}
    say("measuring the machine")
    results["machine"] = machine.rates(services.directory, *((2, 1) if scope.is_quick else ()))
    results["device"] = machine.device_rates()
    say("starting the services")
    results["ready"] = {"first": services.start()}
    with services.client() as client:
        model = client.get_model()
        facts = ("name", "kv_bytes_per_token", "context_tokens", "compute_type", "kv_policy", "cell_tokens")
        results["model"] = {name: getattr(model, name) for name in facts} | _engine_facts(client)
        results["model"]["is_played"] = services.is_played
        results["first_turns"] = list(_first_turns(client))
        agents = _begin(scope, client, model.context_tokens, results, say, lambda: time.monotonic() - began_s, keep)
    for phase, arrange in (("from_ram", _drop_hot), ("engine_killed", _kill_engine), ("both_killed", _kill_both)):
        say(f"{phase.replace('_', ' ')}: {len(agents)} agents")
        results["ready"][phase] = arrange(services)
        with services.client() as client:
            list(_first_turns(client, 1))  # the connection, and what the process does once
            for number, agent in enumerate(agents):
                say(f"{phase.replace('_', ' ')}: agent {number + 1} of {len(agents)}")
                turn, row = agent.asked(client), results["agents"][number]
                row[phase] = {**_shown(turn), "is_exact": turn.token_ids == row["hot"]["token_ids"]}
        results["elapsed_s"] = round(time.monotonic() - began_s, 1)
        keep(complete(results))
    return complete(results)


def _begin(
    scope: PathScope,
    client: InferenceClient,
    context_tokens: int,
    results: dict[str, Any],
    say: Callable[[str], None],
    elapsed_s: Callable[[], float],
    keep: Keep,
) -> list[Agent]:
    agents: list[Agent] = []
    results["agents"] = []
    ratio, most = words_per_token(client), context_tokens - SPARE_TOKENS
    # A longer one has the length that the context leaves: targets are by length.
    lengths = dict.fromkeys(min(length, most) for length in scope.lengths)
    for repeat in range(scope.repeats):
        if scope.time_limit_s and repeat and elapsed_s() > scope.time_limit_s:
            break
        for length in lengths:
            say(f"{length} tokens, {repeat + 1} of {scope.repeats}: cold, stored, hot")
            agent = Agent(client, f"bench-{length}-{repeat}", round(length * ratio), REPLY_TOKENS)
            agents.append(agent)
            results["agents"].append({"length": length, "repeat": repeat, **_live(agent, client)})
            keep(complete(results))
    return agents


def _live(agent: Agent, client: InferenceClient) -> dict[str, Any]:
    row: dict[str, Any] = {"cold": _shown(agent.cold())}
    row["stored_s"] = agent.stored_s()
    row["short"] = []
    for _ in range(_SHORT_TURNS):
        turn = agent.goes_on()
        row["short"].append({**_shown(turn), "stored_s": agent.stored_s()})
    hot = agent.asked(client)
    return {**row, "hot": {**_shown(hot), "token_ids": hot.token_ids}}


def _first_turns(client: InferenceClient, count: int = 3) -> Iterator[float]:
    """Seconds to the first token of the first few turns of a process, each cold, of one length."""
    for number in range(count):
        agent = Agent(client, f"first-{time.time_ns()}-{number}", _FIRST_WORDS, _FEW_TOKENS)
        yield round(agent.cold().first_token_s, 4)


def _drop_hot(services: MeasuredServices) -> dict[str, Any]:
    """The model goes, and every hot memory with it; the store's files stay in the page cache."""
    began = time.monotonic()
    with services.client() as client:
        name = client.get_model().name
        client.unload_model(name, timeout_s=300)
        client.load_model(name, timeout_s=600)
    return {"reloaded_s": round(time.monotonic() - began, 3)}


def _kill_engine(services: MeasuredServices) -> dict[str, Any]:
    services.kill("engine")
    return services.start()


def _kill_both(services: MeasuredServices) -> dict[str, Any]:
    services.kill("engine", "store")
    files = services.files()
    machine.drop_cached(files)
    left = machine.cached_share(files)
    machine.drop_cached(files)
    return {"cached_share": round(left, 4), **services.start()}


def _shown(turn: SeenTurn) -> dict[str, Any]:
    shown = {key: value for key, value in asdict(turn).items() if key != "token_ids"}
    seconds = {key: round(value, 5) for key, value in shown.items() if key.endswith("_s")}
    return {**shown, **seconds, "lag_s": round(turn.lag_s, 5), "tokens": len(turn.token_ids)}


def _engine_facts(client: InferenceClient) -> dict[str, Any]:
    found = client.get_capabilities()
    return {"version": found.version, "device": found.device, "kv_memory_bytes": found.limits.kv_memory_bytes}
