"""The ends of leases as columns of their rows, by the database's clock: every store that has the database knows them. A
store that starts cannot know whether that clock was set before: what was not released then holds for its whole time.
"""

from collections.abc import Sequence

from kvasir.waits import RETRY_S

from cachestore_svc.facts.records import HeldLease, LeaseToken, LineKey, RenewedLeases
from cachestore_svc.index.postgres.clock_steps import ClockSteps
from cachestore_svc.index.sqlite.events import set_fact
from cachestore_svc.index.sqlite.rows import Connection, Rows

BARRED = "leases_barred_until_ms"  # the fact, which has also for how long
_OF_LINE = "namespace_id = :namespace AND agent_name = :agent_id AND kv_identity_hash = :kv_identity_hash"
# `granted` is the generation that the other columns are about: they mean nothing for a lease of another one.
_GRANT = f"""UPDATE leases SET
    ends_ms = GREATEST(:now_ms + :ttl_ms, CASE WHEN granted = generation THEN ends_ms ELSE 0 END),
    is_wanted = is_wanted AND granted = generation, is_taken_back = is_taken_back AND granted = generation,
    granted = generation, barred_until_ms = 0 WHERE {_OF_LINE}"""  # noqa: S608
_ENDS = f"SELECT ends_ms, ttl_ms FROM leases WHERE {_OF_LINE} AND granted = generation"  # noqa: S608
_AMONG = """namespace_id = :namespace AND kv_identity_hash = :kv_identity_hash
    AND agent_name IN (SELECT value FROM json_each(:agent_id))"""
_TO_PROLONG = f"""SELECT agent_name AS agent_id, generation, is_wanted FROM leases WHERE {_AMONG} AND owner = :owner
    AND granted = generation AND ends_ms > :now_ms AND NOT is_taken_back AND ttl_ms >= :ttl_ms"""  # noqa: S608
_PROLONG = f"UPDATE leases SET ends_ms = GREATEST(ends_ms, :now_ms + :ttl_ms) WHERE {_AMONG}"  # noqa: S608
_WANT = f"""UPDATE leases SET is_wanted = TRUE, is_taken_back = :takes_back WHERE {_OF_LINE}
    AND granted = generation AND NOT is_taken_back AND (:takes_back OR NOT is_wanted)"""  # noqa: S608
_BAR = f"UPDATE leases SET barred_until_ms = :until_ms WHERE {_OF_LINE}"  # noqa: S608
_UNTIL, _FOR = "split_part(value, ' ', 1)::bigint", "split_part(value || ' 0', ' ', 2)::bigint"
_OF_ALL = f"SELECT {_UNTIL}, {_FOR} FROM facts WHERE name = '{BARRED}'"  # noqa: S608
_BARRED = f"SELECT barred_until_ms FROM leases WHERE {_OF_LINE}"  # noqa: S608
# What held before a step forward has as long to go as before it, and nothing has more than its whole time.
_AFTER_STEP = (
    """UPDATE leases SET ends_ms = LEAST(ends_ms + :step_ms, :now_ms + ttl_ms)
        WHERE granted = generation AND NOT is_released AND ends_ms > :now_ms - :step_ms""",
    f"""UPDATE facts SET value = LEAST({_UNTIL} + :step_ms, :now_ms + {_FOR}) || ' ' || {_FOR}
        WHERE name = '{BARRED}' AND {_UNTIL} > :now_ms - :step_ms""",  # noqa: S608
)


def correct_ends(connection: Connection, steps: ClockSteps, step_ms: int) -> None:
    """The database's clock was set forward by at most so much, or, where this is 0, back."""
    for statement in _AFTER_STEP:
        connection.execute(statement, {"step_ms": step_ms, "now_ms": steps.most_now_ms})


class SharedLeases:
    """Implements `LeaseEnds`."""

    in_ram = None

    def __init__(self, steps: ClockSteps) -> None:
        self._steps = steps

    def within(self, rows: Rows) -> "LeaseRows":
        return LeaseRows(rows, self._steps)


class LeaseRows:
    """Implements `Ends`."""

    def __init__(self, rows: Rows, steps: ClockSteps) -> None:
        self._rows, self._steps = rows, steps

    def _left_ms(self, found: tuple[int, int] | None) -> int:
        """The time left of an end and a whole time, of which steps of the clock may have taken a part."""
        if found is None:
            return 0
        ends_ms, whole_ms = found
        steps = self._steps
        return max(ends_ms - steps.least_now_ms + int(steps.unseen_ms), whole_ms - steps.watched_ms)

    def grant(self, line: LineKey, token: LeaseToken, ttl_s: float) -> None:  # noqa: ARG002  its row has the token
        self._rows.later(_GRANT, now_ms=self._steps.most_now_ms, ttl_ms=int(ttl_s * 1000), **_of(line))

    def left_s(self, line: LineKey, token: LeaseToken, ttl_s: float) -> float:  # noqa: ARG002
        return max(self._left_ms(self._pair(_ENDS, **_of(line))), 0) / 1000

    def prolong_all(
        self,
        namespace: str,  # noqa: ARG002  the operation has it
        owner: str,
        kv_identity_hash: str,
        held: Sequence[HeldLease],
        ttl_s: float,
    ) -> RenewedLeases:
        about: dict[str, str | int] = {"kv_identity_hash": kv_identity_hash, "ttl_ms": int(ttl_s * 1000)}
        about["now_ms"] = self._steps.most_now_ms
        found = self._rows.all(_TO_PROLONG, agent_id=[each.agent_id for each in held], owner=owner, **about)
        is_wanted = {HeldLease(agent_id, generation): bool(wanted) for agent_id, generation, wanted in found}
        lost = tuple(each for each in held if each not in is_wanted)
        prolonged = [each.agent_id for each in held if each in is_wanted]
        self._rows.later(_PROLONG, agent_id=prolonged, **about)
        return RenewedLeases(lost, tuple(each for each in held if is_wanted.get(each)))

    def want(self, line: LineKey, *, takes_back: bool) -> bool:
        if takes_back:
            # While the next try of this waiter may still come, the lease goes to no other.
            self._rows.run(_BAR, until_ms=self._steps.most_now_ms + int(RETRY_S * 1000), **_of(line))
        return self._rows.run(_WANT, takes_back=takes_back, **_of(line)) > 0

    def bar_all(self, seconds: float) -> None:
        for_ms = int(seconds * 1000)
        set_fact(self._rows, BARRED, f"{self._steps.most_now_ms + for_ms} {for_ms}")

    def barred_s(self, line: LineKey) -> float:
        found, until_ms = self._pair(_OF_ALL), self._rows.number(_BARRED, **_of(line))
        all_ms = self._left_ms(found)
        if found is not None and all_ms <= 0:
            self._rows.run(f"DELETE FROM facts WHERE name = '{BARRED}'")  # noqa: S608  it is over for stores that start, too
        return max(all_ms, until_ms - self._steps.least_now_ms, 0) / 1000

    def _pair(self, sql: str, **values: str) -> tuple[int, int] | None:
        found = self._rows.one(sql, **values)
        return None if found is None else (int(found[0]), int(found[1]))

    def drop(self, line: LineKey) -> None:
        self._rows.later(f"UPDATE leases SET granted = 0 WHERE {_OF_LINE}", **_of(line))  # noqa: S608

    def taken_back(self, line: LineKey) -> None:
        self._rows.later(f"UPDATE leases SET barred_until_ms = 0 WHERE {_OF_LINE}", **_of(line))  # noqa: S608


def _of(line: LineKey) -> dict[str, str]:
    return {"agent_id": line.agent_id, "kv_identity_hash": line.kv_identity_hash}
