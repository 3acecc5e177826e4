// openai: chats with its tool runner, and responses with state: chains, conversations, in the background, resumed.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { ASK, assertLoop, AT_GATEWAY, KEY, LOOP, MODEL, PARAMETERS, REPORT, TEXT, THOUGHT, tools, URL } from "./place.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY || "none", maxRetries: 0 });
const HI = [{ role: "user", content: "hi" }];
const report = z.object({ city: z.string(), celsius: z.int() });

test("a chat, whole and by the streaming helper", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: HI });
  assert.deepEqual([answer.choices[0].message.content, answer.usage.total_tokens], [TEXT, 50]);
  const stream = client.chat.completions.stream({ model: MODEL, messages: HI, stream_options: { include_usage: true } });
  assert.equal(await stream.finalContent(), TEXT);
  assert.equal((await stream.totalUsage()).completion_tokens, 10);
});

for (const stream of [false, true]) {
  test(`the tool runner of chats works through four turns, stream: ${stream}`, async () => {
    const calls = [];
    const run = tools(calls);
    const offered = Object.entries(PARAMETERS).map(([name, parameters]) => ({
      type: "function",
      function: { name, parameters, parse: JSON.parse, function: (input) => run(name, input) },
    }));
    const messages = [{ role: "user", content: ASK }];
    const runner = client.chat.completions.runTools({ model: MODEL, messages, tools: offered, stream });
    assert.equal(await runner.finalContent(), LOOP);
    assertLoop(calls);
  });
}

test("a chat's answer is parsed by its schema", async () => {
  const format = zodResponseFormat(report, "report");
  const answer = await client.chat.completions.parse({ model: MODEL, messages: HI, response_format: format });
  assert.deepEqual(answer.choices[0].message.parsed, REPORT);
});

test("a response, whole, streamed and parsed", async () => {
  const made = await client.responses.create({ model: MODEL, input: "hi" });
  assert.deepEqual([made.output_text, made.status, made.usage.input_tokens_details.cached_tokens], [TEXT, "completed", 30]);
  const stream = client.responses.stream({ model: MODEL, input: "hi" });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  assert.deepEqual([(await stream.finalResponse()).output_text, text], [TEXT, TEXT]);
  const format = { format: zodTextFormat(report, "report") };
  assert.deepEqual((await client.responses.parse({ model: MODEL, input: "hi", text: format })).output_parsed, REPORT);
});

for (const how of ["items", "chain", "streamed chain"]) {
  test(`a response's tools work through four turns: ${how}`, async () => {
    const calls = [];
    const run = tools(calls);
    const offered = Object.entries(PARAMETERS).map(([name, parameters]) => ({ type: "function", name, parameters, strict: false }));
    const settings = { model: MODEL, tools: offered, reasoning: { effort: "low" }, store: how !== "items" };
    let input = [{ role: "user", content: ASK }];
    let made;
    for (let turn = 0; turn < 4; turn++) {
      const previous = how !== "items" && made ? { previous_response_id: made.id } : {};
      const request = { ...settings, ...previous, input };
      made = how.startsWith("streamed")
        ? await client.responses.stream(request).finalResponse()
        : await client.responses.create(request);
      if (turn === 0) assert.equal(made.output[0].type, "reasoning");
      if (turn === 0) assert.equal(made.output[0].content?.[0]?.text ?? made.output[0].summary[0]?.text, THOUGHT);
      const asked = made.output.filter((item) => item.type === "function_call");
      const results = asked.map(({ call_id, name, arguments: text }) => ({
        type: "function_call_output",
        call_id,
        output: run(name, JSON.parse(text)),
      }));
      input = how === "items" ? [...input, ...made.output, ...results] : results;
    }
    assert.equal(made.output_text, LOOP);
    assertLoop(calls);
  });
}

test("a conversation goes on, and is read item by item", async () => {
  const conversation = await client.conversations.create({});
  for (const input of ["one", "two"]) await client.responses.create({ model: MODEL, input, conversation: conversation.id });
  const roles = [];
  for await (const item of client.conversations.items.list(conversation.id, { order: "asc" })) roles.push(item.role);
  assert.deepEqual(roles, ["user", "assistant", "user", "assistant"]);
  await client.conversations.delete(conversation.id);
  await assert.rejects(client.conversations.retrieve(conversation.id), OpenAI.NotFoundError);
});

test("a response in the background is polled to its end", async () => {
  let made = await client.responses.create({ model: MODEL, input: "hi", background: true });
  assert.equal(made.background, true);
  while (["queued", "in_progress"].includes(made.status)) made = await client.responses.retrieve(made.id);
  assert.deepEqual([made.status, made.output_text], ["completed", TEXT]);
});

test("a stream in the background is left and resumed", async () => {
  const first = [];
  for await (const event of await client.responses.create({ model: MODEL, input: "hi", background: true, stream: true })) {
    first.push(event);
    if (first.length === 2) break;
  }
  const { id } = first[0].response;
  const rest = [];
  const starting_after = first.at(-1).sequence_number;
  for await (const event of await client.responses.retrieve(id, { stream: true, starting_after })) rest.push(event);
  const numbers = [...first, ...rest].map((event) => event.sequence_number);
  assert.deepEqual(numbers, numbers.map((_, at) => at));
  assert.equal(rest.at(-1).type, "response.completed");
  const helped = client.responses.stream({ response_id: id, starting_after: 0 });
  assert.equal((await helped.finalResponse()).output_text, TEXT);
});

test("errors are of the client's classes", async () => {
  const refused = (kind, code) => (error) => error instanceof kind && (code === undefined || error.code === code);
  await assert.rejects(client.chat.completions.create({ model: "none", messages: HI }), refused(OpenAI.NotFoundError, "model_not_found"));
  const wrong = client.responses.create({ model: MODEL, input: "hi", temperature: 9 });
  await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(client.responses.retrieve(`resp_${"0".repeat(48)}`), OpenAI.NotFoundError);
  const dies = client.chat.completions.stream({ model: MODEL, messages: [{ role: "user", content: "die" }] });
  await assert.rejects(dies.finalContent(), OpenAI.APIError);
  if (!AT_GATEWAY) return;
  const stranger = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});
