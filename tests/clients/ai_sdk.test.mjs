// The AI SDK with @ai-sdk/openai (responses and chats) and @ai-sdk/anthropic.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { ASK, assertLoop, AT_GATEWAY, KEY, LOOP, MODEL, PARAMETERS, REPORT, TEXT, THOUGHT, tools, URL } from "./place.mjs";

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY || "none" });
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY || "none" });
const report = z.object({ city: z.string(), celsius: z.int() });
const MODELS = {
  responses: { model: openai.responses(MODEL), providerOptions: { openai: { store: false } } },
  "responses, stored": { model: openai.responses(MODEL), providerOptions: { openai: { store: true } } },
  chats: { model: openai.chat(MODEL) },
  messages: { model: anthropic(MODEL) },
};

function offered(calls) {
  const run = tools(calls);
  return Object.fromEntries(
    Object.entries(PARAMETERS).map(([name, schema]) => [
      name,
      tool({ description: name, inputSchema: jsonSchema(schema), execute: async (input) => run(name, input) }),
    ]),
  );
}

for (const [kind, { model, providerOptions }] of Object.entries(MODELS)) {
  const settings = { model, maxRetries: 0, ...(providerOptions && { providerOptions }) };

  test(`${kind}: a text, whole and streamed`, async () => {
    const found = await generateText({ ...settings, prompt: "hi" });
    assert.deepEqual([found.text, found.finishReason, found.usage.totalTokens], [TEXT, "stop", 50]);
    const stream = streamText({ ...settings, prompt: "hi" });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.deepEqual([text, (await stream.totalUsage).outputTokens], [TEXT, 10]);
  });

  test(`${kind}: tools work through four turns, whole`, async () => {
    const calls = [];
    const found = await generateText({ ...settings, prompt: ASK, tools: offered(calls), stopWhen: stepCountIs(6) });
    assert.deepEqual([found.text, found.steps.length], [LOOP, 4]);
    assertLoop(calls);
  });

  test(`${kind}: tools work through four turns, streamed, and the user goes on`, async () => {
    const calls = [];
    const stream = streamText({ ...settings, prompt: ASK, tools: offered(calls), stopWhen: stepCountIs(6) });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.ok(text.endsWith(LOOP), text);
    assertLoop(calls);
    const { messages } = await stream.response;
    const history = [{ role: "user", content: ASK }, ...messages, { role: "user", content: "And now?" }];
    const next = await generateText({ ...settings, messages: history });
    assert.equal(next.text, TEXT);
  });

  test(`${kind}: an object by its schema, whole and streamed`, async () => {
    const output = Output.object({ schema: report });
    assert.deepEqual((await generateText({ ...settings, prompt: "hi", output })).output, REPORT);
    const stream = streamText({ ...settings, prompt: "hi", output });
    let last;
    for await (const part of stream.partialOutputStream) last = part;
    assert.deepEqual([last, await stream.output], [REPORT, REPORT]);
  });

  test(`${kind}: a forced tool`, async () => {
    const save = tool({ description: "Save it.", inputSchema: report });
    const found = await generateText({ ...settings, prompt: "hi", tools: { save }, toolChoice: "required" });
    assert.deepEqual(found.toolCalls.map((call) => [call.toolName, call.input]), [["save", REPORT]]);
  });

  test(`${kind}: errors carry status and body`, async () => {
    const provider = kind === "messages" ? anthropic("none") : kind === "chats" ? openai.chat("none") : openai.responses("none");
    await assert.rejects(generateText({ ...settings, model: provider, prompt: "hi" }), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 404);
      assert.match(error.message, /none/);
      return true;
    });
  });
}

test("messages: thinking is told, and goes back with the tools' results", async () => {
  const calls = [];
  const found = await generateText({
    model: anthropic(MODEL),
    maxRetries: 0,
    maxOutputTokens: 2000,
    prompt: ASK,
    tools: offered(calls),
    stopWhen: stepCountIs(6),
    providerOptions: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
  });
  assert.deepEqual([found.text, found.steps[0].reasoningText], [LOOP, THOUGHT]);
  assertLoop(calls);
});

test("responses, with the client's own default: it names items by their ids, which a device does not store unasked", async () => {
  const asking = generateText({
    model: openai.responses(MODEL),
    maxRetries: 0,
    prompt: ASK,
    tools: offered([]),
    stopWhen: stepCountIs(6),
  });
  if (AT_GATEWAY) assert.equal((await asking).text, LOOP);
  else await assert.rejects(asking, /not found\. It was not stored \(`store: true` does that\)/);
});

test("embeddings", async () => {
  const { embeddings } = await embedMany({ model: openai.embedding(MODEL), values: ["abc"], maxRetries: 0 });
  assert.deepEqual(embeddings, [[3, 1]]);
});
