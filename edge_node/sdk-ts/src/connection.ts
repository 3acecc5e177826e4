/** The address of the device, the time limits of requests, and the translation of `fetch`'s errors. */

import { CausewayAPIError, CausewayConnectionBroken, CausewayError } from "./errors.js";
import { CausewayTimeout, CausewayUnreachable } from "./errors.js";
import { encode, type Request } from "./request.js";

const DEFAULT_URL = "http://127.0.0.1:8080";
const GRACE_S = 1.0; // grace period past a deadline: the device's own error is more specific
const POLL_S = 0.1; // interval of checking a job, which grows
const MAX_POLL_S = 2.0;
const MAX_TIMER_MS = 2 ** 31 - 1; // a longer timer would fire at once
const RETRIED_STATUSES = [429, 503];
const EXPIRED = Symbol("expired");

export type Fetch = (url: string, init: RequestInit) => Promise<Response>;
/** Waits for a number of seconds. Rejects with the signal's reason when that is aborted. */
export type Sleep = (seconds: number, signal?: AbortSignal) => Promise<void>;

/** Return monotonic seconds. */
export function monotonic(): number {
  return performance.now() / 1000;
}

export function sleep(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const end = (): void => {
      signal?.removeEventListener("abort", stop);
      resolve();
    };
    const timer = setTimeout(end, Math.min(seconds * 1000, MAX_TIMER_MS));
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}

/** A device's URL, with the headers and the timeout of every request to it. */
export class Address {
  readonly url: string;
  readonly #headers: Readonly<Record<string, string>>;

  /** Resolve `url`, else $CAUSEWAY_URL, else the default port of this machine. Throws CausewayError. */
  constructor(
    url: string,
    apiKey: string,
    readonly timeout_s: number,
    private readonly fetch: Fetch,
  ) {
    this.url = deviceURL(url || environment("CAUSEWAY_URL") || DEFAULT_URL);
    const key = apiKey || environment("CAUSEWAY_API_KEY");
    if (!/^[\x20-\x7e]*$/.test(key)) {
      throw new CausewayError("The API key has a line break or another character that a header cannot carry.");
    }
    this.#headers = key ? { authorization: `Bearer ${key}` } : {};
  }

  /** Send a request and return the exchange with the head of its response. `left_s`: seconds until its deadline. */
  async send(request: Request, left_s: number | null, signal: AbortSignal | undefined): Promise<Exchange> {
    const exchange = new Exchange(this.url, left_s === null ? this.timeout_s : left_s + GRACE_S, signal);
    const { headers, body } = encode(request, left_s);
    const init: RequestInit = {
      method: request.method,
      headers: { ...this.#headers, ...headers },
      body: body ?? null,
      signal: exchange.signal,
      redirect: "manual", // a device redirects nothing; a portal on the way does
      credentials: "omit",
      cache: "no-store",
    };
    await exchange.open(() => this.fetch(this.url + request.path, init));
    return exchange;
  }
}

/** A request and its response. Each wait for the response, or for more of it, takes at most the timeout. */
export class Exchange {
  status = 0;
  headers = new Headers();
  readonly #url: string;
  readonly #timeout_s: number;
  readonly #caller: AbortSignal | undefined;
  readonly #controller = new AbortController();
  readonly #forward = (): void => this.#controller.abort(this.#caller?.reason);
  #reader: ReadableStreamDefaultReader<Uint8Array> | null = null;
  #opened = false;

  constructor(url: string, timeout_s: number, caller: AbortSignal | undefined) {
    this.#url = url;
    this.#timeout_s = timeout_s;
    this.#caller = caller;
    if (caller?.aborted) this.#forward();
    else caller?.addEventListener("abort", this.#forward, { once: true });
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  async open(fetching: () => Promise<Response>): Promise<void> {
    const response = await this.#within(fetching);
    this.#opened = true;
    this.status = response.status; // 0: a browser hides the status of a redirect
    this.headers = response.headers;
    this.#reader = response.body?.getReader() ?? null;
    if (!this.#reader) this.close();
  }

  /** Return the next bytes of the body; null at its end. */
  async read(): Promise<Uint8Array | null> {
    const reader = this.#reader;
    if (!reader) return null;
    const { done, value } = await this.#within(() => reader.read());
    if (!done) return value;
    this.#reader = null;
    this.close();
    return null;
  }

  /** Read the body to its end. */
  async text(): Promise<string> {
    const decoder = new TextDecoder();
    let text = "";
    for (let bytes = await this.read(); bytes; bytes = await this.read()) text += decoder.decode(bytes, { stream: true });
    return text + decoder.decode();
  }

  /** Close the connection, unless the body was read to its end; the device and the cloud stop generating. */
  close(): void {
    this.#caller?.removeEventListener("abort", this.#forward);
    if (this.#reader) this.#controller.abort();
    this.#reader = null;
  }

  async #within<T>(waiting: () => Promise<T>): Promise<T> {
    const expire = (): void => this.#controller.abort(EXPIRED);
    const timer = setTimeout(expire, Math.min(this.#timeout_s * 1000, MAX_TIMER_MS));
    try {
      return await waiting();
    } catch (error) {
      this.close();
      throw this.#translate(error);
    } finally {
      clearTimeout(timer);
    }
  }

  #translate(error: unknown): unknown {
    if (this.#caller?.aborted) return this.#caller.reason;
    const cause = rootOf(error);
    if (this.signal.reason === EXPIRED || /^UND_ERR_(HEADERS|BODY)_TIMEOUT$/.test(codeOf(cause))) {
      return new CausewayTimeout(`${this.#url} did not answer in time.`, { cause: error });
    }
    const reason = [codeOf(cause), messageOf(cause)].filter(Boolean).join(": ");
    if (!this.#opened && neverConnected(cause)) {
      return new CausewayUnreachable(`Cannot reach ${this.#url}: ${reason}`, { cause: error });
    }
    // A browser does not say why: the device may be away, or may not allow this page.
    const advice = cause === error && !this.#opened ? " Does the device run, and allow this page (server.origins)?" : "";
    return new CausewayConnectionBroken(`The connection to ${this.#url} broke: ${reason}.${advice}`, { cause: error });
  }
}

/** Return whether the device is temporarily unavailable, as during a restart. */
export function isAway(error: unknown): boolean {
  if (error instanceof CausewayAPIError) return RETRIED_STATUSES.includes(error.status);
  return error instanceof CausewayUnreachable || error instanceof CausewayConnectionBroken;
}

/** The remaining time of one request. Without a `deadline_s` it never passes. */
export class Deadline {
  readonly started: number;
  #pause_s = POLL_S;

  constructor(
    private readonly deadline_s: number | null,
    private readonly clock: () => number,
  ) {
    this.started = clock();
  }

  left_s(): number | null {
    return this.deadline_s === null ? null : Math.max(0, this.deadline_s - (this.clock() - this.started));
  }

  /** Return the seconds until the next check of jobs, which grow until `restart`.
   *
   * Throws CausewayTimeout if the deadline has passed, and `left` has not ended.
   */
  pause_s(left: string): number {
    const left_s = this.left_s();
    if (left_s !== null && left_s <= 0) throw new CausewayTimeout(`${left} have not ended in time.`);
    const pause_s = this.#pause_s;
    this.#pause_s = Math.min(MAX_POLL_S, pause_s * 1.5);
    return left_s === null ? pause_s : Math.min(pause_s, left_s);
  }

  /** Check again soon, because a job has ended and others may follow. */
  restart(): void {
    this.#pause_s = POLL_S;
  }

  /** Throw CausewayTimeout if the deadline and its grace period have passed. */
  check(): void {
    if (this.deadline_s !== null && this.clock() - this.started > this.deadline_s + GRACE_S) {
      throw new CausewayTimeout(`The answer took longer than its deadline of ${this.deadline_s} s.`);
    }
  }
}

/** Return the seconds to wait before the next attempt; null for no further attempt.
 *
 * A request is retried only after a 429 or 503 with Retry-After, and only if the pause fits into the deadline.
 */
export function retryPause(error: unknown, attempts: number, retries: number, left_s: number | null): number | null {
  if (attempts >= retries || !(error instanceof CausewayAPIError)) return null;
  const { status, retry_after_s } = error;
  if (!RETRIED_STATUSES.includes(status) || retry_after_s === null) return null;
  return left_s === null || retry_after_s < left_s ? retry_after_s : null;
}

function deviceURL(url: string): string {
  const form = `${JSON.stringify(url)} is not the URL of a device: use http://HOST:PORT or https://…`;
  if (url.startsWith("unix:")) throw new CausewayError(`${form}; fetch has no Unix sockets.`);
  let parsed: URL;
  try {
    parsed = new URL(url);
  } catch {
    throw new CausewayError(form);
  }
  if (!["http:", "https:"].includes(parsed.protocol) || parsed.username || parsed.search || parsed.hash) {
    throw new CausewayError(form);
  }
  return parsed.href.replace(/\/+$/, "").replace(/\/v1$/, ""); // the baseURL of an OpenAI client is accepted, too
}

function environment(name: string): string {
  const scope: { process?: { env?: Record<string, string | undefined> } } = globalThis as object;
  return scope.process?.env?.[name] ?? "";
}

/** Return the error below `fetch`'s "fetch failed", with the first one of several addresses. */
function rootOf(error: unknown): unknown {
  const cause = error instanceof Error && error.cause !== undefined ? error.cause : error;
  return cause instanceof AggregateError ? (cause.errors[0] ?? cause) : cause;
}

/** Return whether Node says that no connection was made: it was refused, not found, or not trusted. */
function neverConnected(cause: unknown): boolean {
  const { syscall } = cause as { syscall?: unknown };
  if (syscall === "connect" || syscall === "getaddrinfo" || messageOf(cause) === "bad port") return true;
  return /^UND_ERR_CONNECT_TIMEOUT$|CERT|_TLS_|_SSL_|^UNABLE_TO_/.test(codeOf(cause));
}

function codeOf(error: unknown): string {
  const code = typeof error === "object" && error !== null && "code" in error ? error.code : "";
  return typeof code === "string" ? code : "";
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
