"""The ends of leases as columns of their rows, by the database's clock: every store that has the database knows them,
and a restart forgets none.
"""

from collections.abc import Sequence

from kvasir.waits import RETRY_S

from cachestore_svc.facts.records import HeldLease, LeaseToken, LineKey, RenewedLeases
from cachestore_svc.index.sqlite.events import set_fact
from cachestore_svc.index.sqlite.rows import Rows

BARRED = "leases_barred_until_ms"  # the fact
_OF_LINE = "namespace_id = :namespace AND agent_name = :agent_id AND kv_identity_hash = :kv_identity_hash"
# `granted` is the generation that the other columns are about: they mean nothing for a lease of another one.
_GRANT = f"""UPDATE leases SET
    ends_ms = GREATEST(now_ms() + :ttl_ms, CASE WHEN granted = generation THEN ends_ms ELSE 0 END),
    is_wanted = is_wanted AND granted = generation, is_taken_back = is_taken_back AND granted = generation,
    granted = generation, barred_until_ms = 0 WHERE {_OF_LINE}"""  # noqa: S608
_LEFT = f"SELECT ends_ms - now_ms() FROM leases WHERE {_OF_LINE} AND granted = generation"  # noqa: S608
_AMONG = """namespace_id = :namespace AND kv_identity_hash = :kv_identity_hash
    AND agent_name IN (SELECT value FROM json_each(:agent_id))"""
_TO_PROLONG = f"""SELECT agent_name AS agent_id, generation, is_wanted FROM leases WHERE {_AMONG} AND owner = :owner
    AND granted = generation AND ends_ms > now_ms() AND NOT is_taken_back AND ttl_ms >= :ttl_ms"""  # noqa: S608
_PROLONG = f"UPDATE leases SET ends_ms = GREATEST(ends_ms, now_ms() + :ttl_ms) WHERE {_AMONG}"  # noqa: S608
_WANT = f"""UPDATE leases SET is_wanted = TRUE, is_taken_back = :takes_back WHERE {_OF_LINE}
    AND granted = generation AND NOT is_taken_back AND (:takes_back OR NOT is_wanted)"""  # noqa: S608
_BAR = f"UPDATE leases SET barred_until_ms = now_ms() + :for_ms WHERE {_OF_LINE}"  # noqa: S608
_BARRED = f"""SELECT GREATEST((SELECT barred_until_ms FROM leases WHERE {_OF_LINE}),
    (SELECT value::bigint FROM facts WHERE name = '{BARRED}'), 0) - now_ms()"""  # noqa: S608


class SharedLeases:
    """Implements `LeaseEnds`."""

    in_ram = None

    def within(self, rows: Rows) -> "LeaseRows":
        return LeaseRows(rows)


class LeaseRows:
    """Implements `Ends`."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def grant(self, line: LineKey, token: LeaseToken, ttl_s: float) -> None:  # noqa: ARG002  its row has the token
        self._rows.run(_GRANT, ttl_ms=int(ttl_s * 1000), **_of(line))

    def left_s(self, line: LineKey, token: LeaseToken, ttl_s: float) -> float:  # noqa: ARG002
        return max(self._rows.number(_LEFT, **_of(line)), 0) / 1000

    def prolong_all(
        self,
        namespace: str,  # noqa: ARG002  the operation has it
        owner: str,
        kv_identity_hash: str,
        held: Sequence[HeldLease],
        ttl_s: float,
    ) -> RenewedLeases:
        ttl_ms, about = int(ttl_s * 1000), {"kv_identity_hash": kv_identity_hash}
        asked = [each.agent_id for each in held]
        found = self._rows.all(_TO_PROLONG, agent_id=asked, owner=owner, ttl_ms=ttl_ms, **about)
        is_wanted = {HeldLease(agent_id, generation): bool(wanted) for agent_id, generation, wanted in found}
        lost = tuple(each for each in held if each not in is_wanted)
        prolonged = [each.agent_id for each in held if each in is_wanted]
        self._rows.run(_PROLONG, agent_id=prolonged, ttl_ms=ttl_ms, **about)
        return RenewedLeases(lost, tuple(each for each in held if is_wanted.get(each)))

    def want(self, line: LineKey, *, takes_back: bool) -> bool:
        if takes_back:
            # While the next try of this waiter may still come, the lease goes to no other.
            self._rows.run(_BAR, for_ms=int(RETRY_S * 1000), **_of(line))
        return self._rows.run(_WANT, takes_back=takes_back, **_of(line)) > 0

    def bar_all(self, seconds: float) -> None:
        until = self._rows.number("SELECT now_ms() + :for_ms", for_ms=int(seconds * 1000))
        set_fact(self._rows, BARRED, str(until))

    def barred_s(self, line: LineKey) -> float:
        return max(self._rows.number(_BARRED, **_of(line)), 0) / 1000

    def drop(self, line: LineKey) -> None:
        self._rows.run(f"UPDATE leases SET granted = 0 WHERE {_OF_LINE}", **_of(line))  # noqa: S608

    def taken_back(self, line: LineKey) -> None:
        self._rows.run(f"UPDATE leases SET barred_until_ms = 0 WHERE {_OF_LINE}", **_of(line))  # noqa: S608


def _of(line: LineKey) -> dict[str, str]:
    return {"agent_id": line.agent_id, "kv_identity_hash": line.kv_identity_hash}
