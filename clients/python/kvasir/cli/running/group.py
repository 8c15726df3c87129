"""`kvasir down`, `status` and `logs`: look after the group that `kvasir up` runs in a home."""

import asyncio
import contextlib
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvasir.cli.backups.last import last_backup
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS, UNREACHABLE, WrongUsage
from kvasir.cli.rows import counted, fields_of, scrub_text, size, stats_row, to_the_second
from kvasir.cli.running.health import ENGINE_SERVICE, STORE_SERVICE, Health, health, http_health, problems_at
from kvasir.cli.running.holding import disk_failure, end_group, holders, is_led
from kvasir.cli.running.home import Endpoint, Home, Running
from kvasir.cli.running.logs import GrowingLog, is_problem, last_lines
from kvasir.cli.running.starting import ENGINE_KILLED
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.tables import table
from kvasir.cli.showing.terminal import visible
from kvasir.credentials import engine_of
from kvasir.errors import KvasirError, NotFound
from kvasir.waits import ANSWER_S, PAUSE_S

_SERVICES = {"store": STORE_SERVICE, "engine": ENGINE_SERVICE}
_LOGS = (*_SERVICES, "http", "up")
_SEALED, _DESTROYED = "NAMESPACE_SEALED", "its key was destroyed"
# As an engine's log, in either form, tells how many hot memories went with a model that it unloaded.
_DROPPED = re.compile(r"(?=.*\bmodel\.unloaded\b).*\bdropped\"?[=:] ?(\d+)")

_LOG_ROOM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServiceState:
    """One service of a home. `state` is a word of Health, or `starting`, or `hangs`."""

    name: str
    address: str
    pid: int  # 0: it has no process
    state: str
    metrics: str = ""  # HOST:PORT; empty without
    problems: tuple[str, ...] = ()  # why it is not well, as it and its /healthz report
    is_elsewhere: bool = False  # no process of this home
    facts: Mapping[str, Any] = field(default_factory=dict)  # of a ready one: disk; or owed, kernels


def service_states(caller: Caller) -> list[ServiceState]:
    """The state of each service that the caller uses, by its process and by its own answer."""
    running, alive = caller.home.running(), holders(caller.home.services_lock_file)
    endpoints = {"store": caller.store, "engine": caller.engine}
    if running is not None and not running.engine and not caller.engine_address:  # `kvasir store serve`
        del endpoints["engine"]
    states = [_state(name, endpoint, caller.home, running, alive) for name, endpoint in endpoints.items()]
    if running is not None and running.http:
        states.append(_state("http", Endpoint(running.http), caller.home, running, alive))
    return [_with_facts(caller, each) for each in states]


def _with_facts(caller: Caller, state: ServiceState) -> ServiceState:
    """The state with the numbers that the service answers, and the problems that they show."""
    read = {"store": _store_facts, "engine": _engine_facts}.get(state.name)
    if read is None or state.state != Health.READY:
        return state
    facts, found = dict[str, Any](), dict[str, str]()
    with contextlib.suppress(KvasirError, ValueError, OSError):  # it does not answer soon
        facts, found = read(caller)
    if state.name == "store" and state.address == caller.home.endpoint("store").address:
        with contextlib.suppress(ValueError, OSError):  # the list cannot be read
            found |= {_SEALED: "; ".join(shut)} if (shut := list(_shut_namespaces(caller.home))) else {}
        if not state.is_elsewhere and (failure := disk_failure(caller.home.store_data)):
            found["DISK_FAILED"] = f"the store's disk takes no file: {failure}"
    known = " ".join(state.problems)  # of its /healthz
    new = (f"{text} ({reason})" for reason, text in found.items() if f"({reason})" not in known)
    return replace(state, facts=facts, problems=(*state.problems, *new))


def _shut_namespaces(home: Home) -> Iterator[str]:
    """Why the home's store opens sealed namespaces to nobody: it refuses their engine's tokens, and names the key that
    it lacks. Of a key that was destroyed nothing can be repaired."""
    listed = home.sealed_file.read_text().split() if home.sealed_file.exists() else ()
    for namespace in listed:
        store = replace(home.endpoint("store"), token_file=home.tokens / f"{engine_of(namespace)}.token")
        try:
            with store.store_client(ANSWER_S) as client:
                client.get_stats()
        except (KvasirError, ValueError, OSError) as error:  # also without a token: nobody calls there
            if getattr(error, "reason", "") == _SEALED and _DESTROYED not in str(error):
                yield str(error)


def _state(name: str, endpoint: Endpoint, home: Home, running: Running | None, alive: list[int]) -> ServiceState:
    pid: int = 0
    metrics = running.metrics.get(name, "") if running else ""
    if running is not None and endpoint.address == home.endpoint(name).address:
        pid = getattr(running, f"{name}_pid")
        pid = pid if pid in alive else 0
    if name == "http":
        answer = asyncio.run(http_health(home, endpoint.address, ANSWER_S))
    else:
        answer = asyncio.run(health(endpoint, _SERVICES[name], ANSWER_S))
    state: str = answer
    if answer is Health.SILENT:
        state = "hangs"
    elif pid and answer is Health.STOPPED:
        state = "starting"
    # The gateway reports at its own address why it is not well.
    asked = running.http if name == "http" and running is not None else metrics
    is_elsewhere = name == "store" and running is not None and running.store_elsewhere is not None
    problems = tuple(problems_at(asked, ANSWER_S)) if answer is not Health.FOREIGN else ()
    return ServiceState(name, endpoint.address, pid, state, metrics, problems, is_elsewhere)


def down(caller: Caller) -> None:
    """Stop the services that `kvasir up` runs in this home, or that a killed `kvasir up` left; no other processes. Ends
    with 1 if the store did not store all newest turns, or if that is unknown because the engine had to be killed."""
    log, running = GrowingLog(caller.home.logs / "engine.log"), caller.home.running()
    with caller.busy("stopping"):
        failed = _failed_beside_full_log(caller, running)
        ended = end_group(caller.home, caller.say)
    logged = [int(match[1]) for line in log.new_lines() if (match := _DROPPED.search(line))]
    dropped = sum(logged) if logged else failed
    if not is_led(caller.home):  # a new `kvasir up` may have begun meanwhile
        with contextlib.suppress(OSError):  # of a disk that takes no change
            caller.home.running_file.unlink(missing_ok=True)
    root = caller.home.root
    place = f"in {root}" if running is None or running.store_elsewhere is None else f"at the store, {running.store}"
    text = f"stopped; agents' memories are {place}" if ended.pids else f"nothing runs in {root}"
    text += f", but for the newest turns of {counted(dropped, 'agent')}: the store did not take them" if dropped else ""
    text += f", {ENGINE_KILLED}" if ended.is_engine_killed else ""
    answer = {"home": str(root), "ended": ended.pids, "not_stored": dropped, "engine_killed": ended.is_engine_killed}
    caller.result(answer, text)
    if dropped or ended.is_engine_killed:
        raise typer.Exit(PROBLEMS)


def _failed_beside_full_log(caller: Caller, running: Running | None) -> int:
    """How many agents' newest turns the store did not take, where the engine's log may take no line of it."""
    with contextlib.suppress(KvasirError, ValueError, OSError):
        failure = disk_failure(caller.home.logs)
        has_room = not failure and shutil.disk_usage(caller.home.logs).free >= _LOG_ROOM_BYTES
        if running is not None and running.engine and not has_room:
            owed: dict[str, int] = _engine_facts(caller)[0]["owed"]
            return owed["memories" if failure else "failed"]
    return 0


def status(caller: Caller) -> None:
    """Show the services of this home and their addresses. Ends with 3 unless all are ready, with 1 if one has a
    problem."""
    home, running = caller.home, caller.home.running()
    states = service_states(caller)
    facts = {name: value for each in states for name, value in each.facts.items()}
    names = ("name", "address", "pid", "state", "metrics", "problems", "is_elsewhere")
    value: dict[str, Any] = {
        "home": str(home.root),
        "pid": next(iter(holders(home.up_lock_file)), 0),
        "services": [fields_of(each, *names) for each in states],
        "http_remark": running.http_remark if running is not None else "",
        "token_file": running.token_file if running is not None else "",
        "logs": str(home.logs),
        **{name: facts.get(name, {}) for name in ("disk", "owed", "kernels")},
        "backup": last_backup(home),
    }
    caller.result(value, lambda out: _show_status(out, value, is_killed=running is not None))
    if any(each.state != Health.READY for each in states):
        raise typer.Exit(UNREACHABLE)
    is_unled = running is not None and not value["pid"]  # nothing restarts its services
    if is_unled or any(each.problems for each in states):
        raise typer.Exit(PROBLEMS)


def _engine_facts(caller: Caller) -> tuple[dict[str, Any], dict[str, str]]:
    """Hot memories that the store lacks, and the implementations that serve."""
    with caller.engine.engine_client(ANSWER_S) as client:
        namespaces, kernels = client.get_stats().namespaces, client.get_capabilities().kernels
    names = {"memories": "owed_memories", "bytes": "owed_bytes", "failed": "failed_memories"}
    owed = {name: sum(getattr(each, source) for each in namespaces) for name, source in names.items()}
    facts = {"owed": owed, "kernels": fields_of(kernels, *(field.name for field in kernels.DESCRIPTOR.fields))}
    text = f"agents whose newest turns are in RAM alone, because the store did not take them: {owed['failed']}"
    return facts, {"MEMORIES_NOT_STORED": text} if owed["failed"] else {}


def _store_facts(caller: Caller) -> tuple[dict[str, Any], dict[str, str]]:
    """The disk's bytes, those that the store holds, wrote today and may write, and how far its scrub is."""
    with caller.store.store_client(ANSWER_S) as client:
        numbers = stats_row(client.get_stats())
    of_writes = ("written_today_bytes", "write_budget_bytes", "is_disk_full", "scrub", "free_disk_bytes")
    names = (*of_writes, "agent_count", "blob_bytes", "damaged_blob_count")
    full = {"DISK_FULL": "the disk has no room beside what must stay free: writes are refused"}
    facts = {"disk": {name: numbers[name] for name in names} | _whole_disk(caller.home)}
    return facts, full if numbers["is_disk_full"] else {}


def _whole_disk(home: Home) -> dict[str, int]:
    """The bytes of the disk on which the home's store lies; 0 if it is another machine's."""
    running = home.running()
    with contextlib.suppress(OSError):
        if running is None or running.store_elsewhere is None:
            return {"total_disk_bytes": shutil.disk_usage(home.store_data).total}
    return {"total_disk_bytes": 0}


def logs(
    caller: Caller,
    service: Annotated[str, argument("store, engine, http, or up (of `kvasir up -d`). Default: all.", "SERVICE")] = "",
    follow: Annotated[bool, option("Follow the logs until Ctrl-C.", "--follow", "-f")] = False,
    lines: Annotated[int, option("The number of last lines of each log.", "--lines", "-n", min=0)] = 20,
    problems: Annotated[bool, option("Only warnings and errors.", "--problems")] = False,
) -> None:
    """Show the logs of this home's services. --json: one object per line, with service and line."""
    files = {path.stem: path for path in sorted(caller.home.logs.glob("*.log")) if "." not in path.stem}
    if service:
        if service not in _LOGS:
            raise WrongUsage.of("SERVICE", f"expected one of {', '.join(_LOGS)}, got {service!r}")
        files = {name: path for name, path in files.items() if name == service}
    if not files:
        raise NotFound(f"no log{f' of {service}' if service else ''} in {caller.home.logs}", reason="NO_LOG")
    growing = {name: GrowingLog(path) for name, path in files.items()}
    for name, path in files.items():
        found = last_lines(path, sys.maxsize if problems else lines)
        found = [line for line in found if is_problem(name, line)] if problems else found
        for line in found[-lines:] if lines else ():
            _show_line(caller, name, line, is_named=not service)
    while follow:
        time.sleep(PAUSE_S)
        for name, log in growing.items():
            for line in log.new_lines():
                if not problems or is_problem(name, line):
                    _show_line(caller, name, line, is_named=not service)


def _show_line(caller: Caller, name: str, line: str, *, is_named: bool) -> None:
    """People who read one service's log know whose it is; scripts get its name."""
    if caller.as_json:
        caller.line({"service": name, "line": line})
    else:
        caller.out.file.write(f"{name + ': ' if is_named else ''}{visible(line)}\n")
        caller.out.file.flush()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    metrics = f"metrics at {row['metrics']}" if row["metrics"] else ""
    process = f"pid {row['pid']}" if row["pid"] else "elsewhere" if row["is_elsewhere"] else ""
    return row["name"], row["state"], process, row["address"], metrics


def _show_status(out: Console, value: dict[str, Any], *, is_killed: bool) -> None:
    has_store_alone = [each["name"] for each in value["services"]] == ["store"]
    words = "store serve" if has_store_alone else "up"
    start = Home(Path(value["home"])).command(f"{words} -d")
    killed = f"`kvasir {words}` was killed here: it starts no service again, and `{start}` does"
    no_one = killed if is_killed else f"no `kvasir {words}` runs here: `{start}` starts one"
    led = f"`kvasir {words}` runs here (pid {value['pid']})" if value["pid"] else no_one
    out.print(f"{value['home']}: {led}")
    services = table(("",) * 5, map(_cells, value["services"]))
    services.show_header = False
    out.print(services)
    for row in value["services"]:
        for problem in row["problems"]:
            out.print(f"{row['name']}: {problem}")
    if value["pid"] and value["http_remark"]:
        out.print(f"HTTP: {value['http_remark']}")
    if failure := value["kernels"].get("failure"):
        out.print(f"engine: slow, by {value['kernels']['attention']}: {failure}")
    if value["owed"].get("memories"):
        owed = value["owed"]
        out.print(f"owed to the store: memories {owed['memories']}, {size(owed['bytes'])}")
    if disk := value["disk"]:
        budget = disk["write_budget_bytes"]
        of_budget = f" of a budget of {size(budget)}" if budget else ""
        spent = ": the budget is spent" if budget and disk["written_today_bytes"] >= budget else ""
        whole = f" of {size(disk['total_disk_bytes'])}" if disk["total_disk_bytes"] else ""
        free = f"{size(disk['free_disk_bytes'])} free{whole}"
        out.print(f"disk: {free}; {size(disk['written_today_bytes'])} written today (UTC){of_budget}{spent}")
        if (scrub := disk["scrub"]) and (scrub["blobs_checked"] or not scrub["bytes_per_s"]):
            out.print(f"scrub: {scrub_text(scrub)}")
    if backup := value["backup"]:
        damaged = f"; left out: {counted(len(backup['damaged']), 'damaged file')}" if backup["damaged"] else ""
        out.print(f"backup: {to_the_second(backup['ended_at'])} (UTC) in {backup['folder']}{damaged}")
    if value["token_file"]:
        out.print(f"token: {value['token_file']}")
    out.print(f"logs: {value['logs']}")
