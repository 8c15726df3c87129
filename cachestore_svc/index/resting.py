"""When a blob that nothing holds may go: a grace period after it was marked, and after it was last promised. Pure."""

from cachestore_svc.index.ports.upkeep import Deadlines


def rested_at(now_unix_ms: int, grace_ms: int) -> Deadlines:
    """Promises are renewed only from an eighth of the grace period on (see `needs_promise`): so they rest for more."""
    return Deadlines(now_unix_ms - grace_ms, now_unix_ms - grace_ms - grace_ms // 8)


def gone_by(now_unix_ms: int, grace_ms: int) -> int:
    return now_unix_ms + grace_ms + grace_ms // 8


def needs_promise(promised_unix_ms: int, now_unix_ms: int, grace_ms: int) -> bool:
    return promised_unix_ms <= now_unix_ms - grace_ms // 8
