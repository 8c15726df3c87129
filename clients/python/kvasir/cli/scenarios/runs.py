"""Runs of scenarios in a home: where their journals lie, which run goes on, and which client acts for whom."""

import itertools
import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

from kvasir_orchestrator import EngineMemory, Journal, Retries, RunDone, Scenario, forget, shipped_names
from kvasir_orchestrator import run as events_of
from kvasir_orchestrator.model import json_schema
from kvasir_orchestrator.report.page import html_page

from kvasir.cli import failures
from kvasir.cli.caller import Caller
from kvasir.cli.scenarios.showing import ShownRun, dry_rows, event_row, show_dry_rows
from kvasir.cli.showing.tables import table
from kvasir.clients import AioInferenceClient
from kvasir.credentials import read_token
from kvasir.errors import DataLoss, FailedPrecondition, KvasirError, NotFound, Unavailable


def show_shipped(caller: Caller) -> None:
    """The scenarios that come with Kvasir."""
    found = [Scenario.shipped(name) for name in shipped_names()]
    rows = [
        {"name": each.name, "agents": len(each.agents), "turns": len(each.plan.turns), "about": each.file.about.strip()}
        for each in found
    ]
    caller.result(rows, table(rows[0], (row.values() for row in rows)))


def show_schema(caller: Caller) -> None:
    text = json.dumps(json_schema(), indent=2)
    caller.result(json_schema(), text)


def show_prompts(caller: Caller, scenario: Scenario) -> None:
    """What a run would send, and how much it would reuse; in tokens where an engine is there to count them."""
    try:
        with failures.naming("engine", caller), caller.engine.engine_client() as client:
            rows = dry_rows(scenario, client)
    except KvasirError as error:
        caller.note(f"tokens are not counted: {error.message}")
        rows = dry_rows(scenario, None)
    caller.result(rows, lambda out: show_dry_rows(out, scenario, rows))


def scenario_of(file: str, variant: int = 0) -> Scenario:
    """A file, or else a scenario that ships. Raises ScenarioInvalid, NotFound."""
    return Scenario.read(file, variant) if Path(file).is_file() else Scenario.shipped(file, variant)


def tokens_of(scenario: Scenario, given: Sequence[str]) -> dict[str, str]:
    """Tokens by namespace, of NAME=FILE, for all that the scenario names. Raises WrongUsage."""
    tokens = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not (name and equals and path):
            raise failures.WrongUsage.of("--namespace", f"expected NAME=FILE, got {each!r}")
        tokens[name] = read_token(Path(path))
    if missing := sorted({agent.namespace for agent in scenario.agents.values()} - tokens.keys() - {""}):
        text = f"expected the token file of {', '.join(missing)}, which the scenario names"
        raise failures.WrongUsage.of("--namespace", text)
    return tokens


def journal_of(caller: Caller, scenario: Scenario, path: Path | None, *, fresh: bool) -> Journal:
    """The journal of a run that was stopped, or a new one; with `fresh`, one that forgets all agents first. Raises
    FailedPrecondition while another process needs those."""
    for before in _journals(caller, scenario) if fresh else ():
        Journal.check_unused(before)
    if path is None:
        earlier = _journals(caller, scenario)
        is_open = not fresh and bool(earlier) and not Journal.read(earlier[-1]).is_finished
        path = earlier[-1] if is_open else _next(caller, scenario)
    if path.exists() and not fresh:
        return Journal.resume(path, scenario)
    return Journal.begin(path, scenario, uuid.uuid4().hex, forgets=fresh)


async def run(
    caller: Caller,
    scenario: Scenario,
    journal: Journal,
    *,
    model: str,
    tokens: Mapping[str, str],
    retries: int,
    parallel: int,
) -> bool:
    """Run it to its end with the engine's loaded model, or one by name; whether all outcomes are met."""
    endpoint, conversation = caller.engine, ShownRun(caller, scenario)
    for agent_id in filter(None, (agent.id for agent in scenario.agents.values())):
        caller.say(f"{agent_id} continues with its memory: the file names it by its id, and it may be your own agent")
    done = RunDone(0, 0, (), 0, 0)
    async with AioInferenceClient.connect(endpoint.address, token=endpoint.token(), tls=endpoint.tls) as client:
        of_namespaces = {name: client.with_token(token) for name, token in tokens.items()}
        await _check_model(client, model, journal)
        memory = EngineMemory(client, of_namespaces, model=model)
        if journal.forgets and not journal.answers:
            await _forget_earlier(caller, scenario, memory, journal)
        options = Retries(times=retries)
        async with aclosing(events_of(scenario, memory, journal=journal, retries=options, parallel=parallel)) as events:
            async for event in events:
                if not caller.as_json:
                    conversation.show(event)
                elif row := event_row(scenario, event):
                    caller.line(row)
                if isinstance(event, RunDone):
                    done = event
    caller.say(f"journal: {journal.path}; as a page: kvasir scenario report {journal.path}")
    return done.outcomes_met == done.outcomes


async def _check_model(client: AioInferenceClient, model: str, journal: Journal) -> None:
    """Raises FailedPrecondition where another model would go on with the run. An engine that does not answer is left
    to the turns, which retry."""
    if not journal.model:
        return
    with suppress(Unavailable):
        name = (await client.get_model(model)).name
        if name != journal.model:
            raise FailedPrecondition(
                f"{journal.path}: its turns were answered by {journal.model}, and now {name} would answer: name that "
                "model with --model, or begin a new run with --fresh",
                reason="MODEL_CHANGED",
                field="model",
            )


async def _forget_earlier(caller: Caller, scenario: Scenario, memory: EngineMemory, journal: Journal) -> None:
    """Delete the permanent agents, and the ephemeral ones of runs that were never finished."""
    for path in _journals(caller, scenario):
        try:
            before = Journal.read(path)
        except DataLoss as damaged:
            caller.say(f"{damaged.message}; ephemeral agents of that run stay")
            continue
        if not before.is_finished:
            await forget(scenario, memory, before.run_id, permanent=False)
    for agent_id in await forget(scenario, memory, journal.run_id, permanent=True):
        caller.say(f"{agent_id} remembers nothing now")


def write_report(caller: Caller, file: str, out: Path) -> None:
    """Write the page of a journal, or of a scenario's newest run."""
    path = Path(file) if file.endswith(".jsonl") else _newest(caller, scenario_of(file))
    journal = Journal.read(path)
    scenario = Scenario.parse(journal.text, path.name, journal.variant)
    journal.check(scenario)
    out.write_text(html_page(scenario, journal.run_id, journal.answers), encoding="utf-8")
    caller.result({"journal": str(path), "page": str(out)}, f"{out} shows the run of {path}")


def _folder(caller: Caller) -> Path:
    return caller.home.root / "scenarios"


def _journals(caller: Caller, scenario: Scenario) -> list[Path]:
    """The home's journals of a scenario and variant, the oldest first."""
    found = _folder(caller).glob(f"{scenario.stem}.*.jsonl")
    numbered = [path for path in found if path.suffixes[-2][1:].isdecimal()]  # not copies beside them
    return sorted(numbered, key=lambda path: int(path.suffixes[-2][1:]))


def _next(caller: Caller, scenario: Scenario) -> Path:
    paths = (_folder(caller) / f"{scenario.stem}.{number}.jsonl" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def _newest(caller: Caller, scenario: Scenario) -> Path:
    """The journal that was written last, of any variant."""
    found = [*_folder(caller).glob(f"{scenario.name}.*.jsonl"), *_folder(caller).glob(f"{scenario.name}+*.jsonl")]
    if not found:
        raise NotFound(f"no run of {scenario.name!r} in {_folder(caller)}", reason="JOURNAL_NOT_FOUND")
    return max(found, key=lambda path: path.stat().st_mtime_ns)
