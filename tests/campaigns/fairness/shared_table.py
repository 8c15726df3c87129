"""The form of the table of shared resources, and the table as people see it."""

from collections.abc import Iterable
from dataclasses import dataclass

# The rule of kvasir.server.fair_shares.
THREE_OF_FREE = "at most 3 times what stays free"
IN_TURN = "namespaces in turn"
WAITS = "waits"


@dataclass(frozen=True)
class Shared:
    """One resource that callers share."""

    resource: str
    service: str  # "store", "engine", "both" of these, or "gateway"
    site: str
    cap: tuple[str, object]  # "module:name", or "" for a number written at the site; and what that is
    share: str
    order: str
    told: str  # reasons, as the status carries them; WAITS; or a sentence


@dataclass(frozen=True)
class Own:
    """A queue or a count of one call, connection or caller: nobody else can fill it."""

    site: str
    why: str


def markdown(rows: Iterable[Shared]) -> str:
    """The table as `clients/python/kvasir/server/SHARED.md` shows it."""
    lines = [
        "| shared | where | cap | share of a namespace | order | a refused caller gets |",
        "|---|---|---:|---|---|---|",
    ]
    for row in rows:
        told = f"`{row.told}`" if row.told.isupper() else row.told
        lines.append(
            f"| {row.resource} | {row.service} | {cap_text(row.cap[1])} | {row.share} | {row.order} | {told} |"
        )
    return "\n".join(lines)


def cap_text(cap: object) -> str:
    is_bytes = isinstance(cap, int) and cap >= 1 << 20 and cap % (1 << 20) == 0
    return f"{cap >> 20} MiB" if is_bytes else str(cap)  # type: ignore[operator]
