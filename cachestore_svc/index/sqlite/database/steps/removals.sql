-- Which object of a bucket has a blob's bytes, and which are being removed.
ALTER TABLE blobs ADD COLUMN edition INTEGER NOT NULL DEFAULT 0;

CREATE TABLE removals (
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    hash TEXT NOT NULL,
    edition INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    since_unix_ms INTEGER NOT NULL,
    removed_unix_ms INTEGER,
    PRIMARY KEY (namespace_id, hash, edition)
) WITHOUT ROWID;
