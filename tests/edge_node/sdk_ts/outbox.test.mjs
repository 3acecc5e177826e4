// The outbox: what an application submitted becomes one job each, whatever ends in between.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { link, mkdtemp, readdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { Causeway, CausewayAPIError, MemoryStore, Outbox, OutboxError } from "../../../edge_node/sdk-ts/dist/index.js";
import { FileStore } from "../../../edge_node/sdk-ts/dist/node.js";
import { answerWith, closedPort, raw, running } from "./device.mjs";

/** @param {import("node:test").TestContext} t */
async function folder(t) {
  const path = await mkdtemp(join(tmpdir(), "causeway-outbox-"));
  t.after(() => rm(path, { recursive: true }));
  return join(path, "outbox");
}

/** @param {Outbox} outbox */
async function ended(outbox) {
  const found = new Map();
  for await (const [key, job] of outbox.results({ timeout_s: 60 })) found.set(key, job);
  return found;
}

const AWAY = new Causeway(`http://127.0.0.1:${await closedPort()}`);

/** @type {[string, (t: import("node:test").TestContext) => Promise<() => import("../../../edge_node/sdk-ts/dist/index.js").OutboxStore>][]} */
const STORES = [
  [
    "memory",
    async () => {
      const store = new MemoryStore();
      return () => store;
    },
  ],
  [
    "files",
    async (t) => {
      const path = await folder(t);
      return () => new FileStore(path);
    },
  ],
];

for (const [kind, make] of STORES) {
  test(`${kind}: a try whose answer is lost is repeated with the same body`, async (t) => {
    const device = await running(t);
    const open = await make(t);
    let now = 1000;
    const outbox = new Outbox(open(), new Causeway(device.url), { clock: () => now });
    await outbox.submit("hello", { deadline_s: 60 });
    device.handler = (request) => request.socket.destroy();
    assert.equal(await outbox.send(), 1);
    now += 5;
    device.handler = answerWith({ id: "job_1", status: "queued" });
    assert.equal(await outbox.send(), 0);
    assert.deepEqual(device.requests[0], device.requests[1]);
    assert.equal(device.requests[0].deadline_ms, 60_000);
    assert.equal(new Set(device.headers.map((headers) => headers["idempotency-key"])).size, 1);
  });

  test(`${kind}: a deadline counts from the submission`, async (t) => {
    const device = await running(t);
    const open = await make(t);
    let now = 1000;
    const clock = () => now;
    device.handler = answerWith({ id: "job_1", status: "succeeded" });
    const away = new Outbox(open(), AWAY, { clock });
    const [late, early] = [await away.submit("a", { deadline_s: 30 }), await away.submit("b", { deadline_s: 3600 })];
    assert.equal(await away.send(), 2);
    await away.close();
    now += 60;
    const found = await ended(new Outbox(open(), new Causeway(device.url), { clock }));
    assert.deepEqual([found.get(late).status, found.get(late).code], ["expired", "deadline_exceeded"]);
    assert.equal(found.get(early).status, "succeeded");
    assert.equal(device.requests[0].deadline_ms, 3_540_000);
  });

  test(`${kind}: a result is told again unless the next one was asked for`, async (t) => {
    const device = await running(t);
    const open = await make(t);
    device.handler = answerWith({ id: "job_1", status: "succeeded" });
    for (let run = 0; run < 2; run++) {
      const outbox = new Outbox(open(), new Causeway(device.url));
      await outbox.submit("hello", { key: "k" });
      for await (const [key] of outbox.results({ timeout_s: 60 })) {
        assert.equal(key, "k");
        break;
      }
      await outbox.close();
    }
    assert.equal(device.paths.filter((path) => path === "POST /v1/jobs").length, 1);
  });

  test(`${kind}: two sends at once are one after the other`, async (t) => {
    const device = await running(t);
    const open = await make(t);
    device.handler = answerWith({ id: "job_1", status: "queued" });
    let now = 1000;
    const outbox = new Outbox(open(), new Causeway(device.url), { clock: () => now++ });
    for (const text of ["a", "b", "c"]) await outbox.submit(text, { deadline_s: 60 });
    assert.deepEqual(await Promise.all([outbox.send(), outbox.send()]), [0, 0]);
    assert.equal(device.requests.length, 3);
  });

  test(`${kind}: refusals for good, for now, and of the key`, async (t) => {
    const device = await running(t);
    const open = await make(t);
    const outbox = new Outbox(open(), new Causeway(device.url));
    await outbox.submit("hello", { key: "k" });
    /** @type {(status: number, code?: string) => void} */
    const refuse = (status, code = "x") => (device.handler = answerWith({ error: { message: "no", code } }, status));
    for (const status of [429, 503, 408]) {
      refuse(status);
      assert.equal(await outbox.send(), 1);
    }
    device.handler = (_, response) => response.end("<html>Log in</html>");
    assert.equal(await outbox.send(), 1);
    for (const status of [401, 403]) {
      refuse(status);
      await assert.rejects(outbox.send(), CausewayAPIError);
    }
    refuse(409, "idempotency_conflict");
    assert.equal(await outbox.send(), 0);
    const { status, code, error } = (await ended(outbox)).get("k");
    assert.deepEqual([status, code], ["failed", "idempotency_conflict"]);
    assert.match(error, /submitted with the key "k" and another request or deadline: submit with a new key \(no\)/);
  });

  test(`${kind}: it takes so many, and the same key once`, async (t) => {
    const outbox = new Outbox((await make(t))(), AWAY, { max_jobs: 1 });
    await outbox.submit("hello", { key: "k" });
    await outbox.submit("hello", { key: "k" });
    await assert.rejects(outbox.submit("hello again"), (error) => {
      return error instanceof OutboxError && /full: it holds 1/.test(error.message);
    });
  });
}

test("a job that the device has forgotten ends, one of a device that is away waits", async (t) => {
  const device = await running(t);
  const outbox = new Outbox(new MemoryStore(), new Causeway(device.url), {
    sleep: async () => {
      device.handler = answerWith({ error: { message: "no job", code: "not_found" } }, 404);
    },
  });
  await outbox.submit("hello", { key: "k" });
  device.handler = answerWith({ id: "job_1", status: "queued" });
  await outbox.send();
  device.handler = raw("<html>Not found</html>", 404); // a portal's
  const job = (await ended(outbox)).get("k");
  assert.deepEqual([job.id, job.status, job.error], ["job_1", "expired", "the device no longer has this job"]);
});

test("files are their owner's alone, keep their order, and end with their submission", async (t) => {
  const path = await folder(t);
  const outbox = new Outbox(new FileStore(path), AWAY);
  for (let number = 0; number < 12; number++) await outbox.submit("a secret", { key: `k${number}` });
  assert.equal((await stat(path)).mode & 0o777, 0o700);
  for (const name of await readdir(path)) assert.equal((await stat(join(path, name))).mode & 0o777, 0o600);
  const again = new FileStore(path);
  assert.deepEqual((await again.list()).map(({ key }) => key), Array.from({ length: 12 }, (_, number) => `k${number}`));
  await again.remove("k3");
  assert.equal((await readdir(path)).length, 11);
});

test("what an ended program left half done is no submission, what is not ours is said", async (t) => {
  const path = await folder(t);
  const outbox = new Outbox(new FileStore(path), AWAY);
  await outbox.submit("hello", { key: "k" });
  await writeFile(join(path, "000000000002-a.json.draft"), '{"key": "half');
  await writeFile(join(path, "000000000003-a.json"), "\0\0\0\0");
  assert.deepEqual((await new FileStore(path).list()).map(({ key }) => key), ["k"]);
  assert.equal((await readdir(path)).length, 1);
  await writeFile(join(path, "000000000004-a.json"), "no submission");
  await assert.rejects(new FileStore(path).list(), /000000000004-a\.json is not a submission: move it away\./);
  await rm(join(path, "000000000004-a.json"));
  await writeFile(`${path}-file`, "");
  await assert.rejects(new FileStore(`${path}-file`).list(), (error) => error instanceof OutboxError);
});

test("a program that is killed while it submits keeps each submission that it was told of", async (t) => {
  const path = await folder(t);
  const program = `
    import { Causeway, Outbox } from ${JSON.stringify(import.meta.resolve("../../../edge_node/sdk-ts/dist/index.js"))};
    import { FileStore } from ${JSON.stringify(import.meta.resolve("../../../edge_node/sdk-ts/dist/node.js"))};
    const outbox = new Outbox(new FileStore(${JSON.stringify(path)}), new Causeway("http://127.0.0.1:9"));
    for (let number = 0; ; number++) process.stdout.write((await outbox.submit("hello", { key: String(number) })) + "\\n");
  `;
  const child = spawn(process.execPath, ["--input-type=module", "-e", program], { stdio: ["ignore", "pipe", "inherit"] });
  let told = "";
  for await (const part of child.stdout) {
    told += part;
    if (told.split("\n").length > 20) break;
  }
  child.kill("SIGKILL");
  if (child.exitCode === null && child.signalCode === null) await once(child, "exit");
  const kept = new Set((await new FileStore(path).list()).map(({ key }) => key));
  const keys = told.split("\n").slice(0, -1);
  assert.deepEqual(keys.filter((key) => !kept.has(key)), []);
  assert.ok(keys.length >= 20);
});

test("the content of a deleted submission is overwritten before its file goes", async (t) => {
  const path = await folder(t);
  const outbox = new Outbox(new FileStore(path), AWAY);
  await outbox.submit("a secret", { key: "k" });
  const [name] = await readdir(path);
  await link(join(path, String(name)), `${path}-seen`);
  await new FileStore(path).remove("k");
  assert.match(await readFile(`${path}-seen`, "utf8"), /^\0+$/);
});
