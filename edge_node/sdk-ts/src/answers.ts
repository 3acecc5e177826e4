/** Answers of the device, as plain objects. Their fields have the names of the Python SDK and of OpenAI's API. */

/** The target that answered and the reason: the `x-causeway-*` response headers. */
export interface Decision {
  /** The decision record's id; `Causeway.decision` reads the record. */
  readonly id: string;
  /** `edge`, `cloud`, `cache` or `none`. */
  readonly route: string;
  /** The name of the policy's target that answered. */
  readonly target: string;
  /** The name of the policy's rule, or why a later target answered. */
  readonly reason: string;
  /** `hit`, `semantic`, `stale`, `miss`, `bypass` or `coalesced`. */
  readonly cache: string;
  /** The policy in force, `name@revision`. */
  readonly policy: string;
  /** Whether a failure moved the answer away from the policy's first choice. */
  readonly degraded: boolean;
  /** Milliseconds from the call to the first text or tool call, measured by this client (streams). */
  readonly first_token_ms: number | null;
  /** Why the cache was bypassed. */
  readonly cache_reason: string;
}

/** Token counts of one request. */
export interface Usage {
  readonly prompt_tokens: number;
  readonly completion_tokens: number;
  readonly total_tokens: number;
}

/** A call of a tool. `arguments` is JSON text. */
export interface ToolCall {
  readonly id: string;
  readonly name: string;
  readonly arguments: string;
}

/** A choice, one of the `n` answers to a request. */
export interface Choice {
  readonly text: string;
  readonly tool_calls: readonly ToolCall[];
  readonly finish_reason: string;
}

/** A complete answer. `text`, `tool_calls` and `finish_reason` are those of the first choice. */
export interface Answer extends Choice {
  readonly decision: Decision;
  /** One entry per requested answer (`n`). */
  readonly choices: readonly Choice[];
  /** Token counts; zeros if the device reported none. */
  readonly usage: Usage;
  /** The model's name as the target reported it. */
  readonly model: string;
  /** Milliseconds from the call to the end of the answer, measured by this client. */
  readonly total_ms: number;
}

/** A part of tool call number `index`. Its first part has the `id` and the `name`. */
export interface ToolCallDelta {
  readonly index: number;
  readonly arguments: string;
  readonly id: string;
  readonly name: string;
}

/** A streamed piece of choice `index`. The last chunk of an answer may hold the usage alone. */
export interface Chunk {
  readonly text: string;
  readonly index: number;
  readonly tool_calls: readonly ToolCallDelta[];
  readonly finish_reason: string;
  readonly usage: Usage | null;
}

/** Embedding vectors, one per input text. */
export interface Embeddings {
  readonly vectors: readonly (readonly number[])[];
  readonly decision: Decision;
  readonly usage: Usage;
  readonly model: string;
}

/** A name that `model` accepts. `owned_by` is `causeway` (auto), `edge` or `cloud`. */
export interface Model {
  readonly id: string;
  readonly owned_by: string;
}

/** A request that was accepted to be answered later. */
export interface Job {
  readonly id: string;
  /** `queued`, `waiting`, `running`, `succeeded`, `failed`, `dead`, `cancelled` or `expired`. */
  readonly status: string;
  /** Whether the job has ended, with or without an answer. */
  readonly ended: boolean;
  /** The answer of a job that succeeded. */
  readonly answer: Answer | null;
  /** The message of a job that ended without an answer. */
  readonly error: string;
  /** The code of that error. */
  readonly code: string;
  /** Number of attempts, including the one that succeeded. */
  readonly attempts: number;
  /** The URL that is notified of the job's end; "" for none. */
  readonly webhook: string;
  /** `pending`, `delivered`, `failed` or `disabled` (the receiver answered 410); "" before the job has ended. */
  readonly webhook_status: string;
}
