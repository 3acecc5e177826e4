/** Stores of an outbox that run everywhere: memory, and the IndexedDB of a browser. */

import { OutboxError } from "./errors.js";
import type { OutboxStore, Submission } from "./outbox.js";

/** Keeps submissions until the program or the page ends. */
export class MemoryStore implements OutboxStore {
  readonly #rows = new Map<string, Submission>();

  async add(submission: Submission, maxJobs: number): Promise<boolean> {
    if (this.#rows.has(submission.key)) return true;
    if (this.#rows.size >= maxJobs) return false;
    this.#rows.set(submission.key, submission);
    return true;
  }

  async list(): Promise<readonly Submission[]> {
    return [...this.#rows.values()];
  }

  async update(key: string, change: (found: Submission) => Submission): Promise<Submission | null> {
    const found = this.#rows.get(key);
    if (!found) return null;
    const changed = change(found);
    this.#rows.set(key, changed);
    return changed;
  }

  async remove(key: string): Promise<void> {
    this.#rows.delete(key);
  }

  async close(): Promise<void> {}
}

interface Row {
  readonly number: number;
  readonly key: string;
  readonly submission: Submission;
}

const ROWS = "submissions";
const BY_KEY = "key";

/** Keeps submissions in a browser's IndexedDB, which all pages of one origin share; they survive a restart. */
export class IndexedDBStore implements OutboxStore {
  readonly #database: Promise<IDBDatabase>;
  readonly #name: string;

  /** @param name The database's name, for one application. */
  constructor(name = "causeway-outbox") {
    this.#name = name;
    this.#database = this.#open();
    this.#database.catch(() => undefined); // each method reports it
  }

  add(submission: Submission, maxJobs: number): Promise<boolean> {
    return this.#within("readwrite", async (rows) => {
      if (await result(rows.index(BY_KEY).getKey(submission.key))) return true;
      if ((await result(rows.count())) >= maxJobs) return false;
      await result(rows.add({ key: submission.key, submission }));
      return true;
    });
  }

  list(): Promise<readonly Submission[]> {
    return this.#within("readonly", async (rows) => {
      const found: Row[] = await result(rows.getAll());
      return found.map((row) => row.submission);
    });
  }

  update(key: string, change: (found: Submission) => Submission): Promise<Submission | null> {
    return this.#within("readwrite", async (rows) => {
      const row: Row | undefined = await result(rows.index(BY_KEY).get(key));
      if (!row) return null;
      const submission = change(row.submission);
      await result(rows.put({ ...row, submission }));
      return submission;
    });
  }

  remove(key: string): Promise<void> {
    return this.#within("readwrite", async (rows) => {
      const number = await result(rows.index(BY_KEY).getKey(key));
      if (number !== undefined) await result(rows.delete(number));
    });
  }

  async close(): Promise<void> {
    (await this.#database).close();
  }

  async #open(): Promise<IDBDatabase> {
    try {
      const opening = indexedDB.open(this.#name, 1);
      opening.onupgradeneeded = (): void => {
        const rows = opening.result.createObjectStore(ROWS, { keyPath: "number", autoIncrement: true });
        rows.createIndex(BY_KEY, "key", { unique: true });
      };
      return await result(opening);
    } catch (error) {
      throw new OutboxError(`The database ${this.#name} cannot be opened: ${String(error)}`, { cause: error });
    }
  }

  /** Run `work` in a transaction, and wait until that is on the disk. */
  async #within<T>(mode: IDBTransactionMode, work: (rows: IDBObjectStore) => Promise<T>): Promise<T> {
    const database = await this.#database;
    try {
      const transaction = database.transaction(ROWS, mode, { durability: "strict" });
      const ended = new Promise<void>((resolve, reject) => {
        transaction.oncomplete = (): void => resolve();
        transaction.onabort = (): void => reject(transaction.error);
      });
      const [value] = await Promise.all([work(transaction.objectStore(ROWS)), ended]);
      return value;
    } catch (error) {
      throw new OutboxError(`The database ${this.#name} cannot be used: ${String(error)}`, { cause: error });
    }
  }
}

function result<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = (): void => resolve(request.result);
    request.onerror = (): void => reject(request.error);
  });
}
