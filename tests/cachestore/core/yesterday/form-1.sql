BEGIN TRANSACTION;
CREATE TABLE agents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        name TEXT NOT NULL,
        is_pinned INTEGER NOT NULL DEFAULT 0,
        retained_versions INTEGER,
        created_unix_ms INTEGER NOT NULL,
        UNIQUE (namespace_id, name)
    );
INSERT INTO "agents" VALUES(1,1,'a',0,NULL,1800000000000);
CREATE TABLE blobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        hash TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('manifest', 'block', 'tail', 'state')),
        kv_identity_hash TEXT,
        start INTEGER,
        tokens INTEGER,
        chain TEXT,
        schema_hash TEXT REFERENCES schemas (hash),
        created_unix_ms INTEGER NOT NULL,
        promised_unix_ms INTEGER NOT NULL DEFAULT 0,
        marked_unix_ms INTEGER,
        is_damaged INTEGER NOT NULL DEFAULT 0,
        UNIQUE (namespace_id, hash)
    );
INSERT INTO "blobs" VALUES(1,1,'501279dbc3b3c959400f53357f85324fca93f8a586d9e142c52728ef4df55b1c',19200,'block','5a0194376e47b3dfe19ce5346ada2623c3940c696e5942bb1f9c55a1a4d47912',0,256,'6fc5cee3c842c6e5607dbd094d3cf3db3a1d5d6f5eeb3e3e36af89c557908e15','f0dd562fb5f8b8578c97cf2b091a7d05eae63adb967c09057cced6580a8df312',1800000000000,0,NULL,0);
INSERT INTO "blobs" VALUES(2,1,'1f7060c12233b101bd79a4f177f822f02fde847386a4bd20c75131f4d8720e22',3936,'tail','5a0194376e47b3dfe19ce5346ada2623c3940c696e5942bb1f9c55a1a4d47912',256,44,'5ca5fae223b7265c2ddaa1c4ca5b6f7be97c101d4d6917489ab9993e1479c8cb','f458d943e63bb3bc24010051fcdc28abc7de3d940f6be79f42db40ed1b9ea7df',1800000000000,0,NULL,0);
INSERT INTO "blobs" VALUES(3,1,'62e1aed8665d74a8af39ab391bf81dd87ce57a97519fb785e65d83928578f176',2615,'manifest',NULL,NULL,NULL,NULL,NULL,1800000000000,0,NULL,0);
INSERT INTO "blobs" VALUES(4,1,'aba96e2fc8ed0771ee116409498a1a58636352b66eccc064fc3961116ab3240a',6096,'tail','5a0194376e47b3dfe19ce5346ada2623c3940c696e5942bb1f9c55a1a4d47912',256,74,'a6a7390f969bb77295b9fe648b68e3107bbfe4769634516e41c3b341e8e2314a','1654262ca8f7a885e1a8734643ca7a8d292c6d4a92660fde0d0f0427dbc4d9a4',1800000000000,0,NULL,0);
INSERT INTO "blobs" VALUES(5,1,'b2d99d16c5056aa9246bfefdc9f6de6992c7b6a0cc8ed962734837886fd26cec',2912,'manifest',NULL,NULL,NULL,NULL,NULL,1800000000000,0,NULL,0);
CREATE TABLE events (
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        sequence INTEGER NOT NULL,
        at_unix_ms INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (namespace_id, sequence)
    ) WITHOUT ROWID;
INSERT INTO "events" VALUES(1,1,1800000000000,'{"event":"Committed","snapshot":{"agent_id":"a","kv_identity_hash":"5a0194376e47b3dfe19ce5346ada2623c3940c696e5942bb1f9c55a1a4d47912","version":1,"manifest":{"hash":"62e1aed8665d74a8af39ab391bf81dd87ce57a97519fb785e65d83928578f176","size_bytes":2615},"parent_version":0,"token_count":300,"created_unix_ms":1800000000000,"total_bytes":25751,"origin":1,"origin_detail":"","request_id":"request-1-1"}}');
INSERT INTO "events" VALUES(1,2,1800000000000,'{"event":"Committed","snapshot":{"agent_id":"a","kv_identity_hash":"5a0194376e47b3dfe19ce5346ada2623c3940c696e5942bb1f9c55a1a4d47912","version":2,"manifest":{"hash":"b2d99d16c5056aa9246bfefdc9f6de6992c7b6a0cc8ed962734837886fd26cec","size_bytes":2912},"parent_version":1,"token_count":330,"created_unix_ms":1800000000000,"total_bytes":28208,"origin":1,"origin_detail":"","request_id":"request-1-2"}}');
INSERT INTO "events" VALUES(1,3,1800000000000,'{"event":"AgentUpdated","agent_id":"a"}');
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "facts" VALUES('incarnation','f6fc42039fba3776');
INSERT INTO "facts" VALUES('inode','9988641');
CREATE TABLE labels (
        agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (agent_id, name)
    ) WITHOUT ROWID;
INSERT INTO "labels" VALUES(1,'made','yesterday');
CREATE TABLE leases (
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        agent_name TEXT NOT NULL,
        kv_identity_hash TEXT NOT NULL,
        owner TEXT NOT NULL,
        generation INTEGER NOT NULL,
        expires_unix_ms INTEGER NOT NULL,
        PRIMARY KEY (namespace_id, agent_name, kv_identity_hash)
    ) WITHOUT ROWID;
INSERT INTO "leases" VALUES(1,'a','0000000000000000000000000000000000000000000000000000000000000000','engine',1,1800000010000);
CREATE TABLE lines (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
        kv_identity_hash TEXT NOT NULL,
        used_unix_ms INTEGER NOT NULL,
        UNIQUE (agent_id, kv_identity_hash)
    );
INSERT INTO "lines" VALUES(1,1,'5a0194376e47b3dfe19ce5346ada2623c3940c696e5942bb1f9c55a1a4d47912',1800000000000);
CREATE TABLE manifest_blobs (
        manifest_id INTEGER NOT NULL REFERENCES manifests (blob_id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        blob_id INTEGER NOT NULL REFERENCES blobs (id),
        PRIMARY KEY (manifest_id, position)
    ) WITHOUT ROWID;
INSERT INTO "manifest_blobs" VALUES(3,0,1);
INSERT INTO "manifest_blobs" VALUES(5,0,1);
INSERT INTO "manifest_blobs" VALUES(3,1,2);
INSERT INTO "manifest_blobs" VALUES(5,1,4);
CREATE TABLE manifests (
        blob_id INTEGER PRIMARY KEY REFERENCES blobs (id),
        token_count INTEGER NOT NULL,
        total_bytes INTEGER NOT NULL,
        request_id TEXT NOT NULL
    );
INSERT INTO "manifests" VALUES(3,300,25751,'request-1-1');
INSERT INTO "manifests" VALUES(5,330,28208,'request-1-2');
CREATE TABLE "migrations" (
   "number" INTEGER PRIMARY KEY,
   "applied_unix_ms" INTEGER
);
INSERT INTO "migrations" VALUES(1,1800000000000);
CREATE TABLE namespaces (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        last_event INTEGER NOT NULL DEFAULT 0
    );
INSERT INTO "namespaces" VALUES(1,'default',3);
CREATE TABLE prefixes (
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        block_hash TEXT NOT NULL,
        blob_id INTEGER NOT NULL REFERENCES blobs (id) ON DELETE CASCADE,
        PRIMARY KEY (namespace_id, block_hash)
    ) WITHOUT ROWID;
INSERT INTO "prefixes" VALUES(1,'9a645368958702f3ad65b662e608d6e538c2c3dd186f6052bf6812941d3c1fe8',1);
CREATE TABLE schemas (hash TEXT PRIMARY KEY, tensors TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "schemas" VALUES('1654262ca8f7a885e1a8734643ca7a8d292c6d4a92660fde0d0f0427dbc4d9a4','[["layer_0_k_weights","U32",1,74,8],["layer_0_k_scales","F16",1,74,1],["layer_0_k_biases","F16",1,74,1],["layer_0_v_weights","U32",1,74,8],["layer_0_v_scales","F16",1,74,1],["layer_0_v_biases","F16",1,74,1]]');
INSERT INTO "schemas" VALUES('f0dd562fb5f8b8578c97cf2b091a7d05eae63adb967c09057cced6580a8df312','[["layer_0_k_weights","U32",1,256,8],["layer_0_k_scales","F16",1,256,1],["layer_0_k_biases","F16",1,256,1],["layer_0_v_weights","U32",1,256,8],["layer_0_v_scales","F16",1,256,1],["layer_0_v_biases","F16",1,256,1]]');
INSERT INTO "schemas" VALUES('f458d943e63bb3bc24010051fcdc28abc7de3d940f6be79f42db40ed1b9ea7df','[["layer_0_k_weights","U32",1,44,8],["layer_0_k_scales","F16",1,44,1],["layer_0_k_biases","F16",1,44,1],["layer_0_v_weights","U32",1,44,8],["layer_0_v_scales","F16",1,44,1],["layer_0_v_biases","F16",1,44,1]]');
CREATE TABLE versions (
        line_id INTEGER NOT NULL REFERENCES lines (id) ON DELETE CASCADE,
        version INTEGER NOT NULL,
        parent_version INTEGER NOT NULL,
        manifest_id INTEGER NOT NULL REFERENCES manifests (blob_id),
        origin INTEGER NOT NULL,
        origin_detail TEXT NOT NULL,
        created_unix_ms INTEGER NOT NULL,
        PRIMARY KEY (line_id, version)
    ) WITHOUT ROWID;
INSERT INTO "versions" VALUES(1,1,0,3,1,'',1800000000000);
INSERT INTO "versions" VALUES(1,2,1,5,1,'',1800000000000);
CREATE INDEX blobs_by_mark ON blobs (namespace_id, marked_unix_ms) WHERE marked_unix_ms IS NOT NULL;
CREATE INDEX blobs_damaged ON blobs (namespace_id) WHERE is_damaged;
CREATE INDEX blobs_by_schema ON blobs (schema_hash);
CREATE INDEX manifest_blobs_by_blob ON manifest_blobs (blob_id);
CREATE INDEX versions_by_manifest ON versions (manifest_id);
CREATE INDEX prefixes_by_blob ON prefixes (blob_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('blobs',5);
INSERT INTO "sqlite_sequence" VALUES('agents',2);
INSERT INTO "sqlite_sequence" VALUES('lines',2);
COMMIT;
