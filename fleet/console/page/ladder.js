// The stages of a rollout as steps.

import { make } from "./elements.js";
import { shareText } from "./words.js";

const BEFORE = ["draft", "lint", "replay"];

/** Return the steps from the checks to the soak; the present one is marked. */
export function ladder(rollout) {
  const steps = ["checks", ...rollout.stages.map(shareText), "soak"];
  const at = BEFORE.includes(rollout.state) || !rollout.began ? 0 : rollout.state === "done" ? steps.length : rollout.stage + 1;
  const stopped = ["draft", "aborted", "reverting", "reverted"].includes(rollout.state);
  return make(
    "ol",
    { class: "ladder", "aria-label": "Stages" },
    steps.map((text, index) => {
      const kind = index < at ? "passed" : index > at ? "ahead" : stopped ? "stopped" : rollout.state === "paused" ? "waits" : "present";
      const words = { passed: "passed", ahead: "to come", stopped: "stopped here", waits: "paused here", present: "now" }[kind];
      return make("li", { class: kind, "aria-current": index === at ? "step" : null }, make("span", { class: "step" }, text), make("span", { class: "sr-only" }, `, ${words}`));
    }),
  );
}
