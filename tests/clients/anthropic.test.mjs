// @anthropic-ai/sdk: messages, its streaming helpers, its tool runner, parsed output, counts, models and errors.

import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

import { ASK, assertLoop, AT_GATEWAY, KEY, LOOP, MODEL, PARAMETERS, REPORT, TEXT, THOUGHT, tools, URL } from "./place.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY || "any", maxRetries: 0 });
const body = { model: MODEL, max_tokens: 100, messages: [{ role: "user", content: "hi" }] };
const report = z.object({ city: z.string(), celsius: z.int() });

/** Tools for the runner, which note their calls in `calls`. */
function runnable(calls) {
  const run = tools(calls);
  const tool = (name, inputSchema) =>
    betaZodTool({ name, description: name, inputSchema, run: async (input) => run(name, input) });
  return [
    tool("get_weather", z.object({ city: z.string() })),
    tool("add", z.object({ a: z.int(), b: z.int() })),
    tool("keep", z.object({ sum: z.int() })),
  ];
}

test("a message, whole", async () => {
  const message = await client.messages.create({ ...body, system: "Be kind." });
  assert.deepEqual(message.content.map((block) => [block.type, block.text]), [["text", TEXT]]);
  assert.deepEqual([message.stop_reason, message.usage.output_tokens], ["end_turn", 10]);
  assert.equal(message.usage.cache_read_input_tokens, 30);
});

test("a message, by the streaming helpers", async () => {
  const stream = client.messages.stream(body);
  const seen = { text: "", snapshot: "", events: [] };
  stream.on("text", (delta, snapshot) => Object.assign(seen, { text: seen.text + delta, snapshot }));
  stream.on("streamEvent", (event) => seen.events.push(event.type));
  const message = await stream.finalMessage();
  assert.equal(await stream.finalText(), TEXT);
  assert.deepEqual([seen.text, seen.snapshot], [TEXT, TEXT]);
  assert.deepEqual([seen.events[0], seen.events.at(-1)], ["message_start", "message_stop"]);
  assert.equal(message.stop_reason, "end_turn");
});

test("a message, as raw events", async () => {
  let text = "";
  for await (const event of await client.messages.create({ ...body, stream: true })) {
    if (event.type === "content_block_delta" && event.delta.type === "text_delta") text += event.delta.text;
  }
  assert.equal(text, TEXT);
});

for (const stream of [false, true]) {
  test(`the tool runner works through four turns, stream: ${stream}`, async () => {
    const calls = [];
    const runner = client.beta.messages.toolRunner({
      ...body,
      messages: [{ role: "user", content: ASK }],
      tools: runnable(calls),
      stream,
    });
    const turns = [];
    for await (const turn of runner) turns.push(stream ? await turn.finalMessage() : turn);
    assert.deepEqual(turns.map((turn) => turn.stop_reason), ["tool_use", "tool_use", "tool_use", "end_turn"]);
    assert.equal(turns.at(-1).content[0].text, LOOP);
    assertLoop(calls);
  });
}

test("thinking goes back with the tools' results", async () => {
  const messages = [{ role: "user", content: ASK }];
  const run = tools([]);
  const offered = Object.entries(PARAMETERS).map(([name, input_schema]) => ({ name, input_schema }));
  const thinking = { type: "enabled", budget_tokens: 1024 };
  let message;
  for (let turn = 0; turn < 4; turn++) {
    message = await client.messages.create({ ...body, max_tokens: 2000, messages, tools: offered, thinking });
    if (turn === 0) assert.deepEqual([message.content[0].type, message.content[0].thinking], ["thinking", THOUGHT]);
    const uses = message.content.filter((block) => block.type === "tool_use");
    const results = uses.map(({ id, name, input }) => ({ type: "tool_result", tool_use_id: id, content: run(name, input) }));
    messages.push({ role: "assistant", content: message.content }, { role: "user", content: results });
  }
  assert.equal(message.content.find((block) => block.type === "text").text, LOOP);
});

test("an answer is parsed by its schema", async () => {
  const message = await client.messages.parse({ ...body, output_config: { format: zodOutputFormat(report) } });
  assert.deepEqual(message.parsed_output, REPORT);
});

test("tokens are counted, by the scripted model in words", async () => {
  const messages = [{ role: "user", content: "one two three" }];
  assert.deepEqual((await client.messages.countTokens({ model: MODEL, messages })).input_tokens, 3);
});

test("models are listed", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes(MODEL), String(names));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test("errors are of the client's classes", async () => {
  const refused = (kind, type) => (error) => error instanceof kind && error.error.error.type === type;
  const { BadRequestError, NotFoundError, AuthenticationError, APIError } = Anthropic;
  await assert.rejects(client.messages.create({ ...body, max_tokens: 0 }), refused(BadRequestError, "invalid_request_error"));
  await assert.rejects(client.messages.create({ ...body, model: "none" }), refused(NotFoundError, "not_found_error"));
  const broken = client.messages.stream({ ...body, messages: [{ role: "user", content: "die" }] });
  await assert.rejects(broken.finalMessage(), APIError);
  if (!AT_GATEWAY) return;
  const stranger = new Anthropic({ baseURL: URL, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(stranger.messages.create(body), refused(AuthenticationError, "authentication_error"));
});

test("an aborted stream ends", async () => {
  const stream = client.messages.stream({ ...body, messages: [{ role: "user", content: "drip" }] });
  stream.on("text", () => stream.abort());
  await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
});
