// One request to this device, streamed as an application's would be; at its end its record opens, with its hops.

import { answer, Refused } from "./api.js";
import { byId, make, pill, show } from "./elements.js";

/** Let the form ask; `done` gets the id of the request's decision. */
export function wireAsk(done) {
  byId("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("send").disabled = true;
    show(byId("asked"), make("p", { class: "quiet" }, "Asked. No target has answered yet."));
    try {
      done(await run(byId("prompt").value));
    } catch (error) {
      const text = error instanceof Refused ? error.message : "The device does not answer.";
      show(byId("asked"), make("p", { class: "pill bad" }, text));
    }
    byId("send").disabled = false;
  });
}

async function run(prompt) {
  const response = await answer("v1/chat/completions", { model: "auto", stream: true, messages: [{ role: "user", content: prompt }] });
  const header = (name) => response.headers.get(`x-causeway-${name}`) ?? "";
  const text = make("p", { class: "answer", tabindex: "0", role: "region", "aria-label": "Answer" });
  show(byId("asked"), make("p", {}, pill(header("route"), header("route")), " ", header("target"), make("span", { class: "soft" }, ` ${header("reason")}`)), text);
  let rest = "";
  for await (const bytes of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const events = (rest + bytes).split("\n\n");
    rest = events.pop();
    for (const event of events) text.append(textOf(event));
  }
  return header("decision");
}

async function* chunks(stream) {
  const reader = stream.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

/** Return the text of an event: of the answer, of a call's arguments, or of an error. */
function textOf(event) {
  if (!event.startsWith("data:")) return ""; // a comment, such as a heartbeat
  const data = event.replace(/^data: ?/, "");
  if (!data || data === "[DONE]") return "";
  const { choices = [], error } = JSON.parse(data);
  const delta = choices[0]?.delta ?? {};
  const calls = (delta.tool_calls ?? []).map((call) => (call.function?.name ?? "") + (call.function?.arguments ?? ""));
  return (error ? error.message : "") + (delta.content ?? "") + calls.join("");
}
