/** Every refusal of a service, of gRPC, or of this client, as one type. */
import { Code, ConnectError } from "@connectrpc/connect";
import { ErrorReason } from "./gen/kvasir/common/v1/error_reason_pb.js";
import type { Moved } from "./gen/kvasir/inference/v1/inference_pb.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";

const DOMAIN = "kvasir";

const CODE_NAMES = {
  [Code.Canceled]: "CANCELLED",
  [Code.Unknown]: "UNKNOWN",
  [Code.InvalidArgument]: "INVALID_ARGUMENT",
  [Code.DeadlineExceeded]: "DEADLINE_EXCEEDED",
  [Code.NotFound]: "NOT_FOUND",
  [Code.AlreadyExists]: "ALREADY_EXISTS",
  [Code.PermissionDenied]: "PERMISSION_DENIED",
  [Code.ResourceExhausted]: "RESOURCE_EXHAUSTED",
  [Code.FailedPrecondition]: "FAILED_PRECONDITION",
  [Code.Aborted]: "ABORTED",
  [Code.OutOfRange]: "OUT_OF_RANGE",
  [Code.Unimplemented]: "UNIMPLEMENTED",
  [Code.Internal]: "INTERNAL",
  [Code.Unavailable]: "UNAVAILABLE",
  [Code.DataLoss]: "DATA_LOSS",
  [Code.Unauthenticated]: "UNAUTHENTICATED",
} as const;

/** A gRPC code as its documents write it. */
export type CodeName = (typeof CODE_NAMES)[Code];

interface Said {
  reasonName?: string;
  field?: string;
  retryAfterMs?: number;
  metadata?: Record<string, string>;
  cause?: unknown;
}

/** A refusal. Only UNAVAILABLE and RESOURCE_EXHAUSTED are worth asking again unchanged, after retryAfterMs. */
export class KvasirError extends Error {
  override readonly name = "KvasirError";
  readonly code: CodeName;
  /** For programs. UNSPECIFIED: a reason that this client does not know, or none was given. */
  readonly reason: ErrorReason;
  /** The reason as it was sent ("HEAD_MOVED"), also where `reason` does not know it. */
  readonly reasonName: string;
  /** The field that is wrong; empty if none was named. */
  readonly field: string;
  /** Absent where waiting does not help, or the service said nothing about it. */
  readonly retryAfterMs: number | undefined;
  readonly metadata: Readonly<Record<string, string>>;

  constructor(code: CodeName, message: string, said: Said = {}) {
    super(message, { cause: said.cause });
    this.code = code;
    this.reasonName = said.reasonName ?? code;
    this.reason = ErrorReason[this.reasonName as keyof typeof ErrorReason] ?? ErrorReason.UNSPECIFIED;
    this.field = said.field ?? "";
    this.retryAfterMs = said.retryAfterMs;
    this.metadata = said.metadata ?? {};
  }

  /** The same error that also has this metadata. */
  with(metadata: Record<string, string>): KvasirError {
    return new KvasirError(this.code, this.message, { ...this, metadata: { ...this.metadata, ...metadata }, cause: this.cause });
  }
}

/** The typed error of whatever a call threw. */
export function toKvasirError(thrown: unknown): KvasirError {
  if (thrown instanceof KvasirError) return thrown;
  const error = ConnectError.from(thrown);
  if (isOfTheConnection(error)) return new KvasirError("UNAVAILABLE", error.rawMessage, { cause: thrown });
  const info = error.findDetails(ErrorInfoSchema).find((each) => each.domain === DOMAIN);
  const { field: fieldOfMetadata, ...metadata } = info?.metadata ?? {};
  const violation = error.findDetails(BadRequestSchema)[0]?.fieldViolations[0];
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  return new KvasirError(CODE_NAMES[error.code] ?? "UNKNOWN", error.rawMessage, {
    reasonName: info?.reason,
    field: violation?.field ?? fieldOfMetadata,
    retryAfterMs: delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6,
    metadata,
    cause: thrown,
  });
}

/** The end of a stream whose rest is at another engine. */
export function movedTo({ peer, resumeToken }: Moved): KvasirError {
  const text = `the turn went on to ${JSON.stringify(peer)}: resume() of a client of that engine takes the resume_token`;
  return new KvasirError("UNAVAILABLE", text, { reasonName: "TURN_MOVED", metadata: { peer, resume_token: resumeToken } });
}

/** The end of a reply whose stream ended as if it were whole, as a proxy may end it. */
export function cut(): KvasirError {
  return new KvasirError("UNAVAILABLE", "the reply was cut", { reasonName: "STREAM_CUT" });
}

/** This client's own refusal of an argument. */
export function invalid(field: string, message: string): KvasirError {
  return new KvasirError("INVALID_ARGUMENT", `${field}: ${message}`, { field, reasonName: "INVALID_FIELD" });
}

/**
 * A connection that could not be made, or that broke. The transport has several gRPC codes for it, CANCELLED among them, where others
 * have UNAVAILABLE: what tells it is how the stream was closed, or a code of node's somewhere in the chain of causes.
 */
function isOfTheConnection(error: ConnectError): boolean {
  if (error.details.length > 0) return false;
  if (error.rawMessage.startsWith("http/2 stream closed with error code")) return true;
  if (error.code === Code.Canceled || error.code === Code.DeadlineExceeded) return false;
  for (let cause: unknown = error.cause; cause instanceof Error; cause = cause.cause) {
    if ("code" in cause && typeof cause.code === "string" && /^E[A-Z]|^ERR_(HTTP2|SSL|STREAM|TLS)/.test(cause.code)) return true;
  }
  return false;
}
