"""The store's answers, as plain values for --json, with the contract's own names, and as words for people."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from kvasir.cachestore.v1 import cachestore_pb2 as pb

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_OF_LINE = ("agent_id", "kv_identity_hash", "version", "parent_version", "token_count", "total_bytes")
_OF_MAKER = ("origin_detail", "is_brought", "request_id")


def fields_of(facts: object, *names: str) -> dict[str, Any]:
    """These fields of a message or a record, by name."""
    return {name: getattr(facts, name) for name in names}


def snapshot_row(snapshot: pb.SnapshotVersion) -> dict[str, Any]:
    manifest = {"hash": snapshot.manifest.hash, "size_bytes": snapshot.manifest.size_bytes}
    made = {"created_at": iso(snapshot.created_at), "origin": origin(snapshot.origin)}
    return {**fields_of(snapshot, *_OF_LINE), **made, **fields_of(snapshot, *_OF_MAKER), "manifest": manifest}


def agent_row(agent: pb.Agent) -> dict[str, Any]:
    """An agent and the newest version of each of its lines."""
    return {
        "agent_id": agent.agent_id,
        "labels": dict(sorted(agent.labels.items())),
        "is_pinned": agent.is_pinned,
        "retained_versions": agent.retained_versions,
        "created_at": iso(agent.created_at),
        "used_at": iso(agent.used_at),
        "expires_at": iso(agent.expires_at),
        "lines": [snapshot_row(line) for line in agent.lines],
        "ownership": ownership_row(agent.ownership),
    }


def labels_text(labels: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def ownership_row(known: pb.Ownership) -> dict[str, Any]:
    """Who may extend an agent, as its store knows it."""
    state = pb.OwnerState.Name(known.state or pb.OWNER_STATE_OWNED)
    row = {"state": state.removeprefix("OWNER_STATE_").lower(), "generation": known.generation}
    return row | {"peer": known.peer, "since": iso(known.since)}


def owner_words(known: pb.Ownership) -> str:
    """Where an agent is that is not this store's; empty for one that is."""
    words = {
        pb.OWNER_STATE_MOVED: f"moved to {known.peer}",
        pb.OWNER_STATE_MOVING: f"on its way to {known.peer}" if known.peer else "recovered, waits for a claim",
        pb.OWNER_STATE_ARRIVING: f"on its way from {known.peer}",
    }
    return words.get(known.state, "")


def stats_row(stats: pb.GetStatsResponse) -> dict[str, Any]:
    """Sizes and counters of a namespace."""
    names = (field.name for field in pb.GetStatsResponse.DESCRIPTOR.fields)
    row = fields_of(stats, *(name for name in names if name not in ("counters", "scrub")))
    scrub = scrub_row(stats.scrub) if stats.HasField("scrub") else None
    return row | {"scrub": scrub, "counters": dict(sorted(stats.counters.items()))}


def scrub_row(scrub: pb.ScrubStatus) -> dict[str, Any]:
    """How far the store is with hashing every blob again."""
    row = fields_of(scrub, *(field.name for field in pb.ScrubStatus.DESCRIPTOR.fields))
    return row | {"began_at": iso(scrub.began_at), "ended_at": iso(scrub.ended_at)}


def scrub_text(row: dict[str, Any]) -> str:
    """The same for people."""
    if not row["bytes_per_s"]:
        return "the background scrub is off"
    if row["ended_at"] and not row["blobs_checked"]:
        return "no pass has hashed a blob yet"
    found = f"{counted(row['blobs_checked'], 'blob')} ({size(row['bytes_checked'])}) hashed again"
    found += f", {row['blobs_damaged']} damaged"
    found += f", {row['blobs_repaired']} of them repaired" if row["blobs_damaged"] else ""
    word, at = ("until", row["ended_at"]) if row["ended_at"] else ("since", row["began_at"])
    return f"{found}, {word} {to_the_second(at)} UTC"


def origin(value: "pb.Origin") -> str:
    return pb.Origin.Name(value).removeprefix("ORIGIN_").lower()


def iso(at: Timestamp) -> str:
    """ISO 8601 in UTC; empty when the service does not know."""
    return at.ToDatetime(UTC).isoformat(timespec="milliseconds") if at.seconds or at.nanos else ""


def to_the_second(text: str) -> str:
    """An ISO 8601 time in UTC as people read it, narrow enough for a table of 80 columns."""
    return text[:19].replace("T", " ")


def ago(at: Timestamp, now: datetime) -> str:
    """How long ago, in the largest unit that fits; empty when the service does not know."""
    seconds = max(0, int((now - at.ToDatetime(UTC)).total_seconds()))
    return f"{_lasted(seconds) or f'{seconds} s'} ago" if at.seconds else ""


def until(at: Timestamp, now: datetime) -> str:
    """In how long; empty when the service does not know."""
    lasted = _lasted(int((at.ToDatetime(UTC) - now).total_seconds()))
    return (f"in {lasted}" if lasted else "soon") if at.seconds else ""


def _lasted(seconds: int) -> str:
    """In the largest unit that fits; empty for less than a minute."""
    units = (("d", 86_400), ("h", 3_600), ("min", 60))
    return next((f"{seconds // unit_s} {unit}" for unit, unit_s in units if seconds >= unit_s), "")


def size(count: int) -> str:
    """Bytes in the largest binary unit that fits."""
    power = min(max(count, 1).bit_length() - 1, 10 * (len(_UNITS) - 1)) // 10
    return f"{count / 1024**power:.1f} {_UNITS[power]}" if power else f"{count} B"


def counted(number: int, noun: str) -> str:
    """The number and its noun: 1 line, 2 lines."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(digest: str) -> str:
    return digest[:12]
