// The panel at the side: one decision with its why, or, while none is open, which rules decide.

import { draw, facts, make, pill, show } from "./elements.js";
import { count, dayAndTime, duration, figure, money, percent } from "./format.js";
import { routePill } from "./list.js";
import { decidedBy, inWords, outcomeInWords } from "./words.js";

/** Return the reasons of a decision as a list. */
export function reasonList(reasons) {
  return make(
    "ul",
    { class: "reasons" },
    reasons.map((reason) => {
      const { mark, kind, text } = inWords(reason);
      return make(
        "li",
        { class: kind },
        make("span", { class: "mark", "aria-hidden": "true" }, mark),
        make("span", {}, reason.rule ? [make("b", {}, reason.rule), " "] : null, text),
      );
    }),
  );
}

/** Show which rules decided the records of the list. */
export function showOverview(node, records) {
  const rules = new Map();
  for (const record of records) {
    const name = decidedBy(record);
    const rule = rules.get(name) ?? { total: 0, routes: { edge: 0, cloud: 0, cache: 0, none: 0 } };
    rule.total += 1;
    rule.routes[record.outcome.route] += 1;
    rules.set(name, rule);
  }
  const most = Math.max(1, ...[...rules.values()].map((rule) => rule.total));
  const bars = [...rules]
    .sort(([, one], [, other]) => other.total - one.total)
    .map(([name, { total, routes }]) => {
      const track = make("div", { class: "track", "aria-hidden": "true" });
      for (const [route, part] of Object.entries(routes)) {
        const bar = make("span", { class: `fill-${route}` });
        bar.style.width = `${(100 * part) / most}%`;
        track.append(bar);
      }
      const where = Object.entries(routes).filter(([, part]) => part).map(([route, part]) => `${count(part)} ${route}`).join(", ");
      return make("li", {}, make("b", {}, name), make("span", { class: "soft" }, where), track);
    });
  show(
    node,
    make("div", { class: "detail-head" }, make("h2", { id: "detail-title" }, "What decides")),
    bars.length ? make("ul", { class: "bars" }, bars) : make("p", { class: "quiet" }, "The rules of the next requests are counted here."),
    make("p", { class: "quiet" }, "Open a decision to see its reasons and attempts, and to try it with other signals. Arrow keys move in the list."),
  );
}

/** Show one record; `whatIf` is the node of its editor. */
export function showRecord(node, record, whatIf, close) {
  const { outcome, decision, request } = record;
  show(
    node,
    make(
      "div",
      { class: "detail-head" },
      make("h2", { id: "detail-title", tabindex: "-1" }, outcomeInWords(outcome)),
      make("button", { type: "button", onclick: close }, "Close"),
    ),
    make(
      "div",
      { class: "pills" },
      routePill(outcome),
      pill(decidedBy(record), "accent"),
      decision?.private ? pill("private: stays on the device", "good") : decision?.on_device ? pill("stays on the device", "good") : null,
    ),
    section("Why", decision === null ? make("p", { class: "soft" }, undecided(outcome)) : reasonList(decision.reasons)),
    section("Hops", hops(record)),
    whatIf,
    section("Request", requestFacts(record, request, outcome)),
  );
}

function section(title, ...children) {
  return make("section", {}, make("h3", {}, title), children);
}

function undecided(outcome) {
  if (outcome.route === "cache") return "An answer in the cache was fresh, so no decision was needed.";
  return `The request ended before a decision: ${outcome.error || outcome.status}.`;
}

/** The way of a request: what it met, when, what it cost and how hot the device was. */
function hops(record) {
  const { request, outcome, decision } = record;
  const [first] = outcome.attempts;
  const tokens = [record.estimates.prompt_tokens !== null && `${count(record.estimates.prompt_tokens)} tokens`, request.stream && "streamed"];
  const cache = [outcome.cache, outcome.cache_reason, outcome.cache_age_s !== null && `${figure(outcome.cache_age_s)} s old`];
  const cost = outcome.usd ? `${money(outcome.usd)}${outcome.estimated ? ", in part estimated" : ""}` : "no cost";
  return make(
    "ol",
    {},
    hop("Request", 0, [request.kind, request.client && `of ${request.client}`, ...tokens]),
    outcome.status === "rejected" ? hop("Admission", outcome.total_ms, [`refused: ${outcome.error}`]) : hop("Cache", null, cache),
    decision && hop("Decision", first ? first.started_ms : null, [decidedBy(record), ...heat(record.snapshot.device)]),
    outcome.attempts.map((attempt) => attemptHop(attempt, outcome)),
    hop("Outcome", outcome.total_ms, [outcome.status === "ok" ? `answered by ${outcome.target || "the cache"}` : outcome.error || outcome.status, cost]),
  );
}

function hop(name, at, notes) {
  const time = at === null ? null : make("span", { class: "push soft" }, at ? `after ${duration(at)}` : "at 0");
  return make("li", { class: "hop" }, make("div", { class: "hop-head" }, make("b", {}, name), make("span", { class: "soft" }, notes.filter(Boolean).join(", ")), time));
}

function heat(device) {
  return [device.temperature_c === null ? "temperature not readable" : `at ${device.temperature_c.toFixed(1)} °C`, device.throttled && "throttled", device.power_w !== null && `${figure(device.power_w)} W`];
}

function attemptHop(attempt, outcome) {
  const whole = Math.max(outcome.total_ms, ...outcome.attempts.map((each) => each.started_ms + (each.duration_ms ?? 0)), 0.001);
  const took = attempt.duration_ms ?? 0;
  const first = Math.min(attempt.ttft_ms ?? took, took);
  const scale = (ms) => (100 * ms) / whole;
  const kind = `bar-${attempt.at}`;
  const good = attempt.error === "" && attempt.state === "done";
  return make(
    "li",
    { class: "hop attempt" },
    make(
      "div",
      { class: "hop-head" },
      make("b", {}, "Attempt"),
      pill(attempt.target, attempt.at),
      make("span", { class: good ? "soft" : "" }, attempt.state.replaceAll("_", " ")),
      make("span", { class: "push soft" }, `took ${duration(attempt.duration_ms)}`),
    ),
    draw(
      "svg",
      { viewBox: "0 0 100 14", preserveAspectRatio: "none", role: "img", "aria-label": lane(attempt) },
      draw("rect", { class: "lane", x: 0, y: 4, width: 100, height: 6, rx: 1 }),
      draw("rect", { class: `${kind} waiting`, x: scale(attempt.started_ms), y: 4, width: Math.max(0.6, scale(first)), height: 6 }),
      draw("rect", { class: kind, x: scale(attempt.started_ms + first), y: 4, width: Math.max(0.6, scale(took - first)), height: 6 }),
    ),
    make("p", { class: "quiet" }, attemptNote(attempt)),
  );
}

function lane(attempt) {
  const first = attempt.ttft_ms === null ? "no token" : `first token after ${duration(attempt.ttft_ms)}`;
  return `${attempt.target}: started at ${duration(attempt.started_ms)}, ${first}, took ${duration(attempt.duration_ms)}`;
}

function attemptNote(attempt) {
  const { confidence } = attempt;
  return [
    attempt.error && `${attempt.error}${attempt.detail ? `: ${attempt.detail}` : ""}`,
    attempt.ttft_ms !== null && `first token after ${duration(attempt.ttft_ms)}`,
    attempt.tokens > 0 && `${count(attempt.tokens)} tokens`,
    confidence && attempt.state !== "handed_off" && `confidence ${confidence.score.toFixed(2)} over ${confidence.tokens} tokens`,
    confidence && confidence.calibration && `calibration: ${confidence.calibration} (shipped: ${confidence.shipped.toFixed(2)})`,
  ]
    .filter(Boolean)
    .join(" · ");
}

function requestFacts(record, request, outcome) {
  const sets = [
    request.temperature !== null && `temperature ${figure(request.temperature)}`,
    request.max_tokens !== null && `at most ${count(request.max_tokens)} tokens`,
    request.n > 1 && `${request.n} choices`,
    request.stream && "streamed",
    request.tools && "tools",
    request.json && "JSON",
  ];
  const cached = outcome.usage.cached_tokens;
  return facts([
    ["When", dayAndTime(record.created)],
    ["Asked for", `${request.kind}, model ${request.model}`],
    ["Settings", sets.filter(Boolean).join(", ")],
    ["Client", request.client],
    ["Tags", request.tags.join(", ")],
    ["Preference", request.prefer],
    ["Content", request.modalities.join(", ") === "text" ? null : request.modalities.join(", ")],
    ["Tokens", `${count(outcome.usage.prompt_tokens)} in${cached ? ` (${count(cached)} reused)` : ""}, ${count(outcome.usage.completion_tokens)} out`],
    ["Cost", outcome.usd ? money(outcome.usd) : null],
    ["Cache", [outcome.cache, outcome.cache_reason].filter(Boolean).join(": ")],
    ["Quality", record.estimates.quality === null ? null : percent(record.estimates.quality)],
    ["Policy", record.decision && `${record.decision.policy}@${record.decision.revision}`],
    ["Id", make("code", {}, record.id)],
  ]);
}
