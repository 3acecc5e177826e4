// The device in its fleet: what its agent does now, what runs, how a trial goes, and the journal of what it did before.

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
function bundleName(bundle, serials) {
  const id = make("code", { title: bundle }, bundle.slice(0, 12));
  return make("span", {}, bundle in serials ? `serial ${count(serials[bundle])}, ` : null, id);
}

/** Show the device in its fleet; `fleet` is null for one that joined none. */
export function showFleet(fleet) {
  byId("fleet").hidden = fleet === null;
  if (fleet === null) return;
  say(byId("fleet-member"), [fleet.fleet, fleet.device, fleet.cohort && `cohort ${fleet.cohort}`].filter(Boolean).join(" · "));
  const { row, running, wanted, serials, last_seen: lastSeen } = fleet;
  part("fleet-pills", [row.state, fleet.reachable], () => pills(row.state, fleet.reachable));
  say(byId("fleet-doing"), `${words(row.state)}: ${fleet.doing}.`);
  part("fleet-steps", row.state, () => steps(row.state));
  part("fleet-facts", [running, wanted, row, serials, lastSeen], () => factsOf(fleet));
  part("fleet-trial", fleet.trial, () => (fleet.trial === null ? [] : trial(fleet.trial)));
  const quarantined = Object.entries(row.quarantined).reverse();
  byId("fleet-quarantine").hidden = quarantined.length === 0;
  say(byId("fleet-quarantine-title"), `Quarantine (${count(quarantined.length)})`);
  part("fleet-quarantined", [quarantined, serials], () => quarantined.map(([bundle, reason]) => make("li", {}, bundleName(bundle, serials), ` ${reason}`)));
  part("fleet-rows", [fleet.journal, serials], () => fleet.journal.map((each) => journalRow(each, serials)));
}

function pills(state, reachable) {
  const link = { true: ["control plane answers", "good"], false: ["control plane does not answer", "warn"] }[reachable];
  return [pill(words(state), KINDS[state] ?? "accent"), link ? [" ", pill(...link)] : null];
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
  const { row, serials } = fleet;
  const running = fleet.running === null ? "its own files" : bundleName(fleet.running, serials);
  return facts([
    ["Runs", make("span", {}, running, row.unproven ? [" ", pill("unproven: too few requests", "warn")] : null)],
    ["Wanted", fleet.wanted && bundleName(fleet.wanted, serials)],
    ["Rollout", row.rollout],
    ["Last refusal", row.code && `${row.code}: ${row.reason}`],
    ["Unexpected starts", row.boots ? `${count(row.boots)} in this trial` : null],
    ["In this state since", row.at ? dayAndTime(row.at) : null],
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
    idle ? make("p", { class: "quiet" }, `With too few requests the device keeps the bundle after ${span(settings.longest_s)}, as unproven.`) : null,
  ];
}

function bar(name, value, least, text) {
  const filled = make("span");
  filled.style.width = `${Math.min(100, (100 * value) / Math.max(least, 1e-9))}%`;
  return make("div", { class: "progress" }, make("span", { class: "quiet" }, name), make("span", {}, text), make("div", { class: "track", "aria-hidden": "true" }, filled));
}

function journalRow(row, serials) {
  return make(
    "tr",
    {},
    make("td", {}, dayAndTime(row.at)),
    make("td", {}, words(row.state)),
    make("td", {}, row.bundle === null ? "–" : bundleName(row.bundle, serials)),
    make("td", { class: "reason" }, row.code ? `${row.code}: ${row.reason}` : "–"),
  );
}
