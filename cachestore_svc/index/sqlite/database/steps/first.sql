-- What the store knows of itself: incarnation of its history, inode of the database that it was written in.
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE namespaces (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    last_event INTEGER NOT NULL DEFAULT 0
);

-- Names, types and shapes of tensor files; a few per KV identity, shared by all its blobs.
CREATE TABLE schemas (hash TEXT PRIMARY KEY, tensors TEXT NOT NULL) WITHOUT ROWID;

-- Ids are never used again, so that no reference can come to mean another blob. What a tensor file's header has
-- (kv_identity_hash to schema_hash) is NULL for a manifest.
CREATE TABLE blobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    hash TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('manifest', 'block', 'tail', 'state')),
    kv_identity_hash TEXT,
    start INTEGER,
    tokens INTEGER,
    chain TEXT,
    schema_hash TEXT REFERENCES schemas (hash),
    created_unix_ms INTEGER NOT NULL,
    promised_unix_ms INTEGER NOT NULL DEFAULT 0,
    marked_unix_ms INTEGER,
    is_damaged INTEGER NOT NULL DEFAULT 0,
    UNIQUE (namespace_id, hash)
);

CREATE INDEX blobs_by_mark ON blobs (namespace_id, marked_unix_ms) WHERE marked_unix_ms IS NOT NULL;

CREATE INDEX blobs_damaged ON blobs (namespace_id) WHERE is_damaged;

CREATE INDEX blobs_by_schema ON blobs (schema_hash);

CREATE TABLE agents (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    name TEXT NOT NULL,
    is_pinned INTEGER NOT NULL DEFAULT 0,
    retained_versions INTEGER,
    created_unix_ms INTEGER NOT NULL,
    UNIQUE (namespace_id, name)
);

CREATE TABLE labels (
    agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (agent_id, name)
) WITHOUT ROWID;

CREATE TABLE lines (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
    kv_identity_hash TEXT NOT NULL,
    used_unix_ms INTEGER NOT NULL,
    UNIQUE (agent_id, kv_identity_hash)
);

-- A manifest has a row here while some version is it; what it names has rows in manifest_blobs. Those rows are the
-- reference counts: none is stored, so none can disagree.
CREATE TABLE manifests (
    blob_id INTEGER PRIMARY KEY REFERENCES blobs (id),
    token_count INTEGER NOT NULL,
    total_bytes INTEGER NOT NULL,
    request_id TEXT NOT NULL
);

CREATE TABLE manifest_blobs (
    manifest_id INTEGER NOT NULL REFERENCES manifests (blob_id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    blob_id INTEGER NOT NULL REFERENCES blobs (id),
    PRIMARY KEY (manifest_id, position)
) WITHOUT ROWID;

CREATE INDEX manifest_blobs_by_blob ON manifest_blobs (blob_id);

CREATE TABLE versions (
    line_id INTEGER NOT NULL REFERENCES lines (id) ON DELETE CASCADE,
    version INTEGER NOT NULL,
    parent_version INTEGER NOT NULL,
    manifest_id INTEGER NOT NULL REFERENCES manifests (blob_id),
    origin INTEGER NOT NULL,
    origin_detail TEXT NOT NULL,
    created_unix_ms INTEGER NOT NULL,
    PRIMARY KEY (line_id, version)
) WITHOUT ROWID;

CREATE INDEX versions_by_manifest ON versions (manifest_id);

-- What was computed -> which bytes.
CREATE TABLE prefixes (
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    block_hash TEXT NOT NULL,
    blob_id INTEGER NOT NULL REFERENCES blobs (id) ON DELETE CASCADE,
    PRIMARY KEY (namespace_id, block_hash)
) WITHOUT ROWID;

CREATE INDEX prefixes_by_blob ON prefixes (blob_id);

-- By name, not by line: a lease may come before the first version, and its generation outlives the agent.
CREATE TABLE leases (
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    agent_name TEXT NOT NULL,
    kv_identity_hash TEXT NOT NULL,
    owner TEXT NOT NULL,
    generation INTEGER NOT NULL,
    expires_unix_ms INTEGER NOT NULL,
    PRIMARY KEY (namespace_id, agent_name, kv_identity_hash)
) WITHOUT ROWID;

CREATE TABLE events (
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    sequence INTEGER NOT NULL,
    at_unix_ms INTEGER NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (namespace_id, sequence)
) WITHOUT ROWID;
