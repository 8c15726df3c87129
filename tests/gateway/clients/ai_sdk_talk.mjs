// The Vercel AI SDK, unmodified but for baseURL, with three of its providers: turns, a stream, a tool, an object, a cancel.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { KVASIR_URL: url, KVASIR_KEY: apiKey, KVASIR_MODEL: name } = process.env;
const baseURL = `${url}/v1`;
const models = {
  "openai-compatible": createOpenAICompatible({
    name: "kvasir", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
  })(name),
  "openai (responses)": createOpenAI({ baseURL, apiKey })(name),
  "openai (chat)": createOpenAI({ baseURL, apiKey }).chat(name),
  anthropic: createAnthropic({ baseURL, apiKey })(name),
};
const weather = tool({
  description: "the weather of a place",
  inputSchema: z.object({ place: z.string() }),
  execute: async () => "sunny",
});

for (const [provider, model] of Object.entries(models)) {
  const options = { model, maxOutputTokens: 40, maxRetries: 0 };
  const cachedIn = (usage) => usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens;
  const kept = `${process.env.KVASIR_TOLD}.${provider}`;
  if (process.argv[2]) {
    const told = JSON.parse(readFileSync(kept, "utf8"));
    const again = await generateText({ ...options, messages: [...told, { role: "user", content: "And now?" }] });
    assert(cachedIn(again.usage) > 30, JSON.stringify(again.usage));
    console.log(`AI SDK, ${provider}: after kill -9, cached ${cachedIn(again.usage)}`);
    continue;
  }
  const messages = [{ role: "user", content: "My name is Anna." }];
  const first = await generateText({ ...options, messages });
  messages.push(...first.response.messages, { role: "user", content: "What is my name?" });
  const second = await generateText({ ...options, messages });
  assert.match(second.text, /Anna/);
  const cached = cachedIn(second.usage);
  assert(cached > 15, JSON.stringify(second.usage));

  writeFileSync(kept, JSON.stringify([...messages, ...second.response.messages]));
  let streamed = "";
  for await (const text of streamText({ ...options, messages }).textStream) streamed += text;
  assert.equal(streamed, second.text);

  const leaving = new AbortController();
  const left = streamText({ ...options, messages, abortSignal: leaving.signal, onError: () => {} });
  for await (const _ of left.textStream) leaving.abort();

  const done = await generateText({
    ...options, prompt: "What is the weather in Paris?", tools: { weather }, stopWhen: stepCountIs(2),
  });
  assert.equal(done.steps[0].toolCalls[0].toolName, "weather");
  assert.equal(done.steps.length, 2);

  const schema = z.object({ colour: z.enum(["red", "green"]) });
  if (provider !== "anthropic") {
    const { object } = await generateObject({ ...options, schema, prompt: "My favourite colour is red." });
    assert.equal(object.colour, "red");
  }
  console.log(`AI SDK, ${provider}: turns, stream, cancel, tool; cached ${cached}`);
}
