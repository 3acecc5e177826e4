/** The errors of the SDK. Catch `CausewayError` for all of them. */

import type { Decision } from "./answers.js";

/** Base class of every error that the SDK throws. */
export class CausewayError extends Error {
  override readonly name: string = "CausewayError";
}

/** The connection could not be opened; the request was not sent. Browsers do not tell this apart from a broken one. */
export class CausewayUnreachable extends CausewayError {
  override readonly name = "CausewayUnreachable";
}

/** The answer, or the next chunk of it, did not arrive within the timeout or the deadline. */
export class CausewayTimeout extends CausewayError {
  override readonly name = "CausewayTimeout";
}

/** The connection ended before the answer was complete. Chunks that arrived are not the whole answer. */
export class CausewayConnectionBroken extends CausewayError {
  override readonly name = "CausewayConnectionBroken";
}

/** The store of an outbox cannot be read or written, or is full. */
export class OutboxError extends CausewayError {
  override readonly name = "OutboxError";
}

/** The fields of a `CausewayAPIError` beside its message. */
export interface APIErrorFields {
  status: number;
  type?: string;
  code?: string;
  param?: string | null;
  retry_after_s?: number | null;
  decision?: Decision | null;
}

/** The device answered with an error object in OpenAI's form. */
export class CausewayAPIError extends CausewayError {
  override readonly name = "CausewayAPIError";
  /** The HTTP status. 200 if the error came in the middle of a stream, after the response head. */
  readonly status: number;
  /** OpenAI's error type, for example `invalid_request_error`. */
  readonly type: string;
  /** The code, for example `context_length_exceeded`. */
  readonly code: string;
  /** The path of the invalid field of the request, if there is one. */
  readonly param: string | null;
  /** Seconds until the request may be sent again, if the device named a time. */
  readonly retry_after_s: number | null;
  /** The `Decision` headers of the response. */
  readonly decision: Decision | null;

  constructor(message: string, fields: APIErrorFields) {
    super(message);
    this.status = fields.status;
    this.type = fields.type ?? "";
    this.code = fields.code ?? "";
    this.param = fields.param ?? null;
    this.retry_after_s = fields.retry_after_s ?? null;
    this.decision = fields.decision ?? null;
  }
}
