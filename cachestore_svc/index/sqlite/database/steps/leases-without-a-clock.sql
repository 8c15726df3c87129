-- How long a lease holds is counted in memory: a clock that is set must not end or prolong it.
ALTER TABLE leases RENAME COLUMN expires_unix_ms TO ttl_ms;

ALTER TABLE leases ADD COLUMN is_released INTEGER NOT NULL DEFAULT 0;

UPDATE leases SET is_released = ttl_ms = 0, ttl_ms = 30000;
