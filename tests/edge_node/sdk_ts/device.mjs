// A device that speaks the surface over a real socket: each request is answered with what the test puts there.

import { createServer } from "node:http";

/** @typedef {(request: import("node:http").IncomingMessage, response: import("node:http").ServerResponse) => unknown} Handler */
/** @typedef {{ requests: any[], paths: string[], headers: import("node:http").IncomingHttpHeaders[], handler: Handler,
 *   left: Promise<void>, url: string }} Device */

export const HEADERS = {
  "x-causeway-decision": "dec_1",
  "x-causeway-route": "edge",
  "x-causeway-target": "small",
  "x-causeway-reason": "fast-path",
  "x-causeway-cache": "miss",
  "x-causeway-policy": "default@9f2c",
  "x-causeway-degraded": "false",
};
export const DECISION = {
  id: "dec_1",
  route: "edge",
  target: "small",
  reason: "fast-path",
  cache: "miss",
  policy: "default@9f2c",
  degraded: false,
  first_token_ms: null,
  cache_reason: "",
};
export const DONE = "data: [DONE]\n\n";

/** Start a device for the time of a test. `left`: the first client that went away in the middle of an answer.
 * @param {import("node:test").TestContext} t
 * @returns {Promise<Device>}
 */
export async function running(t) {
  /** @type {() => void} */
  let leave = () => {};
  /** @type {Device} */
  const device = {
    requests: [],
    paths: [],
    headers: [],
    handler: answerWith({}),
    left: new Promise((resolve) => (leave = resolve)),
    url: "",
  };
  const server = createServer(async (request, response) => {
    device.paths.push(`${request.method} ${request.url}`);
    device.headers.push(request.headers);
    let body = "";
    for await (const part of request) body += part;
    device.requests.push(body.startsWith("{") ? JSON.parse(body) : body);
    response.on("close", () => response.writableFinished || leave());
    await device.handler(request, response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(null)));
  const address = server.address();
  device.url = `http://127.0.0.1:${address && typeof address === "object" ? address.port : 0}`;
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return device;
}

/** Return a port on which nothing listens. */
export async function closedPort() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(null)));
  const address = server.address();
  await new Promise((resolve) => server.close(resolve));
  return address && typeof address === "object" ? address.port : 0;
}

/** @type {(document: unknown, status?: number, headers?: Record<string, string>) => Handler} */
export function answerWith(document, status = 200, headers = {}) {
  return raw(JSON.stringify(document), status, { "content-type": "application/json", ...headers });
}

/** @type {(body: string | Buffer, status?: number, headers?: Record<string, string>) => Handler} */
export function raw(body, status = 200, headers = {}) {
  return (_, response) => response.writeHead(status, { ...HEADERS, ...headers }).end(body);
}

/** Write each of `writes`; then end well, "drop" the connection, or "stall" until the client goes.
 * @type {(writes: (string | Buffer)[], end?: "done" | "drop" | "stall") => Handler}
 */
export function streamOf(writes, end = "done") {
  return async (request, response) => {
    response.writeHead(200, { ...HEADERS, "content-type": "text/event-stream" });
    response.flushHeaders();
    for (const data of writes) await new Promise((resolve) => response.write(data, () => resolve(null)));
    if (end === "drop") request.socket.destroy();
    if (end === "done") response.end();
  };
}

/** @type {(document: unknown) => string} */
export function event(document) {
  return `data: ${JSON.stringify(document)}\n\n`;
}

/** @type {(text: string, index?: number, finish?: string | null, fields?: object) => string} */
export function delta(text, index = 0, finish = null, fields = {}) {
  const choice = { index, delta: { ...(text ? { content: text } : {}), ...fields }, finish_reason: finish };
  return event({ id: "a", model: "small", choices: [choice] });
}

export const USAGE = { prompt_tokens: 3, completion_tokens: 2, total_tokens: 5 };

/** @type {(content: string | null, fields?: object) => object} */
export function message(content, fields = {}) {
  const said = { role: "assistant", content, ...fields };
  return {
    id: "a",
    model: "small",
    choices: [{ index: 0, message: said, finish_reason: "stop" }],
    usage: USAGE,
  };
}

/** Read a stream's chunks and its answer.
 * @param {import("../../../edge_node/sdk-ts/dist/index.js").Stream} stream
 */
export async function read(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return { chunks, answer: await stream.answer() };
}
