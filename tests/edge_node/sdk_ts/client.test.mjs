// The client against a real server: what it sends, what it gives back, and what it does when things go wrong.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  Causeway,
  CausewayAPIError,
  CausewayConnectionBroken,
  CausewayError,
  CausewayTimeout,
  CausewayUnreachable,
} from "../../../edge_node/sdk-ts/dist/index.js";
import { answerWith, closedPort, DECISION, delta, DONE, event, message, raw, read, running, streamOf, USAGE } from "./device.mjs";

const REFUSAL = {
  error: { message: "too long", type: "invalid_request_error", code: "context_length_exceeded", param: "m" },
};

// --- what comes back ------------------------------------------------------------------------------------------------

test("a whole answer is typed and says where it came from", async (t) => {
  const device = await running(t);
  device.handler = answerWith(message("Alarm set."));
  const answer = await new Causeway(device.url).chat("wake me up at six");
  assert.deepEqual([answer.text, answer.finish_reason, answer.model], ["Alarm set.", "stop", "small"]);
  assert.deepEqual(answer.usage, USAGE);
  assert.deepEqual(answer.decision, DECISION);
  assert.deepEqual(device.requests, [{ model: "auto", messages: [{ role: "user", content: "wake me up at six" }] }]);
});

test("a stream gives chunks and their sum", async (t) => {
  const device = await running(t);
  const usage = event({ id: "a", model: "small", choices: [], usage: USAGE });
  const first = delta("", 0, null, { role: "assistant" });
  device.handler = streamOf([first, delta("Alarm"), delta(" set.", 0, "stop"), usage, DONE]);
  const stream = await new Causeway(device.url).chat("wake me up", { stream: true });
  assert.equal(stream.decision.route, "edge");
  const { chunks, answer } = await read(stream);
  assert.deepEqual(chunks.map((chunk) => chunk.text), ["", "Alarm", " set.", ""]);
  assert.deepEqual([answer.text, answer.finish_reason, answer.usage], ["Alarm set.", "stop", USAGE]);
  assert.ok(answer.decision.first_token_ms !== null && answer.total_ms >= answer.decision.first_token_ms);
  assert.deepEqual(device.requests[0].stream_options, { include_usage: true });
});

test("text survives any split of the bytes and any separator", async (t) => {
  const device = await running(t);
  const text = "a\u2028b\x85c\x0bd\u2029é🙂";
  const document = Buffer.from(`${delta(text, 0, "stop")}: a comment\r\n\r\n${DONE.replaceAll("\n", "\r\n")}`);
  device.handler = streamOf(Array.from(document, (_, at) => document.subarray(at, at + 1)));
  const { chunks } = await read(await new Causeway(device.url).chat("x", { stream: true }));
  assert.deepEqual(chunks.map((chunk) => chunk.text), [text]);
});

test("tool calls come whole, and are put together from pieces", async (t) => {
  const device = await running(t);
  const causeway = new Causeway(device.url);
  const call = { id: "c1", type: "function", function: { name: "set_alarm", arguments: '{"at": 6}' } };
  device.handler = answerWith(message(null, { tool_calls: [call] }));
  const answer = await causeway.chat("x", { tools: [{ type: "function" }] });
  assert.deepEqual(answer.tool_calls, [{ id: "c1", name: "set_alarm", arguments: '{"at": 6}' }]);
  assert.deepEqual([answer.text, device.requests[0].tools], ["", [{ type: "function" }]]);
  /** @type {(index: number, text: string, id?: string, name?: string) => string} */
  const part = (index, text, id, name) =>
    delta("", 0, null, { tool_calls: [{ index, ...(id && { id }), function: { arguments: text, ...(name && { name }) } }] });
  device.handler = streamOf([
    part(0, "", "c1", "a"),
    part(1, "{", "c2", "b"),
    part(0, '{"x"'),
    part(1, "}"),
    part(0, ":1}"),
    delta("", 0, "tool_calls"),
    DONE,
  ]);
  const { answer: streamed } = await read(await causeway.chat("x", { stream: true }));
  assert.deepEqual(streamed.tool_calls, [
    { id: "c1", name: "a", arguments: '{"x":1}' },
    { id: "c2", name: "b", arguments: "{}" },
  ]);
  assert.equal(streamed.finish_reason, "tool_calls");
});

test("several choices keep their places", async (t) => {
  const device = await running(t);
  device.handler = streamOf([delta("b", 1), delta("a", 0), delta("B", 1, "length"), delta("A", 0, "stop"), DONE]);
  const { answer } = await read(await new Causeway(device.url).chat("x", { n: 2, stream: true }));
  assert.deepEqual(answer.choices, [
    { text: "aA", tool_calls: [], finish_reason: "stop" },
    { text: "bB", tool_calls: [], finish_reason: "length" },
  ]);
});

test("the rest of the surface", async (t) => {
  const device = await running(t);
  const causeway = new Causeway(device.url);
  device.handler = answerWith({ choices: [{ index: 0, text: " there", finish_reason: "length" }] });
  const answer = await causeway.complete("hello", { max_tokens: 1 });
  assert.deepEqual([answer.text, answer.finish_reason], [" there", "length"]);
  device.handler = answerWith({ data: [{ embedding: [1, 0.5] }, { embedding: [0, 1] }], model: "e" });
  assert.deepEqual((await causeway.embed(["a", "b"])).vectors, [[1, 0.5], [0, 1]]);
  device.handler = answerWith({ data: [{ id: "small", owned_by: "edge" }] });
  assert.deepEqual(await causeway.models(), [{ id: "small", owned_by: "edge" }]);
  device.handler = answerWith({ rule: "fast-path" });
  assert.deepEqual(await causeway.route("x", { prefer: "only_on_device" }), { rule: "fast-path" });
  assert.deepEqual(await causeway.decision("dec_1"), { rule: "fast-path" });
  device.handler = answerWith({ id: "file-1" });
  assert.equal(await causeway.upload(new TextEncoder().encode("hi"), "a.txt", { expires_after_s: 60 }), "file-1");
  await causeway.deleteFile("file-1");
  device.handler = raw("turn on the lamp\n");
  assert.equal(await causeway.transcribe(new Blob(["RIFF"]), { language: "en" }), "turn on the lamp");
  assert.deepEqual(device.paths, [
    "POST /v1/completions",
    "POST /v1/embeddings",
    "GET /v1/models",
    "POST /v1/route",
    "GET /v1/decisions/dec_1",
    "POST /v1/files",
    "DELETE /v1/files/file-1",
    "POST /v1/audio/transcriptions",
  ]);
  assert.deepEqual(device.requests[0], { model: "auto", prompt: "hello", max_tokens: 1 });
  assert.deepEqual(device.requests[1], { model: "auto", input: ["a", "b"] });
  assert.match(device.requests[5], /name="expires_after\[seconds\]"\r\n\r\n60\r\n[^]*filename="a.txt"[^]*\r\n\r\nhi\r\n/);
});

// --- what is sent ---------------------------------------------------------------------------------------------------

test("our hints travel apart from OpenAI's fields", async (t) => {
  const device = await running(t);
  device.handler = answerWith(message("x"));
  const messages = [{ role: "system", content: "s" }, { role: "user", content: "u" }];
  const hints = /** @type {const} */ ({ prefer: "only_on_device", tags: ["private"], deadline_s: 1.5 });
  const causeway = new Causeway(device.url, { clock: () => 100 });
  const signal = new AbortController().signal;
  await causeway.chat(messages, { model: "large", ...hints, temperature: 0, extra: { top_k: 5 }, signal });
  const causewayHints = { prefer: "only_on_device", tags: ["private"], deadline_ms: 1500 };
  assert.deepEqual(device.requests, [{ model: "large", messages, temperature: 0, top_k: 5, causeway: causewayHints }]);
});

test("URL and key come from the environment, else from the arguments", async (t) => {
  const device = await running(t);
  device.handler = answerWith(message("x"));
  t.after(() => ["CAUSEWAY_URL", "CAUSEWAY_API_KEY"].forEach((name) => delete process.env[name]));
  await new Causeway(device.url).chat("x");
  await new Causeway(device.url, { api_key: "k" }).chat("x");
  process.env["CAUSEWAY_URL"] = `${device.url}/v1/`; // an OpenAI client's baseURL will do
  process.env["CAUSEWAY_API_KEY"] = "from-env";
  await new Causeway().chat("x");
  assert.deepEqual(device.headers.map((headers) => headers.authorization), [undefined, "Bearer k", "Bearer from-env"]);
  assert.deepEqual(new Set(device.paths), new Set(["POST /v1/chat/completions"]));
});

test("a job's body is the same at each attempt, its key in the header", async (t) => {
  const device = await running(t);
  device.handler = answerWith({ id: "job_1", status: "queued", webhook: "https://a/b" });
  const causeway = new Causeway(device.url);
  const options = /** @type {const} */ ({
    priority: "bulk",
    deadline_s: 60,
    not_before_s: 5,
    webhook: "https://a/b",
    key: "k",
    tags: ["private"],
  });
  const job = await causeway.submit("hello", options);
  assert.deepEqual([job.status, job.ended, job.answer], ["queued", false, null]);
  await causeway.submit("hello");
  assert.deepEqual(device.requests[0], {
    model: "auto",
    messages: [{ role: "user", content: "hello" }],
    priority: "bulk",
    deadline_ms: 60_000,
    not_before_ms: 5000,
    webhook: "https://a/b",
    causeway: { tags: ["private"] },
  });
  const keys = device.headers.map((headers) => headers["idempotency-key"]);
  assert.equal(keys[0], "k");
  assert.match(String(keys[1]), /^[0-9a-f]{32}$/);
});

test("an id stays one segment of the path", async (t) => {
  const device = await running(t);
  device.handler = answerWith({ id: "x", data: [] });
  const causeway = new Causeway(device.url);
  await causeway.decision("../models");
  await causeway.purge("../models");
  await causeway.jobs({ after: "x&limit=1" });
  const encoded = "..%2Fmodels";
  assert.deepEqual(device.paths, [
    `GET /v1/decisions/${encoded}`,
    `POST /v1/jobs/${encoded}/purge`,
    "GET /v1/jobs?limit=20&after=x%26limit%3D1",
  ]);
  for (const id of ["", ".", ".."]) await assert.rejects(causeway.job(id), /is not an id\./);
  assert.equal(device.paths.length, 3);
});

test("an option that was removed is refused before anything is sent", async (t) => {
  const device = await running(t);
  // @ts-expect-error The types refuse it, too.
  await assert.rejects(new Causeway(device.url).chat("x", { resume: "token" }), /`resume` was removed/);
  assert.deepEqual(device.paths, []);
});

// --- when it goes wrong ---------------------------------------------------------------------------------------------

for (const stream of [false, true]) {
  test(`an error keeps all that the device said, stream: ${stream}`, async (t) => {
    const device = await running(t);
    device.handler = answerWith(REFUSAL, 400, { "retry-after": "7" });
    const causeway = new Causeway(device.url);
    await assert.rejects(stream ? causeway.chat("x", { stream }) : causeway.chat("x"), (error) => {
      assert.ok(error instanceof CausewayAPIError && error instanceof CausewayError);
      assert.deepEqual([error.name, error.message, error.status], ["CausewayAPIError", "too long", 400]);
      const { type, code, param, retry_after_s } = error;
      assert.deepEqual([type, code, param, retry_after_s], ["invalid_request_error", "context_length_exceeded", "m", 7]);
      assert.deepEqual(error.decision, DECISION);
      return true;
    });
  });
}

test("a stranger's page is an error of the API, with any status", async (t) => {
  const device = await running(t);
  const causeway = new Causeway(device.url);
  const portal = { location: "https://portal.example/login" };
  for (const [handler, status] of /** @type {const} */ ([
    [raw("<html>Bad gateway</html>", 502), 502],
    [raw("[]", 502), 502],
    [raw(Buffer.from([0xff]), 502), 502],
    [raw("<html>Log in</html>"), 200],
    [raw("", 302, portal), 302],
  ])) {
    device.handler = handler;
    const expected = (/** @type {unknown} */ error) => error instanceof CausewayAPIError && error.status === status;
    await assert.rejects(causeway.chat("x"), expected);
    await assert.rejects(causeway.models(), expected);
  }
});

test("an error in the middle of a stream is thrown where it comes", async (t) => {
  const device = await running(t);
  const broken = { error: { message: "the engine died", type: "backend_error", code: "engine_crashed" } };
  device.handler = streamOf([delta("half"), event(broken), DONE]);
  const stream = await new Causeway(device.url).chat("x", { stream: true });
  /** @type {string[]} */
  const texts = [];
  await assert.rejects(
    async () => {
      for await (const chunk of stream) texts.push(chunk.text);
    },
    (error) => error instanceof CausewayAPIError && error.code === "engine_crashed" && error.status === 200,
  );
  assert.deepEqual(texts, ["half"]);
});

test("half an answer is never a whole one", async (t) => {
  const device = await running(t);
  for (const handler of [streamOf([delta("half")], "drop"), streamOf([delta("half")]), streamOf([], "drop")]) {
    device.handler = handler;
    const reading = async () => (await new Causeway(device.url).chat("x", { stream: true })).answer();
    await assert.rejects(reading, CausewayConnectionBroken);
  }
  device.handler = (request) => request.socket.destroy();
  await assert.rejects(new Causeway(device.url).chat("x"), CausewayConnectionBroken);
});

test("a stall ends in a timeout, before and in the answer", async (t) => {
  const device = await running(t);
  const causeway = new Causeway(device.url, { timeout_s: 0.2 });
  for (const handler of [() => {}, streamOf([], "stall"), streamOf([delta("half")], "stall")]) {
    device.handler = handler;
    const reading = async () => (await causeway.chat("x", { stream: true })).answer();
    await assert.rejects(reading, CausewayTimeout);
  }
});

test("a drip ends at the deadline", async (t) => {
  const device = await running(t);
  let now = 0;
  let drip = () => {};
  device.handler = (_, response) => (drip = () => void response.write(delta("x")), drip());
  const causeway = new Causeway(device.url, { clock: () => now });
  const stream = await causeway.chat("x", { deadline_s: 5, stream: true });
  const reading = async () => {
    for await (const _ of stream) {
      now += 3; // each chunk comes in time, all of them together do not
      drip();
    }
  };
  await assert.rejects(reading, (error) => {
    assert.ok(error instanceof CausewayTimeout);
    assert.match(error.message, /longer than its deadline of 5 s/);
    return true;
  });
  assert.equal(now, 9);
});

test("an unreachable device is named", async () => {
  const port = await closedPort();
  await assert.rejects(new Causeway(`http://127.0.0.1:${port}`).chat("x"), (error) => {
    assert.ok(error instanceof CausewayUnreachable);
    assert.match(error.message, new RegExp(`127\\.0\\.0\\.1:${port}: ECONNREFUSED`));
    return true;
  });
  await assert.rejects(new Causeway(`http://localhost:${port}`).chat("x"), CausewayUnreachable); // of several addresses
  await assert.rejects(new Causeway("http://127.0.0.1:9").chat("x"), (error) => {
    assert.ok(error instanceof CausewayUnreachable);
    assert.match(error.message, /bad port/); // fetch refuses some
    return true;
  });
});

test("a browser's error, which has no cause, says what to look at", async () => {
  const fetch = () => Promise.reject(new TypeError("Failed to fetch"));
  await assert.rejects(new Causeway("http://device", { fetch }).chat("x"), (error) => {
    assert.ok(error instanceof CausewayConnectionBroken);
    assert.match(error.message, /http:\/\/device broke: Failed to fetch\. Does the device run, and allow this page/);
    return true;
  });
});

test("a malformed URL or key is said before anything is sent", () => {
  for (const url of ["garbage", "ftp://device", "http://", "unix:///run/edge.sock", "http://a?b", "http://me@a"]) {
    assert.throws(() => new Causeway(url), /is not the URL of a device/);
  }
  assert.throws(() => new Causeway("", { api_key: "secret\n" }), /The API key has a line break/);
});

test("leaving the loop, or closing, stops the work", async (t) => {
  for (const leave of ["break", "close"]) {
    const device = await running(t);
    device.handler = streamOf([delta("a"), delta("b")], "stall");
    const stream = await new Causeway(device.url).chat("x", { stream: true });
    if (leave === "break") for await (const _ of stream) break;
    else await stream.close();
    await device.left;
  }
});

test("a signal cancels a call, with its reason", async (t) => {
  const device = await running(t);
  const causeway = new Causeway(device.url);
  const reason = new Error("the user left");
  device.handler = streamOf([delta("a")], "stall");
  const leaving = new AbortController();
  const stream = await causeway.chat("x", { stream: true, signal: leaving.signal });
  await assert.rejects(async () => {
    for await (const _ of stream) leaving.abort(reason);
  }, reason);
  await device.left;
  const before = AbortSignal.abort(reason);
  await assert.rejects(causeway.chat("x", { signal: before }), reason);
  await assert.rejects(causeway.wait("job_1", { signal: before }), reason);
  assert.equal(device.paths.length, 1);
});

// --- trying again ---------------------------------------------------------------------------------------------------

/** A client whose clock only its sleep moves. */
class Waiting {
  now = 0;
  /** @type {number[]} */
  waits = [];
  clock = () => this.now;
  sleep = async (/** @type {number} */ seconds) => {
    this.waits.push(seconds);
    this.now += seconds;
  };
}

/** @type {(busy: number, status?: number, retryAfter?: string | null) => import("./device.mjs").Handler} */
function busyThenWell(busy, status = 429, retryAfter = "2") {
  const [refuse, well] = [answerWith(REFUSAL, status, retryAfter === null ? {} : { "retry-after": retryAfter }), answerWith(message("at last"))];
  return (request, response) => (busy-- > 0 ? refuse : well)(request, response);
}

test("retries wait as long as the device says", async (t) => {
  for (const status of [429, 503]) {
    const [device, time] = [await running(t), new Waiting()];
    device.handler = busyThenWell(2, status);
    const causeway = new Causeway(device.url, { retries: 2, clock: time.clock, sleep: time.sleep });
    assert.equal((await causeway.chat("x", { deadline_s: 10 })).text, "at last");
    assert.deepEqual(time.waits, [2, 2]);
    assert.deepEqual(device.requests.map((body) => body.causeway.deadline_ms), [10_000, 8000, 6000]);
  }
});

for (const [name, busy, status, retryAfter, retries, deadline_s, asked] of /** @type {const} */ ([
  ["not asked for", 1, 429, "2", 0, null, 1],
  ["too often", 2, 429, "2", 1, null, 2],
  ["no word when", 1, 429, null, 5, null, 1],
  ["a date", 1, 429, "Wed, 21 Oct 2026 07:28:00 GMT", 5, null, 1],
  ["500", 1, 500, "2", 5, null, 1],
  ["400", 1, 400, "2", 5, null, 1],
  ["past the deadline", 1, 429, "2", 5, 2, 1],
])) {
  test(`nothing else is tried again: ${name}`, async (t) => {
    const [device, time] = [await running(t), new Waiting()];
    device.handler = busyThenWell(busy, status, retryAfter);
    const causeway = new Causeway(device.url, { retries, clock: time.clock, sleep: time.sleep });
    await assert.rejects(causeway.chat("x", { deadline_s }), CausewayAPIError);
    assert.deepEqual([device.requests.length, time.waits.length], [asked, asked - 1]);
  });
}
