// The box in its fleet: what its agent does now, what runs, how a trial goes, and the journal of what it did before.

import { byId, facts, make, pill, say, show } from "./elements.js";
import { count, dayAndTime, percent, span } from "./format.js";

const PATH = ["check", "fetch", "verify", "dry_run", "stage", "activate", "trial", "commit"];
const RETURN = ["rollback", "quarantine"];
const KINDS = { idle: "good", rollback: "bad", quarantine: "bad" };

// What each part shows: a part that is the same stays, with its focus and what is folded out.
const shown = new Map();

function part(id, value, nodes) {
  const key = JSON.stringify(value);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  show(byId(id), nodes());
}

const words = (state) => state.replaceAll("_", " ");

/** Return a bundle's serial, as far as this daemon knows it, and the beginning of its id. */
function bundleName(bundle) {
  const id = make("code", { title: bundle.id }, bundle.id.slice(0, 12));
  return make("span", {}, bundle.serial === null ? null : `serial ${count(bundle.serial)}, `, id);
}

/** Show the box in its fleet; `fleet` is null for one that joined none. */
export function showFleet(fleet) {
  byId("fleet").hidden = fleet === null;
  if (fleet === null) return;
  say(byId("fleet-member"), [fleet.fleet, fleet.device, fleet.cohort && `cohort ${fleet.cohort}`].filter(Boolean).join(" · "));
  part("fleet-pills", [fleet.state, fleet.reachable], () => pills(fleet));
  say(byId("fleet-doing"), `${words(fleet.state)}: ${fleet.doing}.`);
  part("fleet-steps", fleet.state, () => steps(fleet.state));
  const { running, wanted, unproven, rollout, code, reason, boots, since, last_seen: lastSeen } = fleet;
  part("fleet-facts", [running, wanted, unproven, rollout, code, reason, boots, since, lastSeen], () => factsOf(fleet));
  part("fleet-trial", fleet.trial, () => (fleet.trial === null ? [] : trial(fleet.trial)));
  byId("fleet-quarantine").hidden = fleet.quarantined.length === 0;
  say(byId("fleet-quarantine-title"), `Quarantine (${count(fleet.quarantined.length)})`);
  part("fleet-quarantined", fleet.quarantined, () => fleet.quarantined.map((each) => make("li", {}, bundleName(each.bundle), ` ${each.reason}`)));
  part("fleet-rows", fleet.journal, () => fleet.journal.map(journalRow));
}

function pills(fleet) {
  const link = { true: ["control plane answers", "good"], false: ["control plane does not answer", "warn"] }[fleet.reachable];
  return [pill(words(fleet.state), KINDS[fleet.state] ?? "accent"), link ? [" ", pill(...link)] : null];
}

function steps(state) {
  const all = RETURN.includes(state) ? [...PATH.slice(0, -1), ...RETURN] : PATH;
  const at = all.indexOf(state);
  return all.map((each, index) => {
    const kind = [index < at && "past", RETURN.includes(each) && "undo"].filter(Boolean).join(" ");
    return make("li", { class: kind, "aria-current": index === at ? "step" : null }, words(each));
  });
}

function factsOf(fleet) {
  const running = fleet.running === null ? "its own files" : bundleName(fleet.running);
  return facts([
    ["Runs", make("span", {}, running, fleet.unproven ? [" ", pill("unproven: too few requests", "warn")] : null)],
    ["Wanted", fleet.wanted && bundleName(fleet.wanted)],
    ["Rollout", fleet.rollout],
    ["Last refusal", fleet.code && `${fleet.code}: ${fleet.reason}`],
    ["Unexpected starts", fleet.boots ? `${count(fleet.boots)} in this trial` : null],
    ["In this state since", fleet.since ? dayAndTime(fleet.since) : null],
    ["Control plane", fleet.reachable === null ? null : fleet.last_seen ? `answered ${dayAndTime(fleet.last_seen)}` : "has not answered yet"],
  ]);
}

function trial({ elapsed_s: elapsed, settings, now, before }) {
  const share = (part, traffic) => (traffic.requests ? percent(part / traffic.requests, 1) : "none");
  const compared = (name) => `${share(now[name], now)} now, ${share(before[name], before)} before`;
  const idle = elapsed >= settings.least_s && now.requests < settings.least_requests;
  return [
    make("h3", {}, "Trial"),
    bar("Time", elapsed, settings.least_s, `${span(Math.floor(elapsed))} of at least ${span(settings.least_s)}`),
    bar("Requests", now.requests, settings.least_requests, `${count(now.requests)} of at least ${count(settings.least_requests)}`),
    facts([
      ["Failed", compared("errors")],
      ["By a fallback", compared("degraded")],
    ]),
    idle ? make("p", { class: "quiet" }, `With too few requests the box keeps the bundle after ${span(settings.longest_s)}, as unproven.`) : null,
  ];
}

function bar(name, value, least, text) {
  const filled = make("span");
  filled.style.width = `${Math.min(100, (100 * value) / Math.max(least, 1e-9))}%`;
  return make("div", { class: "progress" }, make("span", { class: "quiet" }, name), make("span", {}, text), make("div", { class: "track", "aria-hidden": "true" }, filled));
}

function journalRow(row) {
  return make(
    "tr",
    {},
    make("td", {}, dayAndTime(row.at)),
    make("td", {}, words(row.state)),
    make("td", {}, row.bundle === null ? "–" : bundleName(row.bundle)),
    make("td", { class: "reason" }, row.code ? `${row.code}: ${row.reason}` : "–"),
  );
}
