"""Orders to give an agent to a peer, as rows of `jobs`: each store that has the database knows those of the others. An
order that nobody renews ends by the database's clock.
"""

from kvasir.waits import SILENCE_S

from cachestore_svc.index.sqlite.rows import Rows

_AGENT = ":namespace || ' ' || :peer || ' ' || :agent_id"
_NAME = f"'order ' || :name || ' ' || {_AGENT}"
_GIVE = f"""INSERT INTO jobs VALUES ({_NAME}, 0, now_ms() + {SILENCE_S * 1000:.0f})
    ON CONFLICT (name) DO UPDATE SET ends_ms = excluded.ends_ms"""  # noqa: S608
_END = f"DELETE FROM jobs WHERE name = {_NAME} OR (name LIKE 'order %' AND ends_ms <= now_ms())"  # noqa: S608
_COUNT = f"""SELECT COUNT(*) FROM jobs WHERE name LIKE 'order %' AND ends_ms > now_ms()
    AND substr(name, 7 + strpos(substr(name, 7), ' ')) = {_AGENT}"""  # noqa: S608


def give_order(rows: Rows, agent_id: str, peer: str, number: str) -> None:
    """`number`: without blanks. A second time it prolongs the order."""
    rows.run(_GIVE, agent_id=agent_id, peer=peer, name=number)


def end_order(rows: Rows, agent_id: str, peer: str, number: str) -> None:
    rows.run(_END, agent_id=agent_id, peer=peer, name=number)


def has_order(rows: Rows, agent_id: str, peer: str) -> bool:
    return rows.number(_COUNT, agent_id=agent_id, peer=peer) > 0
