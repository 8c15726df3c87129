/** One HTTP/2 connection for new calls, made anew when the one before is gone: calls fail with it, the process goes on. */
import * as http2 from "node:http2";
import { Code, ConnectError } from "@connectrpc/connect";

// A service that froze or a machine that vanished ends the calls on the connection after 20 s.
const PING_EVERY_MS = 10_000;
const PONG_WITHIN_MS = 10_000;

/**
 * In place of connect-node's own manager: with that one a GOAWAY to an idle connection, as a service sends that ends, may end the
 * whole process with an error that nobody can catch (connectrpc/connect-es#1768).
 */
export class Sessions {
  readonly authority: string;
  readonly #options: http2.SecureClientSessionOptions;
  #current: WatchedSession | undefined;
  /** The current one, and those whose service has said good-bye and whose streams go on. */
  readonly #open = new Set<WatchedSession>();
  #isClosed = false;

  constructor(authority: string, options: http2.SecureClientSessionOptions) {
    this.authority = authority;
    this.#options = options;
  }

  async request(
    method: string,
    path: string,
    headers: http2.OutgoingHttpHeaders,
    options: Omit<http2.ClientSessionRequestOptions, "signal">,
  ): Promise<http2.ClientHttp2Stream> {
    if (this.#isClosed) throw closed();
    if (!this.#current?.isUsable) this.#current = this.#connected();
    return this.#current.request({ ...headers, ":method": method, ":path": path }, options);
  }

  /** Bytes that were read tell no more than pings do. */
  notifyResponseByteRead(): void {}

  close(): void {
    this.#isClosed = true;
    for (const each of this.#open) each.destroy(closed());
  }

  #connected(): WatchedSession {
    const session = http2.connect(this.authority, this.#options);
    const watched = new WatchedSession(session);
    this.#open.add(watched);
    session.once("close", () => this.#open.delete(watched));
    return watched;
  }
}

/** A session that keeps the process alive and pings its peer for as long as streams are open. */
class WatchedSession {
  readonly #session: http2.ClientHttp2Session;
  #openStreams = 0;
  #hasGoneAway = false;
  #pings: NodeJS.Timeout | undefined;
  #pong: NodeJS.Timeout | undefined;

  constructor(session: http2.ClientHttp2Session) {
    this.#session = session;
    session.on("goaway", () => (this.#hasGoneAway = true));
    session.on("error", () => {}); // the streams tell whoever waits
    session.on("close", () => this.#rest());
    session.unref();
  }

  get isUsable(): boolean {
    return !this.#hasGoneAway && !this.#session.closed && !this.#session.destroyed;
  }

  request(headers: http2.OutgoingHttpHeaders, options: http2.ClientSessionRequestOptions): http2.ClientHttp2Stream {
    const stream = this.#session.request(headers, options);
    if (++this.#openStreams === 1) {
      this.#session.ref();
      this.#pings = setInterval(() => this.#ping(), PING_EVERY_MS);
    }
    stream.once("close", () => {
      if (--this.#openStreams === 0) this.#rest();
    });
    return stream;
  }

  /** Without a reason, calls that have no answer yet would wait for one. */
  destroy(reason: Error): void {
    this.#session.destroy(reason, http2.constants.NGHTTP2_NO_ERROR);
  }

  /** A connection is an answer, too: a TLS handshake may never end. */
  #ping(): void {
    if (this.#session.destroyed || this.#pong !== undefined) return;
    this.#pong = setTimeout(() => {
      this.#session.destroy(Object.assign(new Error("the service answers no ping"), { code: "ETIMEDOUT" }));
    }, PONG_WITHIN_MS);
    if (this.#session.connecting) this.#session.once("connect", () => this.#forgetPong());
    else this.#session.ping(() => this.#forgetPong());
  }

  #rest(): void {
    clearInterval(this.#pings);
    this.#forgetPong();
    this.#session.unref();
  }

  #forgetPong(): void {
    clearTimeout(this.#pong);
    this.#pong = undefined;
  }
}

function closed(): ConnectError {
  return new ConnectError("the client is closed", Code.Canceled);
}
