// One rollout: its stages, the verdict of each look, its devices, what happened, and what an operator may do.

import { ask, post, withQuery } from "./api.js";
import { hasInterval, intervals, points, stack } from "./charts.js";
import { confirm } from "./confirm.js";
import { facts, make, pill } from "./elements.js";
import { ago, count, dayAndTime, percent } from "./format.js";
import { ladder } from "./ladder.js";
import { bundleName, inPlainWords, may, shareText, statePill } from "./words.js";

const RUNNING = ["stage", "soak"];
const ACTIONS = [
  {
    name: "pause",
    label: "Pause",
    states: RUNNING,
    role: "operator",
    text: "No further device changes. Devices that run the new bundle keep it and are still judged.",
  },
  { name: "resume", label: "Resume", states: ["paused"], role: "operator", text: "The stage goes on; its time counts from now. A replay that had too few records is tried again." },
  {
    name: "accept",
    label: "Accept",
    states: ["paused"],
    role: "approver",
    text: "This stage, or the replay that had too few records, counts as passed. The next stage begins now.",
  },
  {
    name: "abort",
    label: "Abort",
    states: ["lint", "replay", "stage", "soak", "paused", "done"],
    role: "operator",
    danger: true,
    text: "Every device returns to the bundle before, at once and outside of maintenance windows.",
  },
];
const KINDS = { commit: "shade-good", waiting: "shade-1", trial: "shade-2", silent: "shade-warn", held: "shade-4", pinned: "shade-4", rollback: "shade-bad", quarantine: "shade-bad" };

export async function rolloutView(context, id) {
  const rollout = await ask(`v1/rollouts/${encodeURIComponent(id)}`);
  const looks = rollout.looks;
  return make(
    "div",
    { class: "page" },
    head(rollout, context),
    make("section", { class: "panel block", "aria-label": "Stages" }, ladder(rollout), rollout.reason ? make("p", { class: "soft" }, rollout.reason) : null, rollout.notes.length ? make("ul", { class: "soft" }, rollout.notes.map((note) => make("li", {}, note))) : null),
    make(
      "div",
      { class: "columns" },
      make("section", { "aria-labelledby": "verdict-title" }, make("h3", { id: "verdict-title" }, "Canary against control"), metricCards(looks, rollout.stages)),
      make("div", { class: "side" }, members(rollout), predicted(rollout), about(rollout, context), happened(rollout)),
    ),
  );
}

function head(rollout, context) {
  const actions = ACTIONS.filter((action) => action.states.includes(rollout.state)).map((action) => {
    const allowed = may(context.session, action.role);
    const run = () =>
      confirm(
        { title: `${action.label} the rollout of ${rollout.cohort}?`, text: action.text, button: action.label, danger: action.danger, required: true },
        (reason) => post(`v1/rollouts/${encodeURIComponent(rollout.id)}/${action.name}`, { reason }),
      ).then((done) => done && context.refresh());
    const title = allowed ? null : `Needs the role ${action.role}; you are ${context.session.role}`;
    return make("button", { type: "button", class: action.danger ? "danger" : action.name === "accept" ? "primary" : null, disabled: !allowed, title, onclick: run }, action.label);
  });
  return make(
    "div",
    { class: "view-head" },
    make("div", {}, make("p", {}, make("a", { href: "#/rollouts" }, "Rollouts")), make("h2", {}, rollout.cohort, " ", statePill(rollout.state))),
    make("div", { class: "actions push" }, actions),
  );
}

function metricCards(looks, stages) {
  const names = [...new Set(looks.slice(-1).flatMap((look) => look.metrics.map((metric) => metric.name)))];
  if (names.length === 0) return make("p", { class: "panel hint quiet" }, "No look yet. The first one is 150 s after a stage begins.");
  const last = looks.at(-1);
  const latest = looks.filter((look) => look.stage === last.stage);
  const compared = names.filter((name) => latest.some((look) => look.metrics.some((metric) => metric.name === name && hasInterval(metric))));
  const others = names.filter((name) => !compared.includes(name));
  const stage = last.stage < stages.length ? `stage ${shareText(stages[last.stage])}` : "the soak";
  return [
    make("p", { class: "quiet" }, `${count(latest.length)} looks at ${stage}. Each line is a difference with its interval; what lies above the dashed margin is worse than accepted.`),
    make("ul", { class: "metrics" }, compared.map((name) => metricCard(name, latest))),
    others.length
      ? make("ul", { class: "panel block notes" }, others.map((name) => last.metrics.find((metric) => metric.name === name)).filter(Boolean).map((metric) => make("li", {}, statePill(metric.outcome), " ", make("b", {}, inPlainWords(metric.name)), " ", make("span", { class: "soft" }, metric.reason))))
      : null,
    lookTable(looks),
  ];
}

function metricCard(name, looks) {
  const series = looks.flatMap((look) => look.metrics.filter((metric) => metric.name === name).map((metric) => [look.at, metric]));
  const [, last] = series.at(-1);
  return make(
    "li",
    { class: "panel metric" },
    make("div", { class: "metric-head" }, make("h4", {}, name), statePill(last.outcome), make("span", { class: "push soft" }, sides(last))),
    intervals(name, series),
    last.reason ? make("p", { class: "soft" }, last.reason) : null,
  );
}

function sides(metric) {
  if (metric.canary === null || metric.control === null) return "no comparison";
  return [make("b", {}, percent(metric.canary, 2)), " canary, ", make("b", {}, percent(metric.control, 2)), " control"];
}

function lookTable(looks) {
  const rows = [...looks].reverse().flatMap((look) =>
    look.metrics.map((metric) =>
      make(
        "tr",
        {},
        make("td", {}, dayAndTime(look.at)),
        make("td", {}, metric.name),
        make("td", {}, statePill(metric.outcome)),
        make("td", { class: "right" }, metric.canary === null ? "–" : percent(metric.canary, 2)),
        make("td", { class: "right" }, metric.control === null ? "–" : percent(metric.control, 2)),
        make("td", { class: "right" }, !hasInterval(metric) ? "–" : `${points(metric.low)} … ${points(metric.high)}`),
        make("td", { class: "right" }, metric.p < 0.0001 ? "< 0.0001" : metric.p.toFixed(4)),
      ),
    ),
  );
  const head = ["Look", "Metric", "Outcome", "Canary", "Control", "Difference (points)", "p"];
  return make(
    "details",
    { class: "panel block" },
    make("summary", {}, "All looks as a table"),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "All looks" }, make("table", {}, make("thead", {}, make("tr", {}, head.map((text, index) => make("th", { scope: "col", class: index > 2 ? "right" : null }, text)))), make("tbody", {}, rows))),
  );
}

function members(rollout) {
  const parts = Object.entries(rollout.members).sort(([, one], [, other]) => other - one);
  const total = parts.reduce((sum, [, devices]) => sum + devices, 0);
  return make(
    "section",
    { class: "panel block", "aria-labelledby": "members-title" },
    make("h3", { id: "members-title" }, "Devices of this rollout"),
    make("p", { class: "big" }, count(total), make("small", {}, ` at ${shareText(rollout.share)}`)),
    total ? stack(parts.map(([state, devices]) => [inPlainWords(state), devices, KINDS[state] ?? "shade-3"]), "Members by state") : null,
    make("ul", { class: "legend" }, parts.map(([state, devices]) => make("li", {}, make("span", { class: `swatch ${KINDS[state] ?? "shade-3"}` }), inPlainWords(state), ` ${count(devices)}`))),
    make("p", {}, make("a", { href: withQuery("#/devices", { cohort: rollout.cohort }) }, "Devices of the cohort")),
  );
}

const FIGURES = { on_device: "On the device", quality: "Good answers", usd: "USD per 1,000 requests" };

/** The predictions of the replay, each beside what the devices with the new bundle have shown. */
function predicted(rollout) {
  if (!rollout.predictions.length) return null;
  const text = (name, value) => (name === "usd" ? value.toPrecision(3) : percent(value, 1));
  return make(
    "section",
    { class: "panel block", "aria-labelledby": "predicted-title" },
    make("h3", { id: "predicted-title" }, "Predicted and happened"),
    facts(
      rollout.predictions.map(({ name, low, high, value }) => [
        FIGURES[name] ?? name,
        [
          `${text(name, low)} to ${text(name, high)}`,
          value === null ? null : [", ", make("b", {}, text(name, value)), value < low || value > high ? [" ", pill("not as predicted", "warn")] : null],
        ],
      ]),
    ),
  );
}

function about(rollout, context) {
  const difference = rollout.from_bundle ? make("a", { href: withQuery("#/policies", { from: rollout.from_bundle, to: rollout.to_bundle }) }, "Compare the policies") : null;
  return make(
    "section",
    { class: "panel block", "aria-labelledby": "about-title" },
    make("h3", { id: "about-title" }, "About"),
    facts([
      ["From", bundleName(rollout.from_bundle)],
      ["To", bundleName(rollout.to_bundle)],
      ["Stage", rollout.began ? `since ${dayAndTime(rollout.began)}` : null],
      ["State", rollout.entered ? `since ${dayAndTime(rollout.entered)}, ${ago(rollout.entered, context.now())}` : null],
      ["Author", rollout.author],
      ["Created", dayAndTime(rollout.created)],
      ["Id", make("code", {}, rollout.id)],
    ]),
    difference ? make("p", {}, difference) : null,
  );
}

function happened(rollout) {
  const events = [...rollout.events].reverse();
  if (events.length === 0) return null;
  return make(
    "section",
    { class: "panel block", "aria-labelledby": "events-title" },
    make("h3", { id: "events-title" }, "What happened"),
    make(
      "ol",
      { class: "events" },
      events.map((event) =>
        make(
          "li",
          {},
          make("time", { class: "quiet" }, dayAndTime(event.at)),
          make("span", {}, make("b", {}, inPlainWords(event.action)), event.actor ? ` by ${event.actor}` : "", event.reason ? make("span", { class: "soft" }, `: ${event.reason}`) : null),
        ),
      ),
    ),
  );
}
