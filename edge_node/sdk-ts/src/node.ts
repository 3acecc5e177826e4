/** The store of an outbox in Node: a folder of this application, with a file for each submission. */

/// <reference types="node" />

import { createHash } from "node:crypto";
import { mkdir, open, readdir, readFile, rename, rm } from "node:fs/promises";
import { join } from "node:path";

import { OutboxError } from "./errors.js";
import type { OutboxStore, Submission } from "./outbox.js";

interface Kept {
  readonly name: string;
  readonly submission: Submission;
}

/** Keeps submissions in a folder, readable by its owner alone. An added one survives a power cut.
 *
 * The folder is for one program at a time. A second one sends the same submissions under the same keys, and so becomes
 * no second job of them, but does not see what the first one adds.
 */
export class FileStore implements OutboxStore {
  readonly #folder: string;
  #rows: Promise<Map<string, Kept>> | null = null;
  #last: Promise<unknown> = Promise.resolve();
  #number = 0;

  /** @param folder The folder, for this application alone; it is created if it does not exist. */
  constructor(folder: string) {
    this.#folder = folder;
  }

  add(submission: Submission, maxJobs: number): Promise<boolean> {
    return this.#alone(async (rows) => {
      if (rows.has(submission.key)) return true;
      if (rows.size >= maxJobs) return false;
      const digest = createHash("sha256").update(submission.key).digest("hex");
      const name = `${String(++this.#number).padStart(12, "0")}-${digest.slice(0, 16)}.json`;
      await this.#write(name, submission);
      rows.set(submission.key, { name, submission });
      return true;
    });
  }

  list(): Promise<readonly Submission[]> {
    return this.#alone(async (rows) => [...rows.values()].map(({ submission }) => submission));
  }

  update(key: string, change: (found: Submission) => Submission): Promise<Submission | null> {
    return this.#alone(async (rows) => {
      const found = rows.get(key);
      if (!found) return null;
      const submission = change(found.submission);
      await this.#write(found.name, submission);
      rows.set(key, { ...found, submission });
      return submission;
    });
  }

  /** Delete a submission; its content is overwritten. */
  remove(key: string): Promise<void> {
    return this.#alone(async (rows) => {
      const found = rows.get(key);
      if (!found) return;
      const path = join(this.#folder, found.name);
      const file = await open(path, "r+");
      try {
        await file.writeFile(Buffer.alloc((await file.stat()).size));
        await file.sync();
      } finally {
        await file.close();
      }
      await rm(path, { force: true });
      rows.delete(key);
    });
  }

  async close(): Promise<void> {
    await this.#last;
    this.#rows = null;
  }

  /** Run `work` when all work before it has ended. */
  #alone<T>(work: (rows: Map<string, Kept>) => Promise<T>): Promise<T> {
    const running = this.#last.then(async () => {
      try {
        return await work(await (this.#rows ??= this.#read()));
      } catch (error) {
        this.#rows = null; // read again what is on the disk
        if (error instanceof OutboxError) throw error;
        throw new OutboxError(`${this.#folder} cannot be used: ${String(error)}`, { cause: error });
      }
    });
    this.#last = running.catch(() => undefined);
    return running;
  }

  async #read(): Promise<Map<string, Kept>> {
    await mkdir(this.#folder, { recursive: true, mode: 0o700 });
    const rows = new Map<string, Kept>();
    for (const name of (await readdir(this.#folder)).sort()) {
      const path = join(this.#folder, name);
      if (name.endsWith(".draft")) await rm(path, { force: true }); // the program ended while it wrote
      if (!name.endsWith(".json")) continue;
      const text = await readFile(path, "utf8");
      if (text.startsWith("\0")) {
        await rm(path, { force: true }); // the program ended while it deleted
        continue;
      }
      const submission = parse(text, path);
      rows.set(submission.key, { name, submission });
      this.#number = Math.max(this.#number, Number.parseInt(name, 10) || 0);
    }
    return rows;
  }

  /** Replace a file at once: a power cut leaves the old or the new one. */
  async #write(name: string, submission: Submission): Promise<void> {
    const path = join(this.#folder, name);
    const draft = `${path}.draft`;
    const file = await open(draft, "w", 0o600);
    try {
      await file.writeFile(JSON.stringify(submission));
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(draft, path);
    const folder = await open(this.#folder, "r");
    try {
      await folder.sync();
    } finally {
      await folder.close();
    }
  }
}

function parse(text: string, path: string): Submission {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    value = null;
  }
  if (typeof value === "object" && value !== null && "key" in value && "messages" in value && "options" in value) {
    return value as Submission;
  }
  throw new OutboxError(`${path} is not a submission: move it away.`);
}
