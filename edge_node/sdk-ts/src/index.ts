/** The Causeway SDK: typed answers from a Causeway device, over `fetch`, in Node and in browsers.
 *
 *     import { Causeway } from "causeway-sdk";
 *
 *     const causeway = new Causeway(); // $CAUSEWAY_URL, else http://127.0.0.1:8080
 *     const answer = await causeway.chat("wake me up at six am");
 *     console.log(answer.text, answer.decision.route, answer.decision.reason);
 *
 *     const stream = await causeway.chat("Tell me about tides", { prefer: "prefer_cloud", stream: true });
 *     for await (const chunk of stream) process.stdout.write(chunk.text);
 *     console.log(stream.decision.target, stream.decision.first_token_ms);
 *
 * Leaving the loop over a stream cancels the request on the device and in the cloud. The `Decision` of each answer names
 * the target that answered and the reason. Every error is a `CausewayError`.
 */

export type * from "./answers.js";
export { Causeway, type CausewayOptions, Stream, type WaitOptions } from "./client.js";
export type { Fetch, Sleep } from "./connection.js";
export {
  CausewayAPIError,
  CausewayConnectionBroken,
  CausewayError,
  CausewayTimeout,
  CausewayUnreachable,
  OutboxError,
} from "./errors.js";
export { Outbox, type OutboxOptions, type OutboxStore, type Submission } from "./outbox.js";
export type { Bytes, CallOptions, JobOptions, JSONObject, Messages, Prefer, RequestOptions } from "./request.js";
export { IndexedDBStore, MemoryStore } from "./stores.js";
