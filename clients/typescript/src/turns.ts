/** Turns as callers write them, their requests, and their replies as far as they have arrived. */
import { randomUUID } from "node:crypto";
import { create, toBinary, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";
import { MessageSchema, Role, type Message } from "./gen/kvasir/common/v1/message_pb.js";
import {
  CountTokensRequestSchema, GenerateRequestSchema, WarmRequestSchema,
  type CountTokensRequest, type Finished, type GenerateRequest, type GenerateResponse, type SamplingSchema, type Started,
  type TokenLogprobs, type ToolSchema, type WarmRequest, type MemoryMode, type Priority,
} from "./gen/kvasir/inference/v1/inference_pb.js";
import { KvasirError, invalid } from "./errors.js";

// More than a service sends: what an answer names is made room for.
const MAX_CHOICES = 128;

/** What is continued: exactly one of the three. */
export interface Input {
  /** The whole text. */
  prompt?: string;
  /** The whole conversation. */
  messages?: Message[];
  /** What follows the messages that the agent remembers. */
  append?: Message[];
  /** Tools that the template may offer to the model. */
  tools?: MessageInitShape<typeof ToolSchema>[];
  /** One that configuration names. Absent: the loaded model. */
  model?: string;
}

/** A request to continue a text. What is absent takes the default of the .proto. */
export interface Turn extends Input {
  /** The agent whose memory is read and extended. Absent: nothing is remembered. */
  agentId?: string;
  /** The newest version of the agent as the caller knows it; 0: the agent must be new. Absent: whatever it is. */
  expectedVersion?: number | bigint;
  /** Refuse an agent that remembers nothing yet. */
  expectExisting?: boolean;
  /** What the turn does with the memory. Absent: READ_WRITE with an agentId. */
  memoryMode?: MemoryMode;
  /** The version to go on from: a rewind. Absent: the newest. */
  baseVersion?: number | bigint;
  /** Messages that begin another conversation take the agent's place. Else they are a branch, which is not remembered. */
  replaceMemory?: boolean;
  /** Names the turn, so that it can be asked for again without being done twice. Absent: a new one. */
  requestId?: string;
  /** The longest reply, here or in `sampling`. */
  maxTokens?: number;
  sampling?: MessageInitShape<typeof SamplingSchema>;
  /** What the reply must match, at most one of them: a JSON schema (an object or its text), or a regular expression. */
  jsonSchema?: string | object;
  regex?: string;
  /** Remember what was generated before a cancel, a deadline or a disconnect. */
  keepPartial?: boolean;
  priority?: Priority;
  /** How long the stream may wait for a token beside others' prompts, 20 to 1,000. Absent: as the engine is set. */
  longestGapMs?: number;
}

/** An event of a turn: its `case` is "started", "prefillProgress", "delta", "finished" or "moved". */
export type GenerateEvent = Exclude<GenerateResponse["event"], { case: undefined }>;

/** One of the replies that were asked for, as far as it has arrived. */
export interface Choice {
  text: string;
  reasoningText: string;
  tokenIds: number[];
  /** One per token, if they were asked for. */
  logprobs: TokenLogprobs[];
  /** Absent until the choice ended. */
  finished: Finished | undefined;
}

/** A turn as far as its events have arrived. With several choices, `text` and `finished` are those of the first. */
export class Reply {
  started: Started | undefined;
  readonly choices: Choice[] = [newChoice()];

  get text(): string {
    return this.#choice(0).text;
  }

  get finished(): Finished | undefined {
    return this.#choice(0).finished;
  }

  /** Takes the next event. */
  add(event: GenerateEvent): void {
    if (event.case === "started") {
      this.started = event.value;
    } else if (event.case === "delta") {
      const choice = this.#choice(event.value.choice);
      choice.text += event.value.text;
      choice.reasoningText += event.value.reasoningText;
      // One by one: as arguments of one call a long reply, told again from memory, would not fit the stack.
      for (const id of event.value.tokenIds) choice.tokenIds.push(id);
      for (const each of event.value.logprobs) choice.logprobs.push(each);
    } else if (event.case === "finished") {
      this.#choice(event.value.choice).finished = event.value;
    }
  }

  #choice(number: number): Choice {
    if (number < 0 || number >= MAX_CHOICES) throw new KvasirError("INTERNAL", `the engine sent choice ${number}`);
    while (this.choices.length <= number) this.choices.push(newChoice());
    return this.choices[number]!;
  }
}

export const system = (text: string): Message => message(Role.SYSTEM, text);
export const user = (text: string): Message => message(Role.USER, text);
export const assistant = (text: string): Message => message(Role.ASSISTANT, text);
/** What a tool answered to a call. */
export const toolResult = (toolCallId: string, text: string): Message => ({ ...message(Role.TOOL, text), toolCallId });

/** Throws a KvasirError for a turn that says too much or too little; the service checks the rest. */
export function generateRequest(turn: Turn): GenerateRequest {
  if (turn.jsonSchema !== undefined && turn.regex !== undefined) {
    throw invalid("response_format", "expected jsonSchema or regex, got both");
  }
  return checked(GenerateRequestSchema, {
    ...common(turn),
    input: input(turn) ?? missing(),
    requestId: turn.requestId ?? randomUUID(),
    agentId: turn.agentId,
    expectedVersion: turn.expectedVersion === undefined ? undefined : BigInt(turn.expectedVersion),
    expectExisting: turn.expectExisting,
    memoryMode: turn.memoryMode,
    baseVersion: turn.baseVersion === undefined ? undefined : BigInt(turn.baseVersion),
    replaceMemory: turn.replaceMemory,
    sampling: sampling(turn),
    keepPartial: turn.keepPartial,
    priority: turn.priority,
    longestGapMs: turn.longestGapMs,
    responseFormat: responseFormat(turn),
  });
}

/** As generateRequest; without an input only the agent's memory is warmed. */
export function warmRequest(agentId: string, given: Input): WarmRequest {
  return checked(WarmRequestSchema, { ...common(given), agentId, input: input(given) });
}

/** As generateRequest, for an input that is only counted. */
export function countRequest(given: Input): CountTokensRequest {
  const found = input(given) ?? missing();
  if (found.case === "appendMessages") throw invalid("input", "expected prompt or messages");
  return checked(CountTokensRequestSchema, { ...common(given), input: found });
}

function newChoice(): Choice {
  return { text: "", reasoningText: "", tokenIds: [], logprobs: [], finished: undefined };
}

function message(role: Role, text: string): Message {
  return create(MessageSchema, { role, parts: [{ content: { case: "text", value: text } }] });
}

function common({ model, tools }: Input) {
  return { model, tools };
}

function input({ prompt, messages, append }: Input) {
  const given = [
    ...(prompt === undefined ? [] : [{ case: "prompt" as const, value: prompt }]),
    ...(messages === undefined ? [] : [{ case: "messages" as const, value: { messages } }]),
    ...(append === undefined ? [] : [{ case: "appendMessages" as const, value: { messages: append } }]),
  ];
  if (given.length > 1) throw invalid("input", `expected one of prompt, messages and append, got ${given.length}`);
  return given[0];
}

function missing(): never {
  throw invalid("input", "expected exactly one of prompt, messages and append");
}

function sampling({ maxTokens, sampling }: Turn): Turn["sampling"] {
  if (maxTokens === undefined) return sampling;
  if (sampling?.maxTokens !== undefined) throw invalid("max_tokens", "expected once, got it in sampling too");
  return { ...sampling, maxTokens } as Turn["sampling"];
}

function responseFormat({ jsonSchema, regex }: Turn) {
  if (regex !== undefined) return { case: "regex" as const, value: regex };
  if (jsonSchema === undefined) return undefined;
  return { case: "jsonSchema" as const, value: typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema) };
}

/** The message. Values out of range are found only when it is written, so it is written here. */
export function checked<S extends DescMessage>(schema: S, given: MessageInitShape<S>): MessageShape<S> {
  const request = create(schema, given);
  try {
    toBinary(schema, request);
  } catch (thrown) {
    throw invalid("request", String(thrown).slice(0, 200));
  }
  return request;
}
