// Decision records in words. The texts are those of `causeway-edge route`.

import { duration } from "./format.js";

/** Mark, kind and text of each reason; {detail} and {target} are fields of the reason. */
export const REASONS = {
  rule_held: ["✓", "held", "held"],
  rule_not_held: ["·", "", "did not hold"],
  signal_absent: ["?", "", "the signal {detail} cannot be read on this device, so the rule does not hold"],
  rule_failed: ["!", "", "evaluation failed: {detail}"],
  constraint_held: ["✓", "held", "the constraint applies {detail}"],
  guard_held: ["✓", "held", "the guard's rule applies: {detail}"],
  guard_not_held: ["·", "", "the guard's rule does not apply"],
  constraint_excluded: ["✗", "", "constraint excluded {target} {detail}"],
  region_excluded: ["✗", "", "the regions to which the request is bound exclude {target}: {detail}"],
  budget_excluded: ["✗", "", "the budget excludes {target}: {detail}"],
  preference_excluded: ["✗", "", "the request's preference excluded {target} {detail}"],
  preference_ordered: ["↑", "", "the request's preference moved {target} forward {detail}"],
  target_scored: ["=", "", "{target}: {detail}"],
  estimate_absent: ["?", "", "{target} cannot be scored: {detail}"],
  model_named: ["✓", "held", "the request names {target} {detail}"],
  continued: ["✓", "held", "the request continues an earlier answer of {target} {detail}"],
  target_unable: ["✗", "", "{target} lacks a capability: {detail}"],
  target_absent: ["✗", "", "{target} is not on this device: {detail}"],
  target_down: ["↓", "", "{target} is down, so it is tried last {detail}"],
  session_bound: ["✓", "", "an earlier request of the session was bound to the device or to regions, and so is this request {detail}"],
  session_pinned: ["✓", "", "the session stays at {target}: {detail}"],
  session_left: ["✗", "", "the session leaves {target}: {detail}"],
  promise_kept: ["✓", "", "to keep the promise of quality, the threshold of the handoff is {detail}"],
  promise_unmeasured: ["?", "", "the promise of quality cannot be measured for this request: {detail}"],
  calibration_set_aside: ["!", "", "the calibrated signals of {target} have drifted, so they are not used {detail}"],
  no_route: ["✗", "", "no target is left {detail}"],
  cache_rule_held: ["✓", "held", "the cache rule applies"],
  cache_rule_not_held: ["·", "", "the cache rule does not apply"],
  cache_refused: ["✗", "", "not cached: {detail}"],
};

/** Return mark, kind and text of a reason; one that a newer daemon invents is shown by its code. */
export function inWords(reason) {
  const [mark, kind, template] = REASONS[reason.code] ?? ["·", "", `${reason.code} {target} {detail}`];
  const text = template.replace("{detail}", reason.detail).replace("{target}", reason.target || "the target").trim();
  return { mark, kind, text };
}

const PLACES = { edge: "on the device", cloud: "in the cloud", cache: "from the cache" };

/** Return one sentence about what became of a request. */
export function outcomeInWords(outcome) {
  const time = duration(outcome.total_ms);
  if (outcome.status === "cancelled") return `The client left after ${time}`;
  if (outcome.status !== "ok" && outcome.http_status < 400) return `The answer broke off after ${time}: ${outcome.error}`;
  if (outcome.status !== "ok") return `No answer: ${outcome.http_status} ${outcome.error} after ${time}`;
  return `Answered ${PLACES[outcome.route] ?? ""} in ${time}`;
}

/** Return what decided: the rule, or what stood in its place. */
export function decidedBy(record) {
  const { decision, outcome } = record;
  if (outcome.route === "cache" && decision === null) return "cached answer";
  if (decision === null) return outcome.error || "refused before a decision";
  return decision.rule || (decision.attempts.length ? "model named" : "no route");
}

/** Return the texts that the search looks into, in lower case. */
export function searchable(record) {
  const { request, outcome } = record;
  const texts = [decidedBy(record), outcome.target, outcome.model, outcome.error, outcome.reason, request.client, request.kind, record.id];
  return [...texts, ...request.tags].join(" ").toLowerCase();
}
