/**
 * The TypeScript client of Kvasir: agents' conversations with an engine, and their memories by name.
 *
 * Every error of a call is a KvasirError. Reads are asked again when the service is UNAVAILABLE, four times in all, because repeating
 * them changes nothing. A turn is not asked again by itself: give it a requestId, and asking again with it and the same input does
 * nothing twice.
 */
export { Client, type At, type PullOptions, type WhichAgents } from "./client.js";
export type { CallOptions, ConnectOptions, Tls } from "./connection.js";
export { KvasirError, type CodeName } from "./errors.js";
export {
  Reply, assistant, system, toolResult, user,
  type Choice, type GenerateEvent, type Input, type Turn,
} from "./turns.js";
export {
  BLOCK_TOKENS, DigestHasher, blockHash, blockHashes, digestOf, isHash, kvIdentityHash, windowBlockHash,
  type ContentDigest,
} from "./hashes.js";
export { ErrorReason } from "./gen/kvasir/common/v1/error_reason_pb.js";
export { CacheSource, Continuation, FinishReason, MemoryMode, Priority, SnapshotState, TurnState } from "./gen/kvasir/inference/v1/inference_pb.js";
export { Origin } from "./gen/kvasir/cachestore/v1/cachestore_pb.js";
