-- Bytes of blobs that were written, by day (UTC, counted from 1970).
CREATE TABLE written (
    day INTEGER NOT NULL,
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    bytes INTEGER NOT NULL,
    PRIMARY KEY (day, namespace_id)
) WITHOUT ROWID;
