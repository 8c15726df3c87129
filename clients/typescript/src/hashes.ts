/** The hashes of proto/README.md, byte for byte: BLAKE3-256, as 64 lower-case hex digits. */
import { blake3 } from "@noble/hashes/blake3.js";
import { bytesToHex, hexToBytes } from "@noble/hashes/utils.js";
import type { KvIdentity } from "./gen/kvasir/cachestore/v1/identity_pb.js";
import { invalid } from "./errors.js";

/** Tokens of a full block. */
export const BLOCK_TOKENS = 256;

/** Names bytes: their hash, and their number. */
export interface ContentDigest {
  hash: string;
  sizeBytes: number;
}

/** Takes bytes piece by piece and gives the digest of all of them. */
export class DigestHasher {
  readonly #blake3 = blake3.create();
  #sizeBytes = 0;

  update(data: Uint8Array): this {
    this.#blake3.update(data);
    this.#sizeBytes += data.length;
    return this;
  }

  /** Ends it. */
  digest(): ContentDigest {
    return { hash: bytesToHex(this.#blake3.digest()), sizeBytes: this.#sizeBytes };
  }
}

export const digestOf = (data: Uint8Array): ContentDigest => new DigestHasher().update(data).digest();

/** True for exactly 64 lower-case hex digits. */
export const isHash = (text: string): boolean => text.length === 64 && /^[0-9a-f]{64}$/.test(text);

/** Names a block: of a namespace, a KV identity, the block hash of the block before ("" for the first) and the tokens. */
export function blockHash(namespace: string, kvIdentityHash: string, parent: string, tokenIds: readonly number[]): string {
  const before = parent === "" ? new Uint8Array() : raw("parent", parent);
  return hashFields(text("kvasir.block.v1"), text(namespace), raw("kv_identity_hash", kvIdentityHash), before, numbers(tokenIds));
}

/**
 * Names the full blocks of tokens, first block first; tokens behind the last full block have no hash. With an empty namespace they
 * are the chain hashes of tensor files.
 */
export function blockHashes(namespace: string, kvIdentityHash: string, tokenIds: readonly number[]): string[] {
  const hashes: string[] = [];
  for (let start = 0; start + BLOCK_TOKENS <= tokenIds.length; start += BLOCK_TOKENS) {
    hashes.push(blockHash(namespace, kvIdentityHash, hashes.at(-1) ?? "", tokenIds.slice(start, start + BLOCK_TOKENS)));
  }
  return hashes;
}

/** Names the same tokens' block in the group of layers with this window. */
export function windowBlockHash(block: string, window: number): string {
  return hashFields(text("kvasir.window_block.v1"), raw("block_hash", block), numbers([window]));
}

/** Names which computation KV belongs to. */
export function kvIdentityHash({ weightsDigest, layers, policy }: KvIdentity): string {
  if (policy === undefined) throw invalid("policy", "expected one");
  const { keyBits, valueBits, groupSize, scaleType, keyRotation, exactLayers } = policy;
  const states = layers.flatMap(({ stateTensors }, index) =>
    stateTensors.length === 0
      ? []
      : [index, stateTensors.length, ...stateTensors.flatMap(({ type, shape }) => [type, shape.length, ...shape])],
  );
  return hashFields(
    text("kvasir.kv_identity.v1"),
    raw("weights_digest", weightsDigest),
    numbers(layers.flatMap(({ kind, window, kvHeads, keyDim, valueDim }) => [kind, window, kvHeads, keyDim, valueDim])),
    numbers([keyBits, valueBits, groupSize, scaleType, keyRotation]),
    numbers(exactLayers),
    ...(states.length === 0 ? [] : [Buffer.concat([text("states"), numbers(states)])]),
  );
}

const text = (of: string): Uint8Array => new TextEncoder().encode(of);

function raw(field: string, hash: string): Uint8Array {
  if (!isHash(hash)) throw invalid(field, "expected 64 lower-case hex digits");
  return hexToBytes(hash);
}

/** Each as 4 bytes little-endian. */
function numbers(values: readonly number[]): Uint8Array {
  const bytes = new DataView(new ArrayBuffer(4 * values.length));
  values.forEach((value, index) => bytes.setUint32(4 * index, value, true));
  return new Uint8Array(bytes.buffer);
}

/** Each field behind its length, so that no two lists of fields give the same bytes. */
function hashFields(...fields: Uint8Array[]): string {
  const hasher = new DigestHasher();
  for (const field of fields) {
    const length = new DataView(new ArrayBuffer(8));
    length.setBigUint64(0, BigInt(field.length), true);
    hasher.update(new Uint8Array(length.buffer)).update(field);
  }
  return hasher.digest().hash;
}
