-- How long an agent was not used, counted by sweeps. `used`: its uses as the last sweep saw them.
CREATE TABLE unused (
    agent_id INTEGER PRIMARY KEY REFERENCES agents (id) ON DELETE CASCADE,
    used TEXT NOT NULL,
    unused_ms INTEGER NOT NULL
);
