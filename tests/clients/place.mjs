// The server under test, the tools that the scripted model calls, and what it must say in the end.

import assert from "node:assert/strict";

export const URL = process.env["CAUSEWAY_URL"] ?? "";
export const MODEL = process.env["CAUSEWAY_MODEL"] ?? "";
export const KEY = process.env["CAUSEWAY_API_KEY"] ?? "";
export const AT_GATEWAY = process.env["CAUSEWAY_PLACE"] === "gateway";
export const ASK = "What is the weather in Paris and in Rome, and together?";
export const TEXT = "Good day.";
export const THOUGHT = "I need the weather of both cities.";
export const REPORT = { city: "Paris", celsius: 21 };
export const LOOP = "Paris 21 degrees, Rome 25 degrees, together 46, kept 46.";

/** The implementations of the tools, which note their calls.
 * @param {string[]} calls
 */
export function tools(calls) {
  /** @type {Record<string, (input: any) => string>} */
  const made = {
    get_weather: ({ city }) => `${city === "Paris" ? 21 : 25} degrees`,
    add: ({ a, b }) => String(a + b),
    keep: ({ sum }) => `kept ${sum}`,
  };
  /** @type {(name: string, input: unknown) => string} */
  return (name, input) => {
    calls.push(name);
    const tool = made[name];
    assert.ok(tool, name);
    return tool(input);
  };
}

/** Check that each tool ran as often as the model asked for it: four calls in three turns.
 * @param {string[]} calls
 */
export function assertLoop(calls) {
  assert.deepEqual(calls.toSorted(), ["add", "get_weather", "get_weather", "keep"]);
}

export const PARAMETERS = {
  get_weather: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  add: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] },
  keep: { type: "object", properties: { sum: { type: "integer" } }, required: ["sum"] },
};
