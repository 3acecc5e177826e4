// The SDK against the daemon itself, whose engine fails as the text of a message says. $CAUSEWAY_URL names the daemon.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  Causeway,
  CausewayAPIError,
  CausewayTimeout,
  MemoryStore,
  Outbox,
} from "../../../edge_node/sdk-ts/dist/index.js";

const causeway = new Causeway();
const EDGE = /** @type {const} */ ({ tags: ["edge"] });

/** @type {(code: string, status?: number) => (error: unknown) => boolean} */
const refused = (code, status) => (error) =>
  error instanceof CausewayAPIError && error.code === code && (status === undefined || error.status === status);

test("an answer carries the daemon's decision, its record and the models", async () => {
  const { text, decision } = await causeway.chat("hello");
  assert.equal(text, "edge says so");
  assert.deepEqual([decision.route, decision.target, decision.cache], ["edge", "small", "bypass"]);
  assert.match(decision.policy, /^test@/);
  assert.equal(decision.degraded, false);
  assert.equal((await causeway.decision(decision.id))["id"], decision.id);
  assert.deepEqual((await causeway.models()).map((model) => model.id), ["auto", "small", "large"]);
});

test("a stream has its decision and usage", async () => {
  const stream = await causeway.chat("hello", { stream: true, tags: ["cloud"] });
  assert.equal(stream.decision.route, "cloud");
  const answer = await stream.answer();
  assert.equal(answer.text, "cloud says so");
  assert.deepEqual(answer.usage, { prompt_tokens: 7, completion_tokens: 3, total_tokens: 10 });
});

test("the same question comes from the cache, whole and streamed", async () => {
  await causeway.chat("cached", { temperature: 0 });
  const whole = await causeway.chat("cached", { temperature: 0 });
  const streamed = await (await causeway.chat("cached", { temperature: 0, stream: true })).answer();
  for (const { text, decision } of [whole, streamed]) {
    assert.deepEqual([text, decision.route, decision.cache], ["edge says so", "cache", "hit"]);
  }
});

test("hints reach the policy", async () => {
  assert.equal((await causeway.chat("hello", { prefer: "only_cloud" })).decision.route, "cloud");
  assert.equal((await causeway.chat("hello", { tags: ["private", "cloud"] })).decision.route, "edge");
  const both = causeway.chat("hello", { prefer: "only_cloud", tags: ["private"] });
  await assert.rejects(both, refused("no_route", 503));
});

test("route explains without running", async () => {
  const explained = /** @type {any} */ (await causeway.route("never run", { tags: ["cloud"] }));
  assert.equal(explained.decision.rule, "cloud-first");
});

test("errors have the daemon's codes, before the first byte and after it", async () => {
  await assert.rejects(causeway.chat("hello", { model: "nobody" }), refused("model_not_found", 404));
  const wrong = causeway.chat("hello", { temperature: 9 });
  await assert.rejects(wrong, (error) => error instanceof CausewayAPIError && error.param === "temperature");
  const stream = await causeway.chat("die", { ...EDGE, stream: true });
  await assert.rejects(stream.answer(), refused("engine_crashed", 200));
});

test("leaving a stream, and a deadline, stop the work", async () => {
  for await (const chunk of await causeway.chat("drip", { ...EDGE, stream: true })) {
    if (chunk.text) break;
  }
  const late = causeway.chat("stall", { ...EDGE, deadline_s: 0.5 });
  await assert.rejects(late, (error) => error instanceof CausewayAPIError && [503, 504].includes(error.status));
});

test("embeddings and completions", async () => {
  const embeddings = await causeway.embed(["abc"]);
  assert.deepEqual([embeddings.vectors, embeddings.decision.route], [[[3, 1]], "edge"]);
  assert.equal((await causeway.complete("hello")).text, "edge says so");
  const stream = await causeway.complete("hello", { stream: true });
  assert.equal((await stream.answer()).text, "edge says so");
});

test("files are uploaded, named and deleted", async () => {
  const file_id = await causeway.upload(new TextEncoder().encode("some words"), "a.txt");
  const parts = [{ type: "file", file: { file_id } }, { type: "text", text: "sum up" }];
  assert.equal((await causeway.chat([{ role: "user", content: parts }], EDGE)).text, "edge says so");
  await causeway.deleteFile(file_id);
  await assert.rejects(causeway.chat([{ role: "user", content: parts }], EDGE), refused("not_found", 404));
});

test("jobs are submitted, waited for and read", async () => {
  const options = /** @type {const} */ ({ key: "k1", priority: "interactive", deadline_s: 60 });
  const first = await causeway.submit("hello", options);
  assert.equal((await causeway.submit("hello", options)).id, first.id);
  const second = await causeway.submit("hello", EDGE);
  const found = new Map();
  for await (const job of causeway.results([first, second.id], { timeout_s: 60 })) found.set(job.id, job);
  assert.deepEqual(new Set(found.keys()), new Set([first.id, second.id]));
  const { answer } = found.get(first.id);
  assert.deepEqual([answer.text, answer.decision.route], ["edge says so", "edge"]);
  assert.deepEqual((await causeway.jobs({ limit: 1 })).map((job) => job.id), [second.id]);
  const late = await causeway.submit("hello", { not_before_s: 3600 });
  await assert.rejects(causeway.wait(late, { timeout_s: 0 }), CausewayTimeout);
  assert.equal((await causeway.cancel(late)).status, "cancelled");
  assert.ok((await causeway.wait(late)).ended);
  await causeway.purge(late);
  await assert.rejects(causeway.job(late.id), refused("not_found", 404));
  await assert.rejects(causeway.submit("hello", { webhook: "https://127.0.0.1/hook" }), refused("webhook_refused", 400));
});

test("an outbox becomes one job for each submission", async () => {
  const outbox = new Outbox(new MemoryStore(), causeway);
  const first = await outbox.submit("hello", { deadline_s: 3600, ...EDGE });
  const wrong = await outbox.submit("hello", { model: "nobody" });
  await outbox.submit("hello", { key: "again", ...EDGE });
  const found = new Map();
  for await (const [key, job] of outbox.results({ timeout_s: 60 })) found.set(key, job);
  assert.equal(found.get(first).answer.text, "edge says so");
  assert.deepEqual([found.get(wrong).status, found.get(wrong).code], ["failed", "model_not_found"]);
  await outbox.submit("something else", { key: "again", ...EDGE });
  for await (const [key, job] of outbox.results()) {
    assert.deepEqual([key, job.status, job.code], ["again", "failed", "idempotency_conflict"]);
  }
});
