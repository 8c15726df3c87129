// The golden cases for all languages (proto/vectors).
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { fromBinary, fromJson, type JsonValue } from "@bufbuild/protobuf";
import { blockHash, blockHashes, digestOf, isHash, kvIdentityHash, windowBlockHash } from "@kvasir/client";
import { BlobFrameSchema } from "../src/gen/kvasir/cachestore/v1/cachestore_pb.js";
import { KvIdentitySchema } from "../src/gen/kvasir/cachestore/v1/identity_pb.js";
import { ManifestSchema } from "../src/gen/kvasir/cachestore/v1/manifest_pb.js";

interface Digest {
  hash: string;
  size_bytes: number;
}

function load<T>(name: string): T {
  return JSON.parse(readFileSync(new URL(`../../proto/vectors/${name}.json`, import.meta.url), "utf8")) as T;
}

const decoded = (base64: string): Uint8Array => Buffer.from(base64, "base64");

function digest(data: Uint8Array): Digest {
  const { hash, sizeBytes } = digestOf(data);
  return { hash, size_bytes: sizeBytes };
}

const tokens = (count: number, first: number): number[] => Array.from({ length: count }, (_, i) => (first + 7919 * i) % 2 ** 31);

test("digests", () => {
  const vectors = load<{
    cases: ({ pattern_bytes: number } & Digest)[];
    not_digests: string[];
    token_hashes: { token: string; blake3: string }[];
  }>("digests");
  for (const { pattern_bytes, hash, size_bytes } of vectors.cases) {
    assert.deepEqual(digest(Uint8Array.from({ length: pattern_bytes }, (_, i) => i % 251)), { hash, size_bytes });
  }
  for (const text of vectors.not_digests) assert.ok(!isHash(text), text);
  for (const { token, blake3 } of vectors.token_hashes) assert.equal(digest(Buffer.from(token)).hash, blake3);
});

test("block hashes", () => {
  const vectors = load<{
    cases: { namespace: string; kv_identity_hash: string; first_token: number; token_count: number; block_hashes: string[] }[];
    twins: { cases: { namespace: string; hash: string }[] };
    largest_token: { token_ids: number[]; hash: string };
  }>("block_hashes");
  for (const { namespace, kv_identity_hash, first_token, token_count, block_hashes } of vectors.cases) {
    assert.deepEqual(blockHashes(namespace, kv_identity_hash, tokens(token_count, first_token)), block_hashes);
  }
  const identity = vectors.cases[0]!.kv_identity_hash;
  for (const { namespace, hash } of vectors.twins.cases) assert.equal(blockHash(namespace, identity, "", [1]), hash);
  assert.equal(blockHash("", identity, "", vectors.largest_token.token_ids), vectors.largest_token.hash);
  assert.throws(() => blockHash("", "AB", "", []), { code: "INVALID_ARGUMENT", field: "kv_identity_hash" });
});

test("chain hashes", () => {
  const vectors = load<{
    kv_identity_hash: string; first_token: number; block_chain: string[]; tail_of_600_tokens: string; tail_of_5_tokens: string;
  }>("chain_hashes");
  const { kv_identity_hash, block_chain } = vectors;
  const all = tokens(600, vectors.first_token);
  assert.deepEqual(blockHashes("", kv_identity_hash, all), block_chain);
  assert.equal(blockHash("", kv_identity_hash, block_chain[1]!, all.slice(512)), vectors.tail_of_600_tokens);
  assert.equal(blockHash("", kv_identity_hash, "", all.slice(0, 5)), vectors.tail_of_5_tokens);
});

test("window blocks", () => {
  const vectors = load<{
    block_hashes: { block_hash: string; window: number; window_block_hash: string }[];
    kv_identity_hash: string; manifest_base64: string;
  }>("window_blocks");
  for (const { block_hash, window, window_block_hash } of vectors.block_hashes) {
    assert.equal(windowBlockHash(block_hash, window), window_block_hash);
  }
  const manifest = fromBinary(ManifestSchema, decoded(vectors.manifest_base64));
  assert.equal(kvIdentityHash(manifest.kvIdentity!), vectors.kv_identity_hash);
});

test("KV identities", () => {
  const { cases } = load<{ cases: { kv_identity: JsonValue; serialized_base64: string; kv_identity_hash: string }[] }>("kv_identities");
  for (const { kv_identity, serialized_base64, kv_identity_hash } of cases) {
    const written = fromJson(KvIdentitySchema, kv_identity);
    assert.deepEqual(written, fromBinary(KvIdentitySchema, decoded(serialized_base64)));
    assert.equal(kvIdentityHash(written), kv_identity_hash);
  }
});

test("frames, manifest and archive", () => {
  const { serialized } = load<{ serialized: { pattern_bytes: number; base64: string } }>("frames");
  const frame = fromBinary(BlobFrameSchema, decoded(serialized.base64));
  assert.equal(frame.data.length, serialized.pattern_bytes);
  assert.equal(digest(frame.data).hash, frame.digest?.hash);
  const manifest = load<{ base64: string; digest: Digest; token_count: number; text_code_points: number }>("manifest");
  const archive = load<{ base64: string; digest: Digest }>("archive");
  for (const each of [manifest, archive]) assert.deepEqual(digest(decoded(each.base64)), each.digest);
  const parsed = fromBinary(ManifestSchema, decoded(manifest.base64));
  assert.equal(parsed.tokenIds.length, manifest.token_count);
  assert.equal([...parsed.text].length, manifest.text_code_points);
});
