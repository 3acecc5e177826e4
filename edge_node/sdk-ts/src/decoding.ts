/** Decoding of response bytes to answers. Unknown or malformed fields become empty values; no I/O. */

import type {
  Answer,
  Choice,
  Chunk,
  Decision,
  Embeddings,
  Job,
  Model,
  ToolCall,
  ToolCallDelta,
  Usage,
} from "./answers.js";
import { CausewayAPIError } from "./errors.js";
import type { JSONObject } from "./request.js";

/** A response whose body was read. */
export interface ReadResponse {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
}

const NO_USAGE: Usage = { prompt_tokens: 0, completion_tokens: 0, total_tokens: 0 };
const ENDED = new Set(["succeeded", "failed", "dead", "cancelled", "expired"]);

/** Return the JSON object of a response. Throws CausewayAPIError for anything else, such as a portal's page. */
export function decodeDocument(response: ReadResponse): JSONObject {
  const document = parseObject(response.text);
  if (!document) throw apiError({}, httpMessage(response), response.status, response.headers);
  return document;
}

export function decodeDecision(headers: Headers): Decision {
  const of = (name: string): string => headers.get(`x-causeway-${name}`) ?? "";
  return {
    id: of("decision"),
    route: of("route"),
    target: of("target"),
    reason: of("reason"),
    cache: of("cache"),
    policy: of("policy"),
    degraded: ["1", "true", "yes"].includes(of("degraded").toLowerCase()),
    first_token_ms: null,
    cache_reason: of("cache-reason"),
  };
}

/** Return the error of a response that is not a success. */
export function decodeError(response: ReadResponse): CausewayAPIError {
  const error = asObject(parseObject(response.text)?.["error"]);
  return apiError(error, asText(error["message"]) || httpMessage(response), response.status, response.headers);
}

export function decodeAnswer(response: ReadResponse, total_s: number): Answer {
  return answerOf(decodeDocument(response), decodeDecision(response.headers), total_s * 1000);
}

/** Return a job of the device or of the gateway. */
export function decodeJob(document: JSONObject): Job {
  const status = asText(document["status"]);
  const error = asObject(document["error"]);
  const result = parseable(document["result"]);
  const decision = {
    ...decodeDecision(new Headers()),
    id: asText(document["decision"]),
    route: asText(document["route"]),
    cache: asText(document["cache"]),
  };
  return {
    id: asText(document["id"]),
    status,
    ended: ENDED.has(status),
    answer: result ? answerOf(result, decision, 0) : null,
    error: asText(error["message"]),
    code: asText(error["code"]),
    attempts: asNumber(document["attempts"]),
    webhook: asText(document["webhook"]),
    webhook_status: asText(document["webhook_status"]),
  };
}

export function decodeJobs(document: JSONObject): Job[] {
  return rowsOf(document, "data").map(decodeJob);
}

export function decodeModels(document: JSONObject): Model[] {
  return rowsOf(document, "data").map((row) => ({ id: asText(row["id"]), owned_by: asText(row["owned_by"]) }));
}

export function decodeEmbeddings(response: ReadResponse): Embeddings {
  const document = decodeDocument(response);
  const numbers = (row: JSONObject): number[] => asList(row["embedding"]).filter((x) => typeof x === "number");
  return {
    vectors: rowsOf(document, "data").map(numbers),
    decision: decodeDecision(response.headers),
    usage: usageOf(document["usage"]) ?? NO_USAGE,
    model: asText(document["model"]),
  };
}

/** Decodes server-sent events to chunks, and to the answer that the chunks add up to. */
export class StreamDecoder {
  decision: Decision;
  /** Whether the closing [DONE] event has arrived. */
  done = false;
  #ended: number;
  #partialLine = "";
  #dataLines: string[] = [];
  #usage = NO_USAGE;
  #model = "";
  readonly #text = new TextDecoder();
  readonly #choices = new Map<number, PartialChoice>();

  /** `started` is the call's time on `clock`, in seconds. */
  constructor(
    private readonly status: number,
    private readonly headers: Headers,
    private readonly started: number,
    private readonly clock: () => number,
  ) {
    this.decision = decodeDecision(headers);
    this.#ended = started;
  }

  /** Yield the chunks of newly received bytes, at any split of the stream. Throws CausewayAPIError for an error event.
   *
   * Only line feeds end a line: text may hold any Unicode line separator.
   */
  *feed(received: Uint8Array): Generator<Chunk> {
    const lines = (this.#partialLine + this.#text.decode(received, { stream: true })).split("\n");
    this.#partialLine = lines.pop() ?? "";
    for (const ended of lines) {
      const line = ended.endsWith("\r") ? ended.slice(0, -1) : ended;
      if (line.startsWith("data:")) {
        this.#dataLines.push(line.slice(line[5] === " " ? 6 : 5));
      } else if (!line && this.#dataLines.length) {
        const data = this.#dataLines.join("\n");
        this.#dataLines = [];
        yield* this.#event(data);
      }
    }
  }

  /** Return all chunks so far as one answer. */
  answer(): Answer {
    const choices = [...this.#choices].sort(([a], [b]) => a - b).map(([, choice]) => choice.freeze());
    const total_ms = (this.#ended - this.started) * 1000;
    return {
      ...firstOf(choices),
      decision: this.decision,
      choices,
      usage: this.#usage,
      model: this.#model,
      total_ms,
    };
  }

  *#event(data: string): Generator<Chunk> {
    if (data === "[DONE]") {
      this.done = true;
      this.#ended = this.clock();
      return;
    }
    const event = parseObject(data) ?? {};
    const error = parseable(event["error"]);
    if (error) throw apiError(error, asText(error["message"]) || "The answer broke off.", this.status, this.headers);
    this.#model = asText(event["model"]) || this.#model;
    for (const chunk of chunksOf(event)) {
      this.#add(chunk);
      yield chunk;
    }
  }

  #add(chunk: Chunk): void {
    if (this.decision.first_token_ms === null && (chunk.text || chunk.tool_calls.length)) {
      this.decision = { ...this.decision, first_token_ms: (this.clock() - this.started) * 1000 };
    }
    this.#usage = chunk.usage ?? this.#usage;
    if (!chunk.text && !chunk.tool_calls.length && !chunk.finish_reason) return;
    const choice = this.#choices.get(chunk.index) ?? new PartialChoice();
    this.#choices.set(chunk.index, choice);
    choice.add(chunk);
  }
}

/** A choice while its chunks arrive. */
class PartialChoice {
  #text = "";
  #finish_reason = "";
  readonly #calls = new Map<number, ToolCall>();

  add(chunk: Chunk): void {
    this.#text += chunk.text;
    this.#finish_reason = chunk.finish_reason || this.#finish_reason;
    for (const delta of chunk.tool_calls) {
      const call = this.#calls.get(delta.index) ?? { id: "", name: "", arguments: "" };
      const { id, name } = delta;
      const whole = { id: call.id || id, name: call.name || name, arguments: call.arguments + delta.arguments };
      this.#calls.set(delta.index, whole);
    }
  }

  freeze(): Choice {
    const tool_calls = [...this.#calls].sort(([a], [b]) => a - b).map(([, call]) => call);
    return { text: this.#text, tool_calls, finish_reason: this.#finish_reason };
  }
}

function apiError(error: JSONObject, message: string, status: number, headers: Headers): CausewayAPIError {
  const retryAfter = headers.get("retry-after")?.trim();
  // HTTP also allows a date, which neither the daemon nor the gateway sends.
  const seconds = retryAfter ? Number(retryAfter) : NaN;
  return new CausewayAPIError(message, {
    status,
    type: asText(error["type"]),
    code: asText(error["code"]),
    param: asText(error["param"]) || null,
    retry_after_s: Number.isFinite(seconds) ? Math.max(0, seconds) : null,
    decision: decodeDecision(headers),
  });
}

function httpMessage(response: ReadResponse): string {
  const status = response.status ? `HTTP ${response.status}` : "A redirect, which a browser does not show";
  return `${status}: ${response.text.slice(0, 200)}`;
}

function answerOf(document: JSONObject, decision: Decision, total_ms: number): Answer {
  const choices = rowsOf(document, "choices").map(choiceOf);
  const usage = usageOf(document["usage"]) ?? NO_USAGE;
  const model = asText(document["model"]);
  return { ...firstOf(choices), decision, choices, usage, model, total_ms };
}

function firstOf(choices: readonly Choice[]): Choice {
  return choices[0] ?? { text: "", tool_calls: [], finish_reason: "" };
}

function choiceOf(document: JSONObject): Choice {
  const message = asObject(document["message"]);
  return {
    text: asText(message["content"]) || asText(document["text"]),
    tool_calls: rowsOf(message, "tool_calls").map(callOf),
    finish_reason: asText(document["finish_reason"]),
  };
}

function callOf(call: JSONObject): ToolCall {
  const called = asObject(call["function"]);
  return { id: asText(call["id"]), name: asText(called["name"]), arguments: asText(called["arguments"]) };
}

function chunksOf(event: JSONObject): Chunk[] {
  const usage = usageOf(event["usage"]);
  const choices = rowsOf(event, "choices");
  if (usage && !choices.length) return [{ text: "", index: 0, tool_calls: [], finish_reason: "", usage }];
  return choices.map((choice) => {
    const delta = asObject(choice["delta"]);
    return {
      text: asText(delta["content"]) || asText(choice["text"]),
      index: asNumber(choice["index"]),
      tool_calls: rowsOf(delta, "tool_calls").map(deltaOf),
      finish_reason: asText(choice["finish_reason"]),
      usage,
    };
  });
}

function deltaOf(call: JSONObject): ToolCallDelta {
  return { index: asNumber(call["index"]), ...callOf(call) };
}

function usageOf(value: unknown): Usage | null {
  const counts = parseable(value);
  if (!counts) return null;
  return {
    prompt_tokens: asNumber(counts["prompt_tokens"]),
    completion_tokens: asNumber(counts["completion_tokens"]),
    total_tokens: asNumber(counts["total_tokens"]),
  };
}

function parseObject(text: string): JSONObject | null {
  try {
    const value: unknown = JSON.parse(text);
    return isObject(value) ? value : null;
  } catch {
    return null;
  }
}

function isObject(value: unknown): value is JSONObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Return an object that is not empty; null for anything else. */
function parseable(value: unknown): JSONObject | null {
  return isObject(value) && Object.keys(value).length ? value : null;
}

function asObject(value: unknown): JSONObject {
  return isObject(value) ? value : {};
}

function asList(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

function rowsOf(document: JSONObject, name: string): JSONObject[] {
  return asList(document[name]).map(asObject);
}

function asText(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function asNumber(value: unknown): number {
  return typeof value === "number" ? value : 0;
}
