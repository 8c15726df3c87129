-- The one clock of all stores that have the database. A test may put another one in its place.
CREATE FUNCTION now_ms() RETURNS BIGINT LANGUAGE SQL VOLATILE
    AS 'SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint';

ALTER TABLE leases ADD granted BIGINT NOT NULL DEFAULT 0, ADD ends_ms BIGINT NOT NULL DEFAULT 0;

ALTER TABLE leases ADD is_wanted BOOLEAN NOT NULL DEFAULT FALSE, ADD is_taken_back BOOLEAN NOT NULL DEFAULT FALSE;

ALTER TABLE leases ADD barred_until_ms BIGINT NOT NULL DEFAULT 0;

-- How long each had still to go was in the RAM of the store before.
UPDATE leases SET granted = generation, ends_ms = now_ms() + ttl_ms WHERE NOT is_released;
