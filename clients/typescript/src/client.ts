/** The client: turns of an engine, and agents of its store. */
import type { Client as Stub } from "@connectrpc/connect";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type {
  Agent, AgentSchema, AgentService, DeleteAgentResponse, GetUsageResponse, SnapshotVersion, TransferProgress,
} from "./gen/kvasir/cachestore/v1/cachestore_pb.js";
import {
  EmbedRequestSchema,
  type EmbedResponse, type Finished, type GenerateRequestSchema, type HotMemory, type InferenceService, type Turn as TurnUnderWay, type WarmResponse,
} from "./gen/kvasir/inference/v1/inference_pb.js";
import { Connection, deadlineMs, type CallOptions, type ConnectOptions } from "./connection.js";
import { KvasirError, cut, movedTo, toKvasirError } from "./errors.js";
import { Reply, checked, countRequest, generateRequest, warmRequest, type GenerateEvent, type Input, type Turn } from "./turns.js";

/** Names a version of an agent. Absent: the newest, of the line that was used last. */
export interface At {
  version?: number | bigint;
  /** Names a line, where the agent has several: one for each model and KV policy. */
  kvIdentityHash?: string;
}

/** Which agents are listed. Absent: all of the namespace. */
export interface WhichAgents {
  namePrefix?: string;
  /** All must match. */
  labels?: Record<string, string>;
  /** How many are asked for at once. Absent: the service's own. */
  pageSize?: number;
}

export interface PullOptions extends CallOptions {
  /** The agent's name here. Absent: the same. */
  localAgentId?: string;
  kvIdentityHash?: string;
  onProgress?: (progress: TransferProgress) => void;
}

// A message of an archive; gRPC's usual limit is 4 MiB.
const PIECE_BYTES = 1 << 20;
// An engine that is well tells its name by then.
const SOON_MS = 2_000;

/** A client; many calls may be under way at once. close() it. */
export class Client {
  readonly #connection: Connection;
  #leaseOwner = "";
  /**
   * Clients of the other engines of this engine's store. A turn whose agent one of them holds is made there. Addresses come from here
   * alone, never from an engine.
   */
  engines: readonly Client[] = [];

  /** Of the service at unix:/path, host:port or [v6 address]:port. It connects with the first call. */
  constructor(address: string, options: ConnectOptions = {}) {
    this.#connection = new Connection(address, options);
  }

  /** Ends the connection and what is under way on it. */
  close(): void {
    this.#connection.close();
  }

  /** The generated client of the inference service, for calls that have no method here: models, statistics. It throws ConnectError. */
  get engine(): Stub<typeof InferenceService> {
    return this.#connection.engine;
  }

  /** The generated client of the agents' service. */
  get agents(): Stub<typeof AgentService> {
    return this.#connection.agents;
  }

  // --- turns ---

  /**
   * Streams a turn's events: started, prefillProgress, deltas, finished. Leaving the loop, or the signal, cancels the turn. The error
   * of a broken turn has its request_id in the metadata: ask again with it. After "moved" it is TURN_MOVED: see resume; where the stream
   * ended before its last "finished", STREAM_CUT.
   */
  async *generate(turn: Turn, options: CallOptions = {}): AsyncGenerator<GenerateEvent, void, undefined> {
    const request = generateRequest(turn);
    try {
      yield* this.#events(request, options);
    } catch (thrown) {
      throw toKvasirError(thrown).with({ request_id: request.requestId });
    }
  }

  /**
   * Streams the rest of a reply that another engine began and gave to this one. The token is in the metadata of the error that ended
   * the stream there (TURN_MOVED, HANDOVER_UNCERTAIN), and `peer` is that engine's name for this one.
   */
  resume(resumeToken: string, options: CallOptions = {}): AsyncGenerator<GenerateEvent, void, undefined> {
    return this.#events({ resumeToken }, options);
  }

  async *#events(
    request: MessageInitShape<typeof GenerateRequestSchema>, options: CallOptions,
  ): AsyncGenerator<GenerateEvent, void, undefined> {
    const endsMs = options.timeoutMs === undefined ? undefined : performance.now() + options.timeoutMs;
    const left = (): CallOptions =>
      endsMs === undefined ? options : { ...options, timeoutMs: endsMs - performance.now() };
    let hasBegun = false;
    try {
      for await (const event of this.#eventsHere(request, options)) {
        hasBegun = true;
        yield event;
      }
      return;
    } catch (thrown) {
      const holder = hasBegun ? undefined : await this.#holder(toKvasirError(thrown), left);
      if (options.signal?.aborted) throw new KvasirError("CANCELLED", "the turn was cancelled", { cause: options.signal.reason });
      if (holder === undefined) throw thrown;
      yield* holder.#eventsHere(request, left());
    }
  }

  async *#eventsHere(
    request: MessageInitShape<typeof GenerateRequestSchema>, options: CallOptions,
  ): AsyncGenerator<GenerateEvent, void, undefined> {
    let unfinished = Math.max(request.sampling?.n ?? 1, 1);
    for await (const { event } of streamed(options, (given) => this.engine.generate(request, given))) {
      if (event.case === "finished") unfinished--;
      if (event.case !== undefined) yield event;
      if (event.case === "moved") throw movedTo(event.value);
    }
    if (unfinished > 0) throw cut();
  }

  /** The engine that has the agent of a refused turn, if it is known here and answers before the turn must end. */
  async #holder({ reasonName, metadata: { owner } }: KvasirError, left: () => CallOptions): Promise<Client | undefined> {
    if (reasonName !== "AGENT_HELD_ELSEWHERE" || !owner) return undefined;
    const known = this.engines.find((each) => each.#leaseOwner === owner); // an engine that starts again keeps its name
    if (known !== undefined) return known;
    for (const each of this.engines) {
      try {
        const { timeoutMs: leftMs = Infinity, signal } = left();
        // One that hangs, as a Mac that sleeps, must not keep the turn from those behind it.
        const soon = { timeoutMs: Math.min(each.#connection.timeoutMs, SOON_MS, leftMs), signal };
        const answer = await each.#connection.call(soon, (given) => each.engine.getCapabilities({}, given));
        each.#leaseOwner = answer.leaseOwner;
      } catch {
        continue; // it is away: then it is not the one that answers for the agent
      }
      if (each.#leaseOwner === owner) return each;
    }
    return undefined;
  }

  /** As generate, to its end. */
  async reply(turn: Turn, options: CallOptions = {}): Promise<Reply> {
    const reply = new Reply();
    for await (const event of this.generate(turn, options)) reply.add(event);
    return reply;
  }

  /** The turns of the caller's namespace that wait or run, the oldest first. */
  async listTurns(options: CallOptions = {}): Promise<TurnUnderWay[]> {
    return (await this.#connection.call(options, (given) => this.engine.listTurns({}, given))).turns;
  }

  /** Ends the turns of a request, whoever reads them, and tells how each choice ended. */
  async cancelTurn(requestId: string, options: CallOptions = {}): Promise<Finished[]> {
    return (await this.#connection.call(options, (given) => this.engine.cancelTurn({ requestId }, given))).finished;
  }

  /** Those of the agents' memories that are hot, in the order asked; at most 1000 agents. */
  async listHotMemories(agentIds: string[], options: CallOptions = {}): Promise<HotMemory[]> {
    return (await this.#connection.call(options, (given) => this.engine.listHotMemories({ agentIds }, given))).memories;
  }

  /** Puts an agent's memory into the engine ahead of its next turn, and with an input also computes that prompt. It has no deadline. */
  async warm(agentId: string, input: Input = {}, options: CallOptions = {}): Promise<WarmResponse> {
    const request = warmRequest(agentId, input);
    return this.#connection.call(options, (given) => this.engine.warm(request, given), Infinity);
  }

  /** The tokens of a prompt, or of messages after the chat template. */
  async countTokens(input: Input, options: CallOptions = {}): Promise<number> {
    const request = countRequest(input);
    return Number((await this.#connection.call(options, (given) => this.engine.countTokens(request, given))).tokens);
  }

  /** The embeddings of texts, in their order. It has no deadline. */
  async embed(given: MessageInitShape<typeof EmbedRequestSchema>, options: CallOptions = {}): Promise<EmbedResponse> {
    const request = checked(EmbedRequestSchema, given);
    return this.#connection.call(options, (each) => this.engine.embed(request, each), Infinity);
  }

  // --- agents ---

  /** Agents by name, page after page. */
  async *listAgents(which: WhichAgents = {}, options: CallOptions = {}): AsyncGenerator<Agent, void, undefined> {
    for (let pageToken = ""; ; ) {
      const page = await this.#connection.call(options, (given) => this.agents.listAgents({ ...which, pageToken }, given));
      yield* page.agents;
      pageToken = page.nextPageToken;
      if (pageToken === "") return;
    }
  }

  /** The versions of an agent's lines, newest first, page after page. */
  async *listVersions(agentId: string, options: CallOptions = {}): AsyncGenerator<SnapshotVersion, void, undefined> {
    for (let pageToken = ""; ; ) {
      const page = await this.#connection.call(options, (given) => this.agents.listSnapshots({ agentId, pageToken }, given));
      yield* page.snapshots;
      pageToken = page.nextPageToken;
      if (pageToken === "") return;
    }
  }

  /** An agent and the newest version of each of its lines, last used first. */
  async getAgent(agentId: string, options: CallOptions = {}): Promise<Agent> {
    return present((await this.#connection.call(options, (given) => this.agents.getAgent({ agentId }, given))).agent);
  }

  /** The bytes behind an agent, or behind all of the namespace if it is not named, and which of them are shared. */
  async usage(agentId = "", options: CallOptions = {}): Promise<GetUsageResponse> {
    return this.#connection.call(options, (given) => this.agents.getUsage({ agentId }, given));
  }

  /** Changes the fields of an agent that paths name: "labels", "labels.KEY", "is_pinned", "retained_versions". */
  async updateAgent(agent: MessageInitShape<typeof AgentSchema>, paths: string[], options: CallOptions = {}): Promise<Agent> {
    const request = { agent, updateMask: { paths } };
    return present((await this.#connection.call(options, (given) => this.agents.updateAgent(request, given))).agent);
  }

  /** Starts an agent whose first version is another's. Copies no memory. */
  async forkAgent(sourceAgentId: string, agentId: string, from: At = {}, options: CallOptions = {}): Promise<Agent> {
    const request = { sourceAgentId, agentId, ...at(from) };
    return present((await this.#connection.call(options, (given) => this.agents.forkAgent(request, given))).agent);
  }

  /** Makes an old version the newest again, as a new version. ABORTED if the newest is not expectedVersion. */
  async rollbackAgent(
    agentId: string,
    to: At & { version: number | bigint },
    { expectedVersion, ...options }: CallOptions & { expectedVersion?: number | bigint } = {},
  ): Promise<SnapshotVersion> {
    const expected = expectedVersion === undefined ? undefined : BigInt(expectedVersion);
    const request = { agentId, ...to, version: BigInt(to.version), expectedVersion: expected };
    return present((await this.#connection.call(options, (given) => this.agents.rollbackAgent(request, given))).snapshot);
  }

  /** Forgets an agent, a pinned one only with force, and says when its bytes will be gone. */
  async deleteAgent(agentId: string, { force, ...options }: CallOptions & { force?: boolean } = {}): Promise<DeleteAgentResponse> {
    return this.#connection.call(options, (given) => this.agents.deleteAgent({ agentId, force }, given));
  }

  /** The archive of a version, piece by piece. After an error what came is no archive. */
  async *exportAgent(agentId: string, which: At = {}, options: CallOptions = {}): AsyncGenerator<Uint8Array, void, undefined> {
    const request = { agentId, ...at(which) };
    for await (const { data } of streamed(options, (given) => this.agents.exportAgent(request, given))) yield data;
  }

  /**
   * Reads an archive into a new version of an agent, which must be new unless replace is said. It has no deadline. An archive that
   * cannot be read is UNKNOWN, with the error as its cause.
   */
  async importAgent(
    agentId: string,
    archive: AsyncIterable<Uint8Array> | Iterable<Uint8Array>,
    { replace, ...options }: CallOptions & { replace?: boolean } = {},
  ): Promise<SnapshotVersion> {
    const pieces = read(archive);
    let unreadable: KvasirError | undefined;
    const next = async () =>
      pieces.next().catch((error: unknown) => {
        throw (unreadable = notRead(error));
      });
    const first = next(); // now: a file's stream that fails while nobody reads it ends the process
    first.catch(() => {});
    async function* requests() {
      yield { header: { agentId, replace } };
      for (let piece = await first; !piece.done; piece = await next()) yield { data: piece.value };
    }
    const ask = (given: CallOptions) => this.agents.importAgent(requests(), given);
    try {
      return present((await this.#connection.call(options, ask, Infinity)).snapshot);
    } catch (thrown) {
      throw options.signal?.aborted ? thrown : (unreadable ?? thrown);
    } finally {
      void pieces.return().catch(() => {}); // not waited for: it comes behind a piece that may never
    }
  }

  /** Lets the store copy an agent's line from a peer of its configuration. Safe to repeat. */
  async pullAgent(peer: string, agentId: string, options: PullOptions = {}): Promise<SnapshotVersion> {
    const { localAgentId, kvIdentityHash, onProgress, ...given } = options;
    const request = { peer, agentId, localAgentId, kvIdentityHash };
    for await (const { event } of streamed(given, (each) => this.agents.pullAgent(request, each))) {
      if (event.case === "done") return event.value;
      if (event.case === "progress") onProgress?.(event.value);
    }
    throw new KvasirError("INTERNAL", "the pull ended without saying how");
  }
}

/** A stream's messages, with typed errors. Leaving early cancels the call, so that the service stops too. */
async function* streamed<T>(options: CallOptions, ask: (options: CallOptions) => AsyncIterable<T>): AsyncGenerator<T, void, undefined> {
  const left = new AbortController();
  const signal = options.signal ? AbortSignal.any([options.signal, left.signal]) : left.signal;
  try {
    yield* ask({ ...options, timeoutMs: deadlineMs(options.timeoutMs), signal });
  } catch (thrown) {
    throw toKvasirError(thrown);
  } finally {
    left.abort();
  }
}

/** An archive in messages. */
async function* read(archive: AsyncIterable<Uint8Array> | Iterable<Uint8Array>): AsyncGenerator<Uint8Array, void, undefined> {
  for await (const piece of archive) {
    for (let start = 0; start < piece.length; start += PIECE_BYTES) yield piece.subarray(start, start + PIECE_BYTES);
  }
}

function notRead(cause: unknown): KvasirError {
  const what = cause instanceof Error ? cause.message : String(cause);
  return new KvasirError("UNKNOWN", `archive: ${what}`, { field: "archive", cause });
}

function at({ version, kvIdentityHash }: At) {
  return { kvIdentityHash, version: version === undefined ? undefined : BigInt(version) };
}

function present<T>(field: T | undefined): T {
  if (field === undefined) throw new KvasirError("INTERNAL", "the service's answer lacks what was asked for");
  return field;
}
