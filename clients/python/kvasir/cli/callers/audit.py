"""`kvasir audit`: what needs attention of all that needs a privilege, as the services of this home wrote it down."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from kvasir.cli.caller import Caller
from kvasir.cli.failures import WrongUsage
from kvasir.cli.rows import counted, to_the_second
from kvasir.cli.running.home import Home
from kvasir.cli.showing.arguments import option
from kvasir.cli.showing.tables import table
from kvasir.names import UNNAMED_PREFIXES

_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_AGENTS = ("agent", "source_agent", "local_agent")
# They can be taken back, and each day has many: a turn's commit, and what leaves every version where it is.
_ROUTINE = frozenset({"CommitSnapshot", "ForkAgent", "RollbackAgent", "UpdateAgent"})
_TIDYING = "DeleteAgent"  # by the gateway, of old conversations that nobody named


def audit(
    caller: Caller,
    agent: Annotated[str, option("Only calls about this agent.")] = "",
    since: Annotated[str, option("Only calls since then: an age, as 30m or 2d, or a time, as 2026-11-22T18:00.")] = "",
    refused: Annotated[bool, option("Only refused calls.", "--refused")] = False,
    has_all: Annotated[
        bool, option("Also routine calls, and each call at both services that handled it.", "--all")
    ] = False,
    limit: Annotated[int | None, option("Only the newest N calls.", min=1, metavar="N")] = None,
) -> None:
    """Show calls that need attention: refusals; deletions, moves, exports and imports of agents; changes of peers,
    keys, tokens and models.

    It omits allowed calls that can be undone (turns, forks, rollbacks, labels), and deletions of conversations without
    a name. --json prints one object per line, which never has a text or a token."""
    begin = _time(since, datetime.now(UTC)) if since else ""
    lines = sorted(_lines(caller.home, begin), key=lambda line: str(line["at"]))
    wanted = [
        line
        for line in lines
        if (not agent or agent in (line.get(name) for name in _AGENTS))
        and (not refused or line.get("outcome") == "refused")
    ]
    found = wanted if has_all else list(_needing_attention(wanted))
    shown = found[-limit:] if limit else found
    if caller.as_json:
        for line in shown:
            caller.line(line)
    else:
        _show(caller.out, shown, len(wanted) - len(found))
        if cut := len(found) - len(shown):
            caller.out.print(f"{counted(cut, 'older line')}: --limit.", style="dim")


def _needing_attention(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines but for routine, and for the store's line of a call whose caller the engine knows."""
    at_engine = {_call(line) for line in lines if line.get("service") == "engine"}
    for line in lines:
        is_twice = line.get("service") == "store" and line.get("request_id") and _call(line) in at_engine
        if not is_twice and not _is_routine(line):
            yield line


def _call(line: dict[str, Any]) -> tuple[object, ...]:
    """What both services write of one call. Callers choose request ids: another call may have the same."""
    return tuple(line.get(name) for name in ("request_id", "what", "outcome", *_AGENTS))


def _is_routine(line: dict[str, Any]) -> bool:
    agents = [str(line[name]) for name in _AGENTS if line.get(name)]
    has_no_name = bool(agents) and all(name.startswith(UNNAMED_PREFIXES) for name in agents)
    what = str(line.get("what")).rpartition("/")[2]
    is_routine = what in _ROUTINE or (has_no_name and what == _TIDYING)
    return line.get("outcome") == "allowed" and is_routine


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of one service's audit, oldest first. A line that a crash or a full disk cut is left out."""
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
        raise WrongUsage.of("--since", f"expected 30m, 2d, or 2026-11-22T18:00, got {given!r}") from None


def _show(out: Console, lines: list[dict[str, Any]], left_out: int) -> None:
    if lines:
        at = "at (UTC)"
        out.print(table((at, "service", "who", "what", "about", "outcome"), map(_cells, lines), whole=at))
    else:
        out.print("nothing needs attention")
    if left_out:
        out.print(f"{counted(left_out, 'more line')}, of routine: --all shows them.", style="dim")


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    agents = " → ".join(str(line[name]) for name in ("source_agent", "agent", "local_agent") if line.get(name))
    about = " ".join((agents, *(f"{name}={line[name]}" for name in ("peer", "model") if line.get(name))))
    outcome = " ".join(str(line[name]) for name in ("outcome", "reason") if line.get(name))
    who, what = str(line.get("who") or "nobody known"), str(line.get("what", "")).rpartition("/")[2]
    return to_the_second(str(line["at"])), str(line.get("service", "")), who, what, about.strip(), outcome
