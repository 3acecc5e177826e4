/** An outbox of an application. */

import type { Job } from "./answers.js";
import type { Causeway, WaitOptions } from "./client.js";
import { Deadline, monotonic, sleep, type Sleep } from "./connection.js";
import { decodeJob } from "./decoding.js";
import { CausewayAPIError, CausewayError, CausewayUnreachable, OutboxError } from "./errors.js";
import { type JobOptions, type Messages, newKey, type RequestOptions } from "./request.js";

const UNAUTHORISED = [401, 403];
const LATER = [408, 425, 429]; // statuses of a temporary failure; the submission itself is valid
const KEY_IN_USE = "idempotency_conflict";

/** A stored submission. */
export interface Submission {
  /** The idempotency key. */
  readonly key: string;
  readonly messages: Messages;
  /** The options of `Causeway.submit`, without key and deadline. */
  readonly options: RequestOptions & JobOptions;
  /** Unix seconds; null: the device's default. */
  readonly deadline: number | null;
  /** The time left that was sent, in seconds; null: no try can have arrived. */
  readonly stated_s: number | null;
  /** The job's id on the device; null: the submission waits. */
  readonly job: string | null;
  /** The ended job of a submission that the device never accepted. */
  readonly refusal: { readonly status: string; readonly error: string; readonly code: string } | null;
}

/** Where an outbox keeps its submissions. Every method rejects with OutboxError if the store cannot be used. */
export interface OutboxStore {
  /** Store a submission durably, behind all others. Return false if that would be more than `maxJobs`.
   *
   * No-op if one with the same key exists.
   */
  add(submission: Submission, maxJobs: number): Promise<boolean>;
  /** Return the submissions, oldest first. */
  list(): Promise<readonly Submission[]>;
  /** Replace a submission by the one that `change` makes of it, at once, and return that; null if it is not there. */
  update(key: string, change: (found: Submission) => Submission): Promise<Submission | null>;
  /** Delete a submission. */
  remove(key: string): Promise<void>;
  close(): Promise<void>;
}

/** Options of an outbox. */
export interface OutboxOptions {
  /** Maximum number of submissions in the store. Default: 10,000. */
  max_jobs?: number;
  /** Returns Unix seconds; for tests. */
  clock?: () => number;
  /** Waits for a number of seconds; for tests. */
  sleep?: Sleep;
}

/** Chat requests that an application submits while no daemon is running, in a store of its own.
 *
 * A submission survives restarts of application and daemon, if the store does, becomes one job, and is kept until the
 * application has read its result.
 */
export class Outbox {
  readonly #maxJobs: number;
  readonly #clock: () => number;
  readonly #sleep: Sleep;
  #sending: Promise<unknown> = Promise.resolve();

  constructor(
    private readonly store: OutboxStore,
    private readonly causeway: Causeway,
    options: OutboxOptions = {},
  ) {
    this.#maxJobs = options.max_jobs ?? 10_000;
    this.#clock = options.clock ?? ((): number => Date.now() / 1000);
    this.#sleep = options.sleep ?? sleep;
  }

  /** Store a chat request of this application; `send` passes it to the device.
   *
   * A submission with the same `key` is the same one until its result is forgotten. After that, the same request
   * without a deadline gets the earlier job's answer while the device keeps it; any other request ends as `failed`
   * with the code `idempotency_conflict`. `deadline_s` counts from now, by the wall clock.
   *
   * @returns The key, under which `results` yields the result.
   * @throws OutboxError The store cannot be written, or is full.
   */
  async submit(messages: Messages, options: RequestOptions & JobOptions = {}): Promise<string> {
    const { key = newKey(), deadline_s, ...others } = options;
    const deadline = deadline_s == null ? null : this.#clock() + deadline_s;
    const kept = { key, messages, options: others, deadline, stated_s: null, job: null, refusal: null };
    // A copy, as each store makes it: later changes of the caller's objects are not part of the submission.
    if (!(await this.store.add(JSON.parse(JSON.stringify(kept)) as Submission, this.#maxJobs))) {
      throw new OutboxError(`The outbox is full: it holds ${this.#maxJobs} submissions.`);
    }
    return key;
  }

  /** Send all waiting submissions to the device, oldest first. They keep waiting if the device is unreachable.
   *
   * @returns The number of submissions that still wait.
   * @throws CausewayAPIError The device rejects the API key.
   * @throws OutboxError The store cannot be used.
   */
  async send(): Promise<number> {
    const sent = this.#sending.then(() => this.#sendWaiting());
    this.#sending = sent.catch(() => undefined); // the next call waits for this one, whatever becomes of it
    return sent;
  }

  /** Send all waiting submissions, and yield the key of each with its job when that has ended.
   *
   * A submission is forgotten when the next one is requested. An application that ends earlier gets it again.
   *
   * @throws CausewayTimeout Some jobs have not ended within `timeout_s`, which is of all of them together.
   * @throws CausewayAPIError The device rejects the API key.
   * @throws OutboxError The store cannot be used.
   */
  async *results(options: WaitOptions = {}): AsyncGenerator<readonly [key: string, job: Job], void> {
    const deadline = new Deadline(options.timeout_s ?? null, monotonic);
    for (;;) {
      await this.send();
      for (const submission of await this.store.list()) {
        const job = await this.#ended(submission);
        if (!job) continue;
        yield [submission.key, job];
        await this.store.remove(submission.key);
        deadline.restart();
      }
      const left = (await this.store.list()).length;
      if (!left) return;
      await this.#sleep(deadline.pause_s(`${left} submissions`), options.signal);
    }
  }

  /** Close the store; the client stays usable. */
  async close(): Promise<void> {
    await this.#sending;
    await this.store.close();
  }

  async #sendWaiting(): Promise<number> {
    const waiting = (await this.store.list()).filter(({ job, refusal }) => job === null && refusal === null);
    for (const [sent, submission] of waiting.entries()) {
      if (!(await this.#handOver(submission))) return waiting.length - sent;
    }
    return 0;
  }

  /** Submit a submission as a job, or record that it is refused permanently; return false if the device is
   * unreachable.
   */
  async #handOver(submission: Submission): Promise<boolean> {
    const { key } = submission;
    let left_s: number | null = null;
    if (submission.deadline !== null) {
      const now_s = submission.deadline - this.#clock();
      if (submission.stated_s === null && now_s <= 0) {
        const error = "the deadline passed before the device could be reached";
        return this.#refuse(key, { status: "expired", error, code: "deadline_exceeded" });
      }
      // Before sending: if the response is lost, the retry must have the same body, because its key requires that.
      const stated = await this.store.update(key, (found) => ({ ...found, stated_s: found.stated_s ?? now_s }));
      if (!stated) return true; // another page of this application has sent it and read the result
      left_s = stated.stated_s;
    }
    try {
      const { id } = await this.causeway.submit(submission.messages, { ...submission.options, key, deadline_s: left_s });
      await this.store.update(key, (found) => ({ ...found, job: id }));
      return true;
    } catch (error) {
      if (error instanceof CausewayUnreachable) {
        await this.store.update(key, (found) => ({ ...found, stated_s: submission.stated_s }));
      }
      return this.#judge(key, error);
    }
  }

  /** Return false for a temporary failure; record a permanent one. */
  async #judge(key: string, error: unknown): Promise<boolean> {
    if (!(error instanceof CausewayError) || error instanceof OutboxError) throw error;
    if (!(error instanceof CausewayAPIError)) return false;
    const { status, code } = error;
    if (UNAUTHORISED.includes(status)) throw error;
    // Below 400: a portal on the way answered, not the device.
    if (status < 400 || status >= 500 || LATER.includes(status)) return false;
    return this.#refuse(key, { status: "failed", error: reasonOf(error, key), code });
  }

  async #refuse(key: string, refusal: NonNullable<Submission["refusal"]>): Promise<boolean> {
    await this.store.update(key, (found) => (found.job === null ? { ...found, refusal } : found));
    return true;
  }

  /** Return the job of a submission that has ended or was refused; null otherwise, or if the device is unreachable. */
  async #ended(submission: Submission): Promise<Job | null> {
    const { job: job_id, refusal } = submission;
    if (refusal) return decodeJob({ status: refusal.status, error: { message: refusal.error, code: refusal.code } });
    if (job_id === null) return null;
    try {
      const job = await this.causeway.job(job_id);
      return job.ended ? job : null;
    } catch (error) {
      if (!(error instanceof CausewayError)) throw error;
      if (!(error instanceof CausewayAPIError)) return null;
      if (UNAUTHORISED.includes(error.status)) throw error;
      if (error.status !== 404 || !error.code) return null; // without a code it is not the device's
      const gone = { message: "the device no longer has this job", code: error.code };
      return decodeJob({ id: job_id, status: "expired", error: gone });
    }
  }
}

function reasonOf(error: CausewayAPIError, key: string): string {
  if (error.code !== KEY_IN_USE) return error.message;
  return (
    `the device still keeps a job that was submitted with the key ${JSON.stringify(key)} and another request or ` +
    `deadline: submit with a new key (${error.message})`
  );
}
