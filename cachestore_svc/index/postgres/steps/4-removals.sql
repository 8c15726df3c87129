ALTER TABLE blobs ADD COLUMN edition BIGINT NOT NULL DEFAULT 0;

CREATE TABLE removals (
    namespace_id BIGINT NOT NULL REFERENCES namespaces (id),
    hash TEXT COLLATE "C" NOT NULL,
    edition BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL,
    since_unix_ms BIGINT NOT NULL,
    removed_unix_ms BIGINT,
    PRIMARY KEY (namespace_id, hash, edition)
);
