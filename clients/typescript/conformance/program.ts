// The conformance program of the TypeScript client: see tests/conformance/README.md for what each call takes and answers.
import { createReadStream, createWriteStream, readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pipeline } from "node:stream/promises";
import {
  CacheSource, Client, Continuation, DigestHasher, FinishReason, KvasirError, MemoryMode, Origin, Reply, TurnState, assistant,
  system, user,
  type CallOptions, type Turn,
} from "@kvasir/client";

interface Said {
  role: string;
  text: string;
}

interface Call {
  id: number;
  call: string;
  timeout_s?: number;
  address: string;
  token?: string;
  ca_file?: string;
  server_name?: string;
  agent_id: string;
  source_agent_id: string;
  local_agent_id?: string;
  prompt?: string;
  messages?: Said[];
  append_messages?: Said[];
  max_tokens?: number;
  n?: number;
  request_id?: string;
  expected_version?: number;
  model?: string;
  regex?: string;
  cancel_after?: number;
  name_prefix?: string;
  page_size?: number;
  version?: number;
  force?: boolean;
  file: string;
  replace?: boolean;
  peer: string;
  base_version?: number;
  memory_mode?: string;
  expect_existing?: boolean;
  replace_memory?: boolean;
  agent_ids?: string[];
  count?: number;
  resume_token?: string;
  texts?: string[];
  dimensions?: number;
  truncate?: boolean;
  engines?: string[];
}

let client: Client | undefined;

function connected(): Client {
  if (client === undefined) throw new Error("the first call is connect");
  return client;
}

const calls: Record<string, (call: Call, options: CallOptions) => Promise<object>> = {
  async connect({ address, token, ca_file, server_name, engines }) {
    client?.close();
    const tls = ca_file === undefined ? undefined : { ca: readFileSync(ca_file), ...(server_name && { serverName: server_name }) };
    client = new Client(address, { token, tls });
    client.engines = (engines ?? []).map((each) => new Client(each));
    return {};
  },
  async count(call, options) {
    return { tokens: await connected().countTokens(turn(call), options) };
  },
  async embed({ texts, model, dimensions, truncate }, options) {
    const inputs = (texts ?? []).map((value) => ({ input: { case: "text" as const, value } }));
    const answer = await connected().embed({ inputs, model, dimensions, truncate }, options);
    return { model: answer.model, embeddings: answer.embeddings.map(({ values, tokens }) => ({ values, tokens })) };
  },
  async reply(call, options) {
    const { text, started, finished } = await connected().reply(turn(call), options);
    return {
      text,
      prompt_tokens: started?.promptTokens,
      cached_tokens: started?.cachedTokens,
      source: `CACHE_SOURCE_${CacheSource[started?.source ?? 0]}`,
      continuation: `CONTINUATION_${Continuation[started?.continuation ?? 0]}`,
      parent_version: started?.parentVersion,
      version: finished?.snapshot?.version,
      finish_reason: `FINISH_REASON_${FinishReason[finished?.reason ?? 0]}`,
      request_id: started?.requestId,
    };
  },
  async stream(call, options) {
    const reply = new Reply();
    let deltas = 0;
    const { resume_token: token } = call;
    const events = token === undefined ? connected().generate(turn(call), options) : connected().resume(token, options);
    for await (const event of events) {
      reply.add(event);
      if (event.case === "delta" && ++deltas === call.cancel_after) break;
    }
    const { text, finished } = reply;
    return { text, deltas, is_finished: finished !== undefined, version: finished?.snapshot?.version ?? 0 };
  },
  async streams(call, options) {
    const replies = Array.from({ length: call.count ?? 0 }, () => connected().reply(turn(call), options));
    return { finished: (await Promise.all(replies)).length };
  },
  async list_hot_memories({ agent_ids }, options) {
    const found = await connected().listHotMemories(agent_ids ?? [], options);
    return {
      memories: found.map(({ agentId, tokens, version, isStored }) => ({ agent_id: agentId, tokens, version, is_stored: isStored })),
    };
  },
  async usage({ agent_id }, options) {
    const { agentCount, snapshotCount, blobBytes, sharedBytes } = await connected().usage(agent_id, options);
    return { agent_count: agentCount, snapshot_count: snapshotCount, blob_bytes: blobBytes, shared_bytes: sharedBytes };
  },
  async list_turns(_, options) {
    const turns = await connected().listTurns(options);
    return { turns: turns.map(({ requestId, agentId, state }) => ({ request_id: requestId, agent_id: agentId, state: `TURN_STATE_${TurnState[state]}` })) };
  },
  async cancel_turn({ request_id }, options) {
    const ended = await connected().cancelTurn(request_id ?? "", options);
    return { finish_reasons: ended.map(({ reason }) => `FINISH_REASON_${FinishReason[reason]}`) };
  },
  async warm({ agent_id }, options) {
    const { tokens, cachedTokens, source, version } = await connected().warm(agent_id, {}, options);
    return { tokens, cached_tokens: cachedTokens, source: `CACHE_SOURCE_${CacheSource[source]}`, version };
  },
  async list_agents({ name_prefix, page_size }, options) {
    const agent_ids: string[] = [];
    for await (const { agentId } of connected().listAgents({ namePrefix: name_prefix, pageSize: page_size }, options)) {
      agent_ids.push(agentId);
    }
    return { agent_ids };
  },
  async get_agent({ agent_id }, options) {
    const { agentId, lines } = await connected().getAgent(agent_id, options);
    return { agent_id: agentId, version: lines[0]?.version, token_count: lines[0]?.tokenCount };
  },
  async fork({ source_agent_id, agent_id, version }, options) {
    const { agentId, lines } = await connected().forkAgent(source_agent_id, agent_id, { version }, options);
    return { agent_id: agentId, version: lines[0]?.version };
  },
  async rollback({ agent_id, version, expected_version }, options) {
    const to = { version: version ?? 0 };
    const made = await connected().rollbackAgent(agent_id, to, { ...options, expectedVersion: expected_version });
    return { version: made.version };
  },
  async delete({ agent_id, force }, options) {
    await connected().deleteAgent(agent_id, { ...options, force });
    return {};
  },
  async export({ agent_id, version, file }, options) {
    await pipeline(connected().exportAgent(agent_id, { version }, options), createWriteStream(file));
    const hasher = new DigestHasher();
    for await (const piece of createReadStream(file)) hasher.update(piece as Buffer);
    const { hash, sizeBytes } = hasher.digest();
    return { hash, size_bytes: sizeBytes };
  },
  async import({ agent_id, file, replace }, options) {
    const archive = createReadStream(file) as AsyncIterable<Buffer>;
    const { version, origin } = await connected().importAgent(agent_id, archive, { ...options, replace });
    return { version, origin: `ORIGIN_${Origin[origin]}` };
  },
  async pull({ peer, agent_id, local_agent_id }, options) {
    const given = { ...options, localAgentId: local_agent_id };
    const { version, origin } = await connected().pullAgent(peer, agent_id, given);
    return { version, origin: `ORIGIN_${Origin[origin]}` };
  },
};

function turn(call: Call): Turn {
  return {
    prompt: call.prompt,
    messages: messages(call.messages),
    append: messages(call.append_messages),
    agentId: call.agent_id,
    expectedVersion: call.expected_version,
    requestId: call.request_id,
    model: call.model,
    maxTokens: call.max_tokens,
    sampling: call.n === undefined ? undefined : { n: call.n },
    regex: call.regex,
    baseVersion: call.base_version,
    memoryMode: call.memory_mode && MemoryMode[call.memory_mode.replace("MEMORY_MODE_", "") as keyof typeof MemoryMode],
    expectExisting: call.expect_existing,
    replaceMemory: call.replace_memory,
  } as Turn;
}

function messages(said: Said[] | undefined) {
  const makers: Record<string, typeof user> = { system, user, assistant };
  return said?.map(({ role, text }) => makers[role]!(text));
}

function refusal({ code, reasonName, field, retryAfterMs, metadata, message }: KvasirError) {
  const retry_after_s = retryAfterMs === undefined ? null : retryAfterMs / 1000;
  return { code, reason: reasonName, field, retry_after_s, metadata, message };
}

async function answer(call: Call): Promise<object> {
  const options = call.timeout_s === undefined ? {} : { timeoutMs: call.timeout_s * 1000 };
  try {
    return { id: call.id, ok: await calls[call.call]!(call, options) };
  } catch (error) {
    if (!(error instanceof KvasirError)) throw error;
    return { id: call.id, error: refusal(error) };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const told = await answer(JSON.parse(line) as Call);
  // Versions and counts are bigint.
  process.stdout.write(`${JSON.stringify(told, (_, value: unknown) => (typeof value === "bigint" ? Number(value) : value))}\n`);
}
client?.close();
