-- `shared_as`: facts that stores have in common which have the database at a time; NULL for a store that is alone.
-- `session`: the server's process of its session with the lock, and when that began: another process may have the
-- number later.
ALTER TABLE writers ADD shared_as TEXT, ADD session TEXT NOT NULL DEFAULT '', ADD name TEXT NOT NULL DEFAULT '';

ALTER TABLE writers ADD seen_ms BIGINT NOT NULL DEFAULT 0;

CREATE TABLE jobs (name TEXT COLLATE "C" PRIMARY KEY, epoch BIGINT NOT NULL, ends_ms BIGINT NOT NULL);

-- A hint for the other stores' watchers, sent with the commit.
CREATE FUNCTION report_event() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_notify('kvasir_events', name) FROM kvasir.namespaces WHERE id = NEW.namespace_id;
    RETURN NULL;
END $$;

CREATE TRIGGER report_events AFTER INSERT ON events FOR EACH ROW EXECUTE FUNCTION report_event();
