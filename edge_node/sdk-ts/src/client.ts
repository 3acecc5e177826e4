/** The client of a Causeway device. */

import type { Answer, Chunk, Decision, Embeddings, Job, Model } from "./answers.js";
import { Address, Deadline, type Exchange, type Fetch, isAway, monotonic, retryPause, type Sleep } from "./connection.js";
import { sleep } from "./connection.js";
import { decodeAnswer, decodeDocument, decodeEmbeddings, decodeError, decodeJob, decodeJobs } from "./decoding.js";
import { decodeModels, type ReadResponse, StreamDecoder } from "./decoding.js";
import { CausewayConnectionBroken, CausewayTimeout } from "./errors.js";
import { buildChatRequest, buildJobRequest, buildRequest, buildTranscriptionRequest } from "./request.js";
import { buildUploadRequest, type Bytes, type CallOptions, itemPath, type JobOptions } from "./request.js";
import type { JSONObject, Messages, Request, RequestOptions } from "./request.js";

/** Options of a client. */
export interface CausewayOptions {
  /** Bearer key of the device. Default: $CAUSEWAY_API_KEY, else none. */
  api_key?: string;
  /** Seconds to wait for an answer, or for the next chunk, if a request has no `deadline_s`. Default: 120. */
  timeout_s?: number;
  /** Maximum number of repetitions of a request after a 429 or 503 with Retry-After. Default: 0. */
  retries?: number;
  /** Sends the requests. Default: the global `fetch`. */
  fetch?: Fetch;
  /** Returns monotonic seconds; for tests. */
  clock?: () => number;
  /** Waits for a number of seconds; for tests. */
  sleep?: Sleep;
}

/** Options of `wait` and `results`. */
export interface WaitOptions extends CallOptions {
  /** Seconds to wait; null for no limit. */
  timeout_s?: number | null;
}

type Whole = RequestOptions & CallOptions & { stream?: false };
type Streamed = RequestOptions & CallOptions & { stream: true };
type Either = RequestOptions & CallOptions & { stream?: boolean };

/** The chunks of one answer as they arrive. Leaving the loop over them, or `close`, cancels the request.
 *
 * Iterating throws CausewayAPIError (the device ended the answer with an error), CausewayTimeout, or
 * CausewayConnectionBroken (the answer is incomplete). A stream that is not read to its end has to be closed.
 */
export class Stream implements AsyncIterable<Chunk> {
  readonly #exchange: Exchange;
  readonly #decoder: StreamDecoder;
  readonly #chunks: AsyncGenerator<Chunk, void>;

  constructor(exchange: Exchange, decoder: StreamDecoder, deadline: Deadline) {
    this.#exchange = exchange;
    this.#decoder = decoder;
    this.#chunks = this.#read(deadline);
  }

  /** The target that answers and the reason; known before the first chunk. `first_token_ms` follows at the first token. */
  get decision(): Decision {
    return this.#decoder.decision;
  }

  /** Read to the end, and return all chunks as one answer, including those that were iterated over before. */
  async answer(): Promise<Answer> {
    for await (const _ of this);
    return this.#decoder.answer();
  }

  /** Close the connection; the device and the cloud stop generating. */
  async close(): Promise<void> {
    this.#exchange.close();
    await this.#chunks.return();
  }

  [Symbol.asyncIterator](): AsyncGenerator<Chunk, void> {
    return this.#chunks;
  }

  async *#read(deadline: Deadline): AsyncGenerator<Chunk, void> {
    try {
      for (let received = await this.#exchange.read(); received; received = await this.#exchange.read()) {
        yield* this.#decoder.feed(received);
        deadline.check();
      }
    } finally {
      this.#exchange.close();
    }
    if (!this.#decoder.done) {
      throw new CausewayConnectionBroken("The stream ended before the answer was complete.");
    }
  }
}

/** A client of one Causeway device.
 *
 * Every method throws CausewayAPIError (the device refused or failed), CausewayUnreachable (nothing was sent),
 * CausewayTimeout, or CausewayConnectionBroken.
 */
export class Causeway {
  readonly #address: Address;
  readonly #retries: number;
  readonly #clock: () => number;
  readonly #sleep: Sleep;

  /** Prepare a client; no connection is opened before the first request.
   *
   * @param url `http://HOST:PORT`. Default: $CAUSEWAY_URL, else http://127.0.0.1:8080.
   * @throws CausewayError The URL or the key is malformed.
   */
  constructor(url = "", options: CausewayOptions = {}) {
    const send: Fetch = options.fetch ?? ((target, init) => fetch(target, init));
    this.#address = new Address(url, options.api_key ?? "", options.timeout_s ?? 120, send);
    this.#retries = options.retries ?? 0;
    this.#clock = options.clock ?? monotonic;
    this.#sleep = options.sleep ?? sleep;
  }

  /** Answer a text or a conversation (`POST /v1/chat/completions`).
   *
   * @returns The answer, or with `stream` an open stream.
   */
  chat(messages: Messages, options?: Whole): Promise<Answer>;
  chat(messages: Messages, options: Streamed): Promise<Stream>;
  async chat(messages: Messages, { signal, stream, ...options }: Either = {}): Promise<Answer | Stream> {
    return this.#generate(buildChatRequest("/v1/chat/completions", messages, options, stream), stream, signal);
  }

  /** Continue a text (`POST /v1/completions`).
   *
   * @returns The answer, or with `stream` an open stream.
   */
  complete(prompt: string, options?: Whole): Promise<Answer>;
  complete(prompt: string, options: Streamed): Promise<Stream>;
  async complete(prompt: string, { signal, stream, ...options }: Either = {}): Promise<Answer | Stream> {
    return this.#generate(buildRequest("/v1/completions", { prompt }, options, stream), stream, signal);
  }

  /** Compute embedding vectors, one per text, in the order of the texts (`POST /v1/embeddings`). */
  async embed(
    texts: string | readonly string[],
    { signal, ...options }: RequestOptions & CallOptions = {},
  ): Promise<Embeddings> {
    return decodeEmbeddings(await this.#fetch(buildRequest("/v1/embeddings", { input: texts }, options), signal));
  }

  /** Transcribe audio (`POST /v1/audio/transcriptions`); all of it stays on the device.
   *
   * @param audio The bytes of a WAV file, or of another format that the device decodes.
   * @returns The transcript; "" without speech.
   */
  async transcribe(audio: Bytes, options: CallOptions & { language?: string } = {}): Promise<string> {
    const request = buildTranscriptionRequest(audio, options.language ?? "");
    return (await this.#fetch(request, options.signal)).text.replace(/\n+$/, "");
  }

  /** Upload a file, so that later requests can name it instead of sending it again (`POST /v1/files`).
   *
   * @param content The bytes of a text, an image or audio.
   * @param filename Its name, which is shown to models; its extension gives the format if the bytes do not.
   * @returns The file's id, for a part such as `{type: "file", file: {file_id: id}}`.
   */
  async upload(
    content: Bytes,
    filename = "file",
    options: CallOptions & { expires_after_s?: number } = {},
  ): Promise<string> {
    const request = buildUploadRequest(content, filename, options.expires_after_s ?? null);
    return String((await this.#document(request, options.signal))["id"] ?? "");
  }

  /** Delete an uploaded file (`DELETE /v1/files/{id}`). Running answers and jobs keep it. */
  async deleteFile(file_id: string, { signal }: CallOptions = {}): Promise<void> {
    await this.#fetch({ path: itemPath("/v1/files", file_id), method: "DELETE" }, signal);
  }

  /** Explain the routing of a chat request, without running it (`POST /v1/route`).
   *
   * @returns The cache plan, the decision with its reasons, estimates, and the snapshot of signals.
   */
  async route(messages: Messages, { signal, ...options }: RequestOptions & CallOptions = {}): Promise<JSONObject> {
    return this.#document(buildChatRequest("/v1/route", messages, options), signal);
  }

  /** Read the record of a past answer, attempt by attempt (`GET /v1/decisions/{id}`), without its content.
   *
   * @param decision_id `Decision.id` of an answer.
   */
  async decision(decision_id: string, { signal }: CallOptions = {}): Promise<JSONObject> {
    return this.#document({ path: itemPath("/v1/decisions", decision_id), method: "GET" }, signal);
  }

  /** Erase what a device stores of this client, or of another, with the right to (`DELETE /v1/me/data`).
   *
   * @returns The signed receipt.
   */
  async erase(client = "", { signal }: CallOptions = {}): Promise<JSONObject> {
    const query = client && `?client=${encodeURIComponent(client)}`;
    return this.#document({ path: `/v1/me/data${query}`, method: "DELETE" }, signal);
  }

  /** List the names that `model` accepts: `auto` first, then the policy's targets (`GET /v1/models`). */
  async models({ signal }: CallOptions = {}): Promise<Model[]> {
    return decodeModels(await this.#document({ path: "/v1/models", method: "GET" }, signal));
  }

  /** Submit a chat request that may be answered later (`POST /v1/jobs`).
   *
   * When this resolves, the job is on the device's disk, also without a network. `deadline_s` is the job's.
   *
   * @returns The job, to be passed to `wait` or `results`.
   */
  async submit(
    messages: Messages,
    { signal, ...options }: RequestOptions & JobOptions & CallOptions = {},
  ): Promise<Job> {
    return decodeJob(await this.#document(buildJobRequest(messages, options), signal));
  }

  /** Read a job, with its answer if it has one (`GET /v1/jobs/{id}`). */
  async job(job_id: string, { signal }: CallOptions = {}): Promise<Job> {
    return decodeJob(await this.#document({ path: itemPath("/v1/jobs", job_id), method: "GET" }, signal));
  }

  /** List this client's jobs, newest first (`GET /v1/jobs`).
   *
   * @param options `limit`: up to 100, by default 20; `after`: the id of the last job of the previous page.
   */
  async jobs(options: CallOptions & { limit?: number; after?: string } = {}): Promise<Job[]> {
    const page = new URLSearchParams({ limit: String(options.limit ?? 20) });
    if (options.after) page.set("after", options.after);
    return decodeJobs(await this.#document({ path: `/v1/jobs?${page}`, method: "GET" }, options.signal));
  }

  /** Wait until a job has ended, also while the device restarts.
   *
   * @returns The ended job: check `status` before `answer`.
   * @throws CausewayTimeout The job has not ended within `timeout_s`.
   */
  async wait(job: Job | string, options: WaitOptions = {}): Promise<Job> {
    for await (const ended of this.results([job], options)) return ended;
    throw new CausewayTimeout("The job has not ended in time.");
  }

  /** Yield each of the jobs when it has ended, in the order in which they end.
   *
   * @throws CausewayTimeout Some jobs have not ended within `timeout_s`, which is of all of them together.
   */
  async *results(jobs: readonly (Job | string)[], options: WaitOptions = {}): AsyncGenerator<Job, void> {
    const left = new Set(jobs.map(idOf));
    const deadline = new Deadline(options.timeout_s ?? null, this.#clock);
    while (left.size) {
      for (const job_id of left) {
        const job = await this.#jobUnlessAway(job_id, options.signal);
        if (!job) break;
        if (!job.ended) continue;
        left.delete(job_id);
        deadline.restart();
        yield job;
      }
      if (left.size) await this.#sleep(deadline.pause_s(`${left.size} jobs`), options.signal);
    }
  }

  /** Cancel a job that has not ended (`DELETE /v1/jobs/{id}`). */
  async cancel(job: Job | string, options: CallOptions = {}): Promise<Job> {
    return this.#changeJob("", "DELETE", job, options);
  }

  /** Queue a dead letter of a device again (`POST /v1/jobs/{id}/retry`). */
  async retry(job: Job | string, options: CallOptions = {}): Promise<Job> {
    return this.#changeJob("/retry", "POST", job, options);
  }

  /** Delete a job of a device that has ended, with its answer (`POST /v1/jobs/{id}/purge`). */
  async purge(job: Job | string, options: CallOptions = {}): Promise<Job> {
    return this.#changeJob("/purge", "POST", job, options);
  }

  async #changeJob(part: string, method: "POST" | "DELETE", job: Job | string, options: CallOptions): Promise<Job> {
    return decodeJob(await this.#document({ path: itemPath("/v1/jobs", idOf(job)) + part, method }, options.signal));
  }

  async #jobUnlessAway(job_id: string, signal: AbortSignal | undefined): Promise<Job | null> {
    try {
      return await this.job(job_id, signal ? { signal } : {});
    } catch (error) {
      if (!isAway(error)) throw error;
      return null;
    }
  }

  async #generate(
    request: Request,
    stream: boolean | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Answer | Stream> {
    const started = this.#clock();
    if (!stream) return decodeAnswer(await this.#fetch(request, signal), this.#clock() - started);
    const [exchange, deadline] = await this.#open(request, signal);
    const decoder = new StreamDecoder(exchange.status, exchange.headers, deadline.started, this.#clock);
    return new Stream(exchange, decoder, deadline);
  }

  async #document(request: Request, signal: AbortSignal | undefined): Promise<JSONObject> {
    return decodeDocument(await this.#fetch(request, signal));
  }

  /** Return the response, its body read. */
  async #fetch(request: Request, signal: AbortSignal | undefined): Promise<ReadResponse> {
    const [exchange] = await this.#open(request, signal);
    return { status: exchange.status, headers: exchange.headers, text: await exchange.text() };
  }

  /** Return a successful response, its body not yet read; retries if the device asks for that. */
  async #open(request: Request, signal: AbortSignal | undefined): Promise<[Exchange, Deadline]> {
    const deadline = new Deadline(request.deadline_s ?? null, this.#clock);
    for (let attempts = 0; ; attempts++) {
      try {
        return [await this.#send(request, deadline.left_s(), signal), deadline];
      } catch (error) {
        const pause_s = retryPause(error, attempts, this.#retries, deadline.left_s());
        if (pause_s === null) throw error;
        await this.#sleep(pause_s, signal);
      }
    }
  }

  async #send(request: Request, left_s: number | null, signal: AbortSignal | undefined): Promise<Exchange> {
    const exchange = await this.#address.send(request, left_s, signal);
    const { status, headers } = exchange;
    if (status >= 200 && status < 300) return exchange;
    throw decodeError({ status, headers, text: await exchange.text() });
  }
}

function idOf(job: Job | string): string {
  return typeof job === "string" ? job : job.id;
}
