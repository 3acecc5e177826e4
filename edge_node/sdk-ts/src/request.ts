/** Encoding of a call's arguments to the request's path and body. */

import { CausewayError } from "./errors.js";

export type Prefer = "prefer_on_device" | "only_on_device" | "prefer_cloud" | "only_cloud";
export type JSONObject = { readonly [name: string]: unknown };
/** A text (one user message), or OpenAI's list of messages. */
export type Messages = string | readonly JSONObject[];
/** The bytes of a file. */
export type Bytes = Blob | ArrayBuffer | Uint8Array<ArrayBuffer>;

/** Options of a request: our routing hints, OpenAI's fields by their own names, and `extra` for any other field. */
export interface RequestOptions {
  /** `auto` (the default: the policy decides) or the name of one of the policy's targets. */
  model?: string;
  /** Narrows the policy. */
  prefer?: Prefer | null;
  /** Tags for the policy's rules, such as `private`. */
  tags?: readonly string[];
  /** Seconds until the answer must be complete. The device and the cloud stop work at the deadline. */
  deadline_s?: number | null;
  temperature?: number;
  top_p?: number;
  max_tokens?: number;
  stop?: string | readonly string[];
  seed?: number;
  n?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  logprobs?: boolean | number;
  top_logprobs?: number;
  tools?: readonly JSONObject[];
  tool_choice?: string | JSONObject;
  response_format?: JSONObject;
  dimensions?: number;
  user?: string;
  /** Further fields of the request body, by name. */
  extra?: JSONObject;
}

/** Options of one call, which never travel. */
export interface CallOptions {
  /** Cancels the call, on the device and in the cloud, too; it then rejects with the signal's reason. */
  signal?: AbortSignal;
}

/** Options of a job beside those of its request. */
export interface JobOptions {
  /** `interactive` jobs run first, `bulk` jobs last. Default: `standard`. */
  priority?: "interactive" | "standard" | "bulk";
  /** Minimum number of seconds that the job waits. */
  not_before_s?: number;
  /** URL that receives a signed POST when the job has ended. Default: none. */
  webhook?: string;
  /** Idempotency key: the same submission with the same key is the same job. Default: a new one. */
  key?: string;
}

/** A request to the device. `hints` go into the body's `causeway` object. A `form` is sent instead of a body. */
export interface Request {
  readonly path: string;
  readonly method: "GET" | "POST" | "DELETE";
  readonly body?: JSONObject;
  readonly hints?: JSONObject;
  readonly form?: FormData;
  readonly deadline_s?: number | null;
  readonly headers?: Readonly<Record<string, string>>;
}

/** Return the headers and the body of a request as `fetch` takes them. `left_s` is the rest of the deadline. */
export function encode(request: Request, left_s: number | null): { headers: Record<string, string>; body?: BodyInit } {
  const headers = { ...request.headers };
  if (request.form) return { headers, body: request.form };
  if (!request.body) return { headers };
  const hints: Record<string, unknown> = { ...request.hints };
  if (left_s !== null) hints["deadline_ms"] = Math.max(1, Math.floor(left_s * 1000));
  const body = Object.keys(hints).length ? { ...request.body, causeway: hints } : request.body;
  return { headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(body) };
}

/** Return the path of one item. The id stays a single segment of the path, whatever characters it contains. */
export function itemPath(collection: string, id: string): string {
  // A URL parser takes these for the folder itself and the one above, in each of their spellings.
  if (["", ".", ".."].includes(id)) throw new CausewayError(`${JSON.stringify(id)} is not an id.`);
  return `${collection}/${encodeURIComponent(id)}`;
}

/** Return a request with `content` (messages, prompt or input) and the options' fields. */
export function buildRequest(path: string, content: JSONObject, options: RequestOptions, stream = false): Request {
  if ("resume" in options)
    throw new CausewayError("`resume` was removed: a truncated answer is not continued. Leave `resume` out.");
  const { prefer, tags, deadline_s, extra, ...fields } = options;
  const hints = {
    ...(prefer ? { prefer } : {}),
    ...(tags?.length ? { tags } : {}),
  };
  const streaming = stream ? { stream: true, stream_options: { include_usage: true } } : {};
  const body = { model: "auto", ...content, ...fields, ...extra, ...streaming };
  return { path, method: "POST", body, hints, deadline_s: deadline_s ?? null };
}

export function buildChatRequest(path: string, messages: Messages, options: RequestOptions, stream = false): Request {
  const turns = typeof messages === "string" ? [{ role: "user", content: messages }] : messages;
  return buildRequest(path, { messages: turns }, options, stream);
}

export function buildTranscriptionRequest(audio: Bytes, language: string): Request {
  const form = new FormData();
  form.set("model", "auto");
  form.set("response_format", "text");
  if (language) form.set("language", language);
  form.set("file", new Blob([audio]), "audio");
  return { path: "/v1/audio/transcriptions", method: "POST", form };
}

export function buildUploadRequest(content: Bytes, filename: string, expires_after_s: number | null): Request {
  const form = new FormData();
  form.set("purpose", "user_data");
  if (expires_after_s !== null) {
    form.set("expires_after[anchor]", "created_at");
    form.set("expires_after[seconds]", String(expires_after_s));
  }
  form.set("file", new Blob([content]), filename);
  return { path: "/v1/files", method: "POST", form };
}

/** Return the request that submits a job. Its body is the same at each attempt: the device compares it under the key. */
export function buildJobRequest(messages: Messages, options: RequestOptions & JobOptions): Request {
  const { priority = "standard", not_before_s = 0, webhook, key, ...others } = options;
  const { body, hints = {}, deadline_s } = buildChatRequest("/v1/jobs", messages, others);
  const fields = {
    ...body,
    priority,
    ...(deadline_s != null ? { deadline_ms: Math.max(1, Math.floor(deadline_s * 1000)) } : {}),
    ...(not_before_s > 0 ? { not_before_ms: Math.floor(not_before_s * 1000) } : {}),
    ...(webhook ? { webhook } : {}),
  };
  return { path: "/v1/jobs", method: "POST", body: fields, hints, headers: { "idempotency-key": key || newKey() } };
}

/** Return a new key. `crypto.randomUUID` is missing on pages without TLS. */
export function newKey(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
