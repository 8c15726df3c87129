/** A connection to an engine, or to a store: the token, the deadlines, the errors and the retries of its calls. */
import type { SecureClientSessionOptions } from "node:http2";
import { connect as connectSocket } from "node:net";
import { connect as connectTls } from "node:tls";
import { setTimeout as sleep } from "node:timers/promises";
import { MethodOptions_IdempotencyLevel as Idempotency } from "@bufbuild/protobuf/wkt";
import { createClient, type Client as Stub, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { AgentService } from "./gen/kvasir/cachestore/v1/cachestore_pb.js";
import { InferenceService } from "./gen/kvasir/inference/v1/inference_pb.js";
import { baseUrl, isLoopback, parseAddress, type Address } from "./address.js";
import { KvasirError, invalid, toKvasirError } from "./errors.js";
import { Sessions } from "./sessions.js";

/** How the server is verified, and the certificate that the client shows. */
export interface Tls {
  /** PEM: the authority that signed the server's certificate, or that certificate itself, which pins it. Absent: the system's. */
  ca?: string | Buffer;
  /** The name in the server's certificate, when it is not the host of the address. */
  serverName?: string;
  /** PEM: the client's own certificate and key, for a server that asks. */
  cert?: string | Buffer;
  key?: string | Buffer;
}

export interface ConnectOptions {
  /** Shown with every call. On a Unix socket its owner needs none. */
  token?: string;
  /** Beyond this machine it must be given; `{}` trusts the system's authorities. */
  tls?: Tls;
  /** The deadline of round trips that are given no other; 10,000 ms. Turns, warms and transfers have none. */
  timeoutMs?: number;
}

export interface CallOptions {
  /** The deadline of this call; one of more than a day is none. */
  timeoutMs?: number;
  /** Ends the call when it is aborted. */
  signal?: AbortSignal;
}

const DEFAULT_TIMEOUT_MS = 10_000;
// gRPC's header holds eight digits: 27 hours.
const LONGEST_TIMEOUT_MS = 99_999_999;
const READ_ATTEMPTS = 4;
const FIRST_PAUSE_MS = 100;

/** The generated clients of a service over one connection. */
export class Connection {
  readonly engine: Stub<typeof InferenceService>;
  readonly agents: Stub<typeof AgentService>;
  readonly #sessions: Sessions;
  /** The deadline of round trips that are given no other. */
  readonly timeoutMs: number;

  constructor(address: string, options: ConnectOptions) {
    const where = parseAddress(address);
    if (!options.tls && !isLoopback(where)) throw invalid("tls", `${address} is another machine, so TLS is needed`);
    if (options.tls?.ca?.length === 0) throw invalid("tls", "ca: expected PEM; an empty one would trust the system's authorities");
    if (options.token !== undefined && !/^[!-~]+$/.test(options.token)) {
      const said = { field: "token", reasonName: "NO_CREDENTIAL" };
      throw new KvasirError("UNAUTHENTICATED", "token: expected printable ASCII without spaces", said);
    }
    const url = baseUrl(where, options.tls !== undefined);
    this.#sessions = new Sessions(url, socketOptions(where, options.tls));
    const interceptors = [repeated, ...(options.token === undefined ? [] : [bearer(options.token)])];
    const transport = createGrpcTransport({ baseUrl: url, sessionManager: this.#sessions, interceptors, acceptCompression: [] });
    this.engine = createClient(InferenceService, transport);
    this.agents = createClient(AgentService, transport);
    this.timeoutMs = options.timeoutMs ?? DEFAULT_TIMEOUT_MS;
  }

  close(): void {
    this.#sessions.close();
  }

  /** A round trip, with the connection's deadline if the call has none; `otherwiseMs`: with another one. */
  async call<T>(options: CallOptions, ask: (options: CallOptions) => Promise<T>, otherwiseMs = this.timeoutMs): Promise<T> {
    const timeoutMs = deadlineMs(options.timeoutMs ?? otherwiseMs);
    try {
      return await ask({ ...options, timeoutMs });
    } catch (thrown) {
      throw toKvasirError(thrown);
    }
  }
}

/** A deadline as the transport takes it: it would take 0 for none, and what no timer of node's can hold for 1 ms. */
export function deadlineMs(timeoutMs: number | undefined): number | undefined {
  if (timeoutMs === undefined || timeoutMs > LONGEST_TIMEOUT_MS) return undefined;
  if (Number.isNaN(timeoutMs)) throw invalid("timeoutMs", "expected a number, got NaN");
  return Math.max(Math.ceil(timeoutMs), 1);
}

/** Asks again while the service is UNAVAILABLE, where the .proto says that a call may be repeated. */
const repeated: Interceptor = (next) => async (request) => {
  const attempts = request.stream || request.method.idempotency === Idempotency.IDEMPOTENCY_UNKNOWN ? 1 : READ_ATTEMPTS;
  for (let attempt = 1, pauseMs = FIRST_PAUSE_MS; ; attempt++, pauseMs *= 2) {
    try {
      return await next(request);
    } catch (thrown) {
      if (attempt >= attempts || toKvasirError(thrown).code !== "UNAVAILABLE") throw thrown;
    }
    // Between half and the whole of it, so that many clients do not come back at once.
    await sleep(pauseMs * (0.5 + Math.random() / 2), undefined, { signal: request.signal });
  }
};

function socketOptions(address: Address, tls: Tls | undefined): SecureClientSessionOptions {
  const secure = tls && { ...tls, ...(tls.serverName !== undefined && { servername: tls.serverName }) };
  if (!("socketPath" in address)) return secure ?? {};
  const path = address.socketPath;
  return { createConnection: () => (secure ? connectTls({ ...secure, path, ALPNProtocols: ["h2"] }) : connectSocket(path)) };
}

function bearer(token: string): Interceptor {
  return (next) => (request) => {
    request.header.set("authorization", `Bearer ${token}`);
    return next(request);
  };
}
