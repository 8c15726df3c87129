"""How a manifest becomes a version, in one transaction: did this commit already take effect? may this writer extend the
line? is the head the one it knows? are its blobs here, whole, and of these tokens? Else it is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvasir.errors import AlreadyExists
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.manifests import NamedBlob, SharedBlock, unfit
from cachestore_svc.facts.ownership import check_takes_copy
from cachestore_svc.facts.records import LineQuery, Origin, SnapshotVersion, named_version, wake_ms_of, with_wake
from cachestore_svc.index.refusals import head_moved, missing, unfit_blob
from cachestore_svc.index.sqlite import agents, blobs, provenance, versions
from cachestore_svc.index.sqlite.rights import leases, owners
from cachestore_svc.index.sqlite.rights.lease_ends import LeaseEnds
from cachestore_svc.index.sqlite.rows import Rows, RowsAhead, numbered_digests
from cachestore_svc.index.values import BlobEntry, Commit, Done

# SQLite joins in this order then, and looks each hash up. Else it reads all hashes of the namespace, and the list for
# each of them.
_BOUND = """FROM json_each(:block_hash) AS wanted CROSS JOIN prefixes CROSS JOIN blobs
    WHERE prefixes.namespace_id = :namespace AND prefixes.block_hash = wanted.value AND blobs.id = prefixes.blob_id"""


def commit_version(rows: Rows, asked: Commit, live: LeaseEnds, now_unix_ms: int) -> Done:
    """Make a manifest the line's next version. Raises Conflict, FailedPrecondition; see Store.commit."""
    (_, agent_id, kv_hash), terms = asked.line, asked.terms
    _look_ahead(RowsAhead(rows), asked)
    known = _known_part(rows, asked)
    found = _find_behind(rows, asked, known.length)
    manifest = _whole_manifest(found, asked.manifest)
    line, newest = versions.newest_line(rows, agent_id) or (None, None)
    head = newest.version if newest else 0
    if head > asked.parent_version and (repeated := _already_done(rows, asked, manifest)):
        return Done(repeated, is_new=False)
    _check_rights(rows, asked, live)
    # Its number may have been given to another memory than the one that the commit extends.
    if head != asked.parent_version or (newest and terms.parent_manifest not in (None, newest.manifest)):
        raise head_moved(head, asked.parent_version)
    named = _fitting_blobs(rows, found, asked.facts.named[known.length :])
    if known.length and any(blob.is_brought for blob in named):  # then known ones may have been computed on them
        known = versions.NOTHING_KNOWN
        named = _fitting_blobs(rows, _find_behind(rows, asked, 0), asked.facts.named)
    shared = _behind(asked.shared, known.length)
    old, bound = versions.old_versions(rows, asked.line, asked.default_retained), bound_now(rows, shared)
    # All is read: the writes go to a server with the next operation, or with the end of the transaction.
    agent = agents.make_agent(rows, agent_id, now_unix_ms)
    line_id = versions.used_line(rows, line, agent.id, kv_hash, now_unix_ms)
    marked, manifest = _with_provenance(rows, asked, newest, manifest, named)
    versions.hold_manifest(rows, manifest, asked.facts, named, known)
    made = head, manifest.id, int(terms.origin), terms.origin_detail, now_unix_ms
    versions.put_version(rows, "INSERT", line_id, head + 1, made)
    if terms.origin is Origin.TURN and asked.facts.wake_ms is not None:  # it lets go of KV that older versions keep
        retain(rows, replace(agent, retained_versions=1), line_id, asked.default_retained)
    else:
        versions.drop(rows, line_id, old)
    mine = {place: None if blob.id in marked else blob for place, blob in enumerate(named, known.length)}
    bind(rows, shared, mine, bound)
    return Done(_version_of(asked, manifest, now_unix_ms), is_new=True)


def _look_ahead(rows: RowsAhead, asked: Commit) -> None:
    """Send all reads with the next one."""
    (_, agent_id, kv_hash), terms = asked.line, asked.terms
    versions.newest_line(rows, agent_id)
    agents.find_agent(rows, agent_id)
    owners.ownership_of(rows, agent_id)
    leases.rows_of(rows, LineQuery(agent_id, kv_hash if terms.lease else None))
    versions.old_versions(rows, asked.line, asked.default_retained)
    if asked.facts.known_named:  # else it is the next one
        _find_behind(rows, asked, asked.facts.known_named)
    bound_now(rows, _behind(asked.shared, asked.facts.known_named))


def _known_part(rows: Rows, asked: Commit) -> versions.KnownPart:
    """The blobs of the manifest before it that the commit names, too; nothing where each must be looked at."""
    facts, count = asked.facts, asked.facts.known_named
    if not count:
        return versions.NOTHING_KNOWN
    return versions.known_part(rows, facts.parent, count, len(asked.shared) - len(_behind(asked.shared, count)))


def _behind(shared: Sequence[SharedBlock], known: int) -> Sequence[SharedBlock]:
    return [block for block in shared if block.place >= known] if known else shared


def _find_behind(rows: Rows, asked: Commit, known: int) -> dict[Digest, BlobEntry]:
    """The entries of the manifest, and of the blobs that it names behind the known ones."""
    return blobs.find_blobs(rows, [asked.manifest, *(need.digest for need in asked.facts.named[known:])])


def _with_provenance(
    rows: Rows, asked: Commit, newest: SnapshotVersion | None, manifest: BlobEntry, named: Sequence[BlobEntry]
) -> tuple[set[int], BlobEntry]:
    """Mark blobs that the commit makes brought: ids of those that had no mark, and the manifest with its mark."""
    terms = asked.terms
    comes_from_elsewhere = terms.is_brought or terms.origin in (Origin.IMPORT, Origin.PULL, Origin.MOVE)
    marked = {blob.id for blob in provenance.mark(rows, manifest, named, is_brought=comes_from_elsewhere)}
    is_brought = manifest.is_brought or int(manifest.id in marked)
    if is_brought == provenance.BROUGHT and _is_text_own(rows, asked, newest):
        provenance.mark_text_own(rows, manifest)
        is_brought = provenance.TEXT_OWN
    return marked, manifest._replace(is_brought=is_brought)


def _is_text_own(rows: Rows, asked: Commit, newest: SnapshotVersion | None) -> bool:
    """Whether the text of a brought memory is the agent's own: of a move by its source's word; of a turn if that of the
    version before it is, and that of an older one on which it goes on.
    """
    terms, query, followed = asked.terms, LineQuery(asked.line.agent_id), [newest]
    if terms.origin is not Origin.TURN:
        return terms.origin is Origin.MOVE and terms.is_text_own
    if newest is not None and terms.base_version not in (0, newest.version):
        line = versions.line_with(rows, query, terms.base_version)
        followed.append(versions.find_version(rows, line.id, terms.base_version))
    return all(each is not None and (each.is_text_own or not each.is_brought) for each in followed)


def _version_of(asked: Commit, manifest: BlobEntry, now_unix_ms: int) -> SnapshotVersion:
    """The version that a commit made, as it is read from now on."""
    facts, terms = asked.facts, asked.terms
    return SnapshotVersion(
        asked.line.agent_id,
        asked.line.kv_identity_hash,
        asked.parent_version + 1,
        asked.manifest,
        asked.parent_version,
        facts.tokens,
        now_unix_ms,
        versions.total_bytes(manifest, facts),
        terms.origin,
        terms.origin_detail,
        facts.request_id,
        bool(manifest.is_brought),
        manifest.is_brought == provenance.TEXT_OWN,
    )


def retain(rows: Rows, agent: agents.AgentRow, line_id: int, default_retained: int) -> None:
    """Let a line's oldest versions go. A pinned agent keeps all of its own."""
    if not agent.is_pinned:
        versions.retain(rows, line_id, agent.retained_versions or default_retained)


def bound_blobs(rows: Rows, kv_hash: str, block_hashes: Sequence[str]) -> dict[str, BlobEntry]:
    """Blobs by those of the block hashes that are bound to one which is whole and was not brought."""
    bound = f"""SELECT wanted.key, blobs.hash, blobs.size_bytes {_BOUND}
        AND blobs.kv_identity_hash = :kv_identity_hash AND NOT blobs.is_damaged AND blobs.is_brought = 0"""
    places = numbered_digests(rows, bound, block_hash=block_hashes, kv_identity_hash=kv_hash)
    digests = {block_hashes[place]: digest for place, digest in places}
    found = blobs.find_blobs(rows, digests.values())
    return {block_hash: found[digest] for block_hash, digest in digests.items() if digest in found}


def _whole_manifest(listed: Mapping[Digest, BlobEntry], digest: Digest) -> BlobEntry:
    found = listed.get(digest)
    if found is None:
        raise missing(digest, "manifest")
    if found.is_damaged:
        raise missing(digest, "manifest (damaged)")
    if found.kind != "manifest":
        raise unfit_blob(digest, f"kind: expected manifest, found {found.kind}")
    return found


def _already_done(rows: Rows, asked: Commit, manifest: BlobEntry) -> SnapshotVersion | None:
    line = versions.find_line(rows, asked.line)
    found = versions.find_version(rows, line.id, asked.parent_version + 1) if line else None
    if found is None or found.parent_version != asked.parent_version or found.manifest != manifest.digest:
        return None
    return found


def _check_rights(rows: Rows, asked: Commit, live: LeaseEnds) -> None:
    """The store's right, but for arrivals by a move; then the lease. Taking a memory back shuts out everybody."""
    terms = asked.terms
    if terms.origin is not Origin.MOVE:
        known = owners.ownership_of(rows, asked.line.agent_id)
        check_takes_copy(asked.line.agent_id, known, terms.owner_generation)
    if terms.lease is not None:
        leases.check_not_fenced(rows, asked.line, terms.lease)
    elif terms.origin is Origin.TURN:
        leases.check_not_held(rows, live, asked.line)


def _fitting_blobs(rows: Rows, found: Mapping[Digest, BlobEntry], needs: Sequence[NamedBlob]) -> list[BlobEntry]:
    """Rows of the manifest's blobs, in order. Raises FailedPrecondition for one that is missing or unfit."""
    for need in needs:
        row = found.get(need.digest)
        if row is None:
            raise missing(need.digest, f"{need.file.kind} at token {need.file.start}")
        if row.is_damaged:
            raise missing(need.digest, f"{need.file.kind} at token {need.file.start} (damaged)")
        if problem := _misfit(rows, row, need):
            raise unfit_blob(need.digest, problem)
    return [found[need.digest] for need in needs]


def _misfit(rows: Rows, row: BlobEntry, need: NamedBlob) -> str | None:
    chain, schema = rows.texts.names.keyed(need.file.chain), need.schema_hash
    expected = need.file.kind, need.file.kv_identity_hash, need.file.window, need.file.start, need.file.tokens, chain
    found = row.kind, row.kv_identity_hash, row.window, row.start, row.tokens, row.chain
    if found == expected and row.schema_hash == schema is not None:
        return None  # nearly always, for each block of a line: nothing is made of them
    if (file := row.file) is None:
        return f"kind: expected {need.file.kind}, found {row.kind}"
    return unfit(replace(need, file=replace(need.file, chain=chain)), file, row.schema_hash)


def bind(
    rows: Rows,
    shared: Sequence[SharedBlock],
    named: Mapping[int, BlobEntry | None],
    bound: Mapping[str, tuple[int, bool]],
) -> None:
    """Bind block hashes to blobs. The first binding of a hash stays, while its blob is here, undamaged and not brought.
    `named`: the manifest's blobs by their places, None for a blob that others may not find. Binding ends at the first
    None, and behind a hash that is bound to other bytes: the next blocks were computed on bytes that a reader would not
    find. `bound`: from `bound_now`.
    """
    for block in shared:
        blob = named[block.place]
        if blob is None or blob.is_brought or blob.is_damaged:
            return
        blob_id, is_kept = bound.get(block.block_hash, (0, False))
        if blob_id == blob.id:
            continue
        if is_kept:
            return
        rows.later(
            """INSERT INTO prefixes VALUES (:namespace, :block_hash, :blob) ON CONFLICT (namespace_id, block_hash)
                DO UPDATE SET blob_id = excluded.blob_id
                WHERE (SELECT is_damaged OR is_brought > 0 FROM blobs WHERE id = prefixes.blob_id)""",
            block_hash=block.block_hash,
            blob=blob.id,
        )


def bound_now(rows: Rows, shared: Sequence[SharedBlock]) -> dict[str, tuple[int, bool]]:
    """The blob to which the hash of each block is bound, and whether it stays bound, as a line's next version has most:
    the blob is undamaged and not brought."""
    bound = f"SELECT wanted.key, blobs.id, NOT blobs.is_damaged AND blobs.is_brought = 0 {_BOUND}"
    hashes = [block.block_hash for block in shared]
    found = rows.all(bound, block_hash=hashes) if shared else []
    return {hashes[place]: (int(blob), bool(is_kept)) for place, blob, is_kept in found}


def fork_agent(
    rows: Rows, source: LineQuery, agent_id: str, version: int | None, now_unix_ms: int
) -> list[SnapshotVersion]:
    """The first versions of a new agent's lines: of each of the source's lines the newest, in their order, or that one.
    Raises NotFound, AlreadyExists, InvalidArgument.
    """
    lines = versions.lines_of(rows, agents.get_row(rows, source.agent_id).id)
    if source.kv_identity_hash is not None:
        lines = [versions.get_line(rows, source)]
    if version is not None:
        lines = [versions.line_with(rows, source, version)]
    if agents.find_agent(rows, agent_id):
        raise AlreadyExists(f"agent {agent_id!r} exists", reason="AGENT_EXISTS", metadata={"agent_id": agent_id})
    agent = agents.make_agent(rows, agent_id, now_unix_ms)
    return [_fork_line(rows, agent.id, line, version, now_unix_ms) for line in reversed(lines)]


def roll_back(
    rows: Rows, query: LineQuery, version: int, expected_head: int | None, default_retained: int, now_unix_ms: int
) -> SnapshotVersion:
    """A new newest version that is an old one. Raises NotFound, Conflict, InvalidArgument."""
    agent = agents.get_row(rows, query.agent_id)
    line = versions.line_with(rows, query, version)
    old = versions.get_version(rows, line, version)
    head = versions.newest_number(rows, line.id)
    if expected_head is not None and expected_head != head:
        raise head_moved(head, expected_head)
    manifest_id = versions.manifest_id_of(rows, line.id, old.version)
    made = head, manifest_id, Origin.ROLLBACK, with_wake(named_version(version), wake_ms_of(old.origin_detail))
    added = versions.add_version(rows, line.id, *made, now_unix_ms)
    versions.touch(rows, line.id, now_unix_ms)
    retain(rows, agent, line.id, default_retained)
    return added


def _fork_line(
    rows: Rows, agent_id: int, source: versions.Line, version: int | None, now_unix_ms: int
) -> SnapshotVersion:
    old = versions.get_version(rows, source, version)
    line_id = versions.make_line(rows, agent_id, source.kv_identity_hash, now_unix_ms)
    manifest_id = versions.manifest_id_of(rows, source.id, old.version)
    detail = with_wake(f"{old.agent_id} version {old.version}", wake_ms_of(old.origin_detail))
    made = 0, manifest_id, Origin.FORK, detail
    return versions.add_version(rows, line_id, *made, now_unix_ms)
