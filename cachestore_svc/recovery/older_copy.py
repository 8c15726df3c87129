"""Whether a data directory is an older copy of what last ran at its place. Its owner may accept it: a backup is one."""

from datetime import UTC, datetime

import structlog
from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.journal import journal, last_run
from cachestore_svc.journal.journal import Journal
from cachestore_svc.journal.journal_lines import Position


def check_newest(config: StoreConfig, store: str, position: Position, disk: Disk) -> None:
    """Raises FailedPrecondition (INDEX_BEHIND) unless the directory holds the noted commit, or is accepted."""
    if config.last_runs_dir is None:
        return
    try:
        noted = last_run.read(last_run.place(config.last_runs_dir, config.data_dir, store))
    except OSError:
        return
    if noted is None or _holds(config, position, noted.position, disk):
        return
    words = (
        f"the data directory {config.data_dir} is older than what last ran there, or has another history: it ends with "
        f"commit {position.sequence} and its newest memory is {_newest_memory(config, disk)}, but commit "
        f"{noted.sequence} was written at {_time(noted.unix_ms)}"
    )
    if not config.accept_older:
        advice = "if you put an older copy back on purpose, start once with --accept-older"
        raise FailedPrecondition(f"{words}; {advice}", reason="INDEX_BEHIND")
    structlog.get_logger("cachestore").warning("older.accepted", why=words)


def note_commits(config: StoreConfig, log: Journal, now_unix_ms: last_run.Clock) -> None:
    """Note how far the journal is, and each commit from now on. Where no note can be kept, a log line reports it."""
    if config.last_runs_dir is None:
        return
    try:
        log.last_run = last_run.LastRun(config.last_runs_dir, config.data_dir, log.store, now_unix_ms)
    except OSError as error:
        structlog.get_logger("cachestore").warning("last_run.not_noted", why=error.strerror or str(error))
        return
    log.last_run.begin(log.position)


def _holds(config: StoreConfig, position: Position, noted: Position, disk: Disk) -> bool:
    """Whether a history that ends at `position` has the noted commit, as far as the journal goes back."""
    if position.sequence <= noted.sequence:
        return position == noted
    # After a loss of power, or a time without notes. A journal that is damaged, or begins later, proves nothing.
    found = journal.read(config.data_dir / journal.NAME, disk, until=noted)
    is_told = found is not None and found.base_sequence <= noted.sequence <= found.position.sequence
    return found is None or not is_told or found.position == noted


def _newest_memory(config: StoreConfig, disk: Disk) -> str:
    found = journal.read(config.data_dir / journal.NAME, disk)
    agents = [agent for space in found.state.values() for agent in space.agents.values()] if found else []
    made = [version.created_unix_ms for agent in agents for version in agent.versions.values()]
    return f"of {_time(max(made))}" if made else "unknown"


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
