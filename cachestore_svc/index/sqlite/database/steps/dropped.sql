-- Which versions an agent had that are not kept any more.
CREATE TABLE dropped (
    agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
    manifest_hash TEXT NOT NULL,
    version INTEGER NOT NULL,
    origin INTEGER NOT NULL,
    PRIMARY KEY (agent_id, manifest_hash)
) WITHOUT ROWID;
