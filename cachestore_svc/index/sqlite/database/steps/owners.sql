-- Which store owns an agent; by name, because the fact outlives the agent. No row: this one.
CREATE TABLE owners (
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    agent_name TEXT NOT NULL,
    state INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    peer TEXT NOT NULL,
    move_id TEXT NOT NULL,
    since_unix_ms INTEGER NOT NULL,
    was_owned INTEGER NOT NULL,
    tells TEXT NOT NULL,
    PRIMARY KEY (namespace_id, agent_name)
) WITHOUT ROWID;
