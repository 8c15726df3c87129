-- So that a quota holds for all stores that have the database: each change of blobs counts in its own transaction.
CREATE TABLE stored (
    namespace_id BIGINT PRIMARY KEY REFERENCES namespaces (id),
    bytes BIGINT NOT NULL
);

INSERT INTO stored SELECT namespace_id, SUM(size_bytes) FROM blobs GROUP BY namespace_id;

CREATE FUNCTION count_stored() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO kvasir.stored AS counted
        SELECT namespace_id, TG_ARGV[0]::bigint * SUM(size_bytes) FROM changed GROUP BY namespace_id
        ON CONFLICT (namespace_id) DO UPDATE SET bytes = counted.bytes + excluded.bytes;
    RETURN NULL;
END $$;

CREATE TRIGGER count_listed AFTER INSERT ON blobs REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION count_stored('1');

CREATE TRIGGER count_unlisted AFTER DELETE ON blobs REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION count_stored('-1');
