"""The transaction that an operation gets: the catalog's verbs, which are functions of `Rows` beside their tables."""

from collections.abc import Callable

from cachestore_svc.index.sqlite import agents, blobs, committing, events, garbage, removals, statistics, versions
from cachestore_svc.index.sqlite.journaling import applying, index_state
from cachestore_svc.index.sqlite.rights import leases, owners
from cachestore_svc.index.sqlite.rows import Connection, Rows
from cachestore_svc.sealing.sealed_names import PLAIN_NAMES, PlainNames


class CatalogView(Rows):
    """What an operation may read. A namespace that holds nothing answers as an empty one."""

    namespaces = blobs.namespaces
    stored_bytes = blobs.stored_bytes
    counted_bytes = blobs.counted_bytes
    find_blob = blobs.find_blob
    find_blobs = blobs.find_blobs
    entries_of = blobs.entries_of
    has_hash = blobs.has_hash
    listed_hashes = blobs.listed_hashes
    all_hashes = blobs.all_hashes
    hashes_of = blobs.hashes_of
    whole_blobs = blobs.whole_blobs
    damaged_blobs = blobs.damaged_blobs
    blobs_after = blobs.blobs_after
    free_editions = removals.free_editions
    waiting_removals = removals.waiting_removals

    get_agent = agents.get_agent
    agents_after = agents.agents_after
    held_digests = agents.held_digests
    usage_of = agents.usage_of

    bound_blobs = committing.bound_blobs

    get_snapshot = versions.get_snapshot
    newest_of = versions.newest_of
    snapshots_after = versions.snapshots_after
    has_had = versions.has_had
    named_after = versions.named_after
    is_held = versions.is_held
    held_manifests = versions.held_manifests
    used_last = versions.used_last
    names_others = versions.names_others

    count_unheld = garbage.count_unheld
    rested = garbage.rested

    held_leases = leases.held_leases
    unreleased_leases = leases.unreleased_leases
    longest_lease_ms = leases.longest_lease_ms

    ownership_of = owners.ownership_of
    unfinished_moves = owners.unfinished_moves
    count_owners = owners.count_owners
    owners = owners.all_owners

    events_after = events.events_after
    fact = events.fact

    sums_of_agents = statistics.sums_of_agents
    sums_of_blobs = statistics.sums_of_blobs
    counts = statistics.counts
    written = statistics.written

    journal_position = index_state.journal_position
    state = index_state.state
    state_anyway = index_state.state_anyway
    namespaces_anyway = index_state.namespaces_anyway
    has_tables = index_state.has_tables
    is_too_new = index_state.is_too_new
    wrong_indexes = index_state.wrong_indexes
    problems = index_state.problems


class CatalogChange(CatalogView):
    """What an operation may read and write. Nothing of it is visible before all of it is durable."""

    def __init__(self, connection: Connection, namespace: str = "", names: PlainNames = PLAIN_NAMES) -> None:
        super().__init__(connection, namespace, names)
        self.after_commit_actions: list[Callable[[], None]] = []

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` on the catalog's thread once the operation is durable; it must be quick and must not raise."""
        self.after_commit_actions.append(action)

    add_blobs = blobs.add_blobs
    promise = blobs.promise
    set_damaged = blobs.set_damaged
    add_editions = removals.add_editions
    condemn = removals.condemn
    end_removals = removals.end_removals
    free_names = removals.free_names
    leave_objects = removals.leave_objects

    update_agent = agents.update_agent
    forget_agent = agents.forget_agent
    count_unused = agents.count_unused

    commit_version = committing.commit_version
    fork_agent = committing.fork_agent
    roll_back = committing.roll_back

    use_line = versions.use_line
    hold_again = versions.hold_again

    mark_unheld = garbage.mark_unheld
    unlist = garbage.unlist
    remove_unused_schemas = garbage.remove_unused_schemas
    evict = garbage.evict

    acquire_lease = leases.acquire_lease
    renew_lease = leases.renew_lease
    release_lease = leases.release_lease
    fence_leases = leases.fence_leases
    fence_all_leases = leases.fence_all_leases
    set_lease_floor = leases.set_lease_floor

    set_ownership = owners.set_ownership

    add_events = events.add_events
    set_fact = events.set_fact

    count_written = statistics.count_written

    apply_changes = applying.apply_changes
    fence_changes = applying.fence_changes
    hold_version = applying.hold_version

    set_journal_position = index_state.set_journal_position
