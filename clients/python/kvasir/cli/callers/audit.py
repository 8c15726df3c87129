"""`kvasir audit`: who did what that needs a privilege, as the services of this home wrote it down."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvasir.cli.caller import Caller
from kvasir.cli.failures import WrongUsage
from kvasir.cli.rows import to_the_second
from kvasir.cli.running.home import Home
from kvasir.cli.showing.tables import table

_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_AGENTS = ("agent", "source_agent", "local_agent")


def audit(
    caller: Caller,
    agent: Annotated[str, typer.Option(help="Only calls about this agent.")] = "",
    since: Annotated[
        str, typer.Option(help="Only since then: so long ago, as 30m or 2d, or a time as 2026-11-22T18:00.")
    ] = "",
    refused: Annotated[bool, typer.Option("--refused", help="Only calls that were refused.")] = False,
    has_all: Annotated[bool, typer.Option("--all", help="Each turn's commit, too.")] = False,
) -> None:
    """Show who did what that needs a privilege: changes of agents, exports, peers, keys; and who was refused.

    Commits of turns that were allowed are left out. --json prints one object per line, which never has a text or a
    token."""
    begin = _time(since, datetime.now(UTC)) if since else ""
    lines = sorted(_lines(caller.home, begin), key=lambda line: str(line["at"]))
    wanted = [
        line
        for line in lines
        if (not agent or agent in (line.get(name) for name in _AGENTS))
        and (not refused or line.get("outcome") == "refused")
        and (has_all or not _is_routine(line))
    ]
    if caller.as_json:
        for line in wanted:
            caller.line(line)
    else:
        _show(caller.out, wanted)


def _is_routine(line: dict[str, Any]) -> bool:
    """Whether it needs nobody's attention: each turn leaves one."""
    return line.get("outcome") == "allowed" and str(line.get("what")).endswith("/CommitSnapshot")


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of one service's audit, oldest first. What a crash or a full disk cut is left out."""
    numbered = [path for path in file.parent.glob(f"{file.name}.*") if path.suffix[1:].isdecimal()]
    older = sorted(numbered, key=lambda path: -int(path.suffix[1:]))
    for path in (*older, file):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # there is none yet, or it was just given the next number
            continue
        for each in text.splitlines():
            try:
                line = json.loads(each)
            except ValueError:
                continue
            if isinstance(line, dict) and "at" in line:
                yield line


def _lines(home: Home, begin: str) -> Iterator[dict[str, Any]]:
    for service in ("store", "engine", "http"):
        yield from (line for line in lines_of(home.audit_file(service)) if str(line["at"]) >= begin)


def _time(given: str, now: datetime) -> str:
    """As it stands in a line, in UTC. Raises WrongUsage."""
    if match := re.fullmatch(r"(\d{1,5})(s|min|m|h|d)", given):
        return (now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])).isoformat(timespec="milliseconds")
    try:
        # Without a zone it is the time of this machine.
        return datetime.fromisoformat(given).astimezone(UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError):  # no time, or one before the year 1
        raise WrongUsage(f"--since: expected 30m, 2d, or 2026-11-22T18:00, got {given!r}", field="--since") from None


def _show(out: Console, lines: list[dict[str, Any]]) -> None:
    if not lines:
        out.print("nothing is told")
        return
    at = "at (UTC)"
    out.print(table((at, "service", "who", "what", "about", "outcome"), map(_cells, lines), whole=at))


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    about = " ".join(f"{name}={line[name]}" for name in (*_AGENTS, "peer", "model") if line.get(name))
    outcome = " ".join(str(line[name]) for name in ("outcome", "reason") if line.get(name))
    who, what = str(line.get("who") or "nobody known"), str(line.get("what", "")).rpartition("/")[2]
    return to_the_second(str(line["at"])), str(line.get("service", "")), who, what, about, outcome
