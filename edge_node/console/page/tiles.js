// The tiles at the top: a figure of the device, a note, and the last five minutes as a line.

import { draw, make, show } from "./elements.js";
import { count, figure, megabytes, money, percent } from "./format.js";

const WINDOW_S = 300;
const [WIDTH, HEIGHT] = [200, 36];

/** The readings of the last five minutes, by signal. */
export class History {
  #series = new Map();

  add(name, at, value) {
    if (value === null || value === undefined) return;
    const series = this.#series.get(name) ?? [];
    this.#series.set(name, series);
    series.push([at, value]);
    // Readings arrive in order, save those that decision records bring when the page opens.
    if (series.length > 1 && series.at(-2)[0] > at) series.sort((one, other) => one[0] - other[0]);
    while (series.length && series[0][0] < series.at(-1)[0] - WINDOW_S) series.shift();
  }

  of(name) {
    return this.#series.get(name) ?? [];
  }
}

/** Return a line of readings, or nothing while there is no more than one. */
function spark(readings, now, label, text) {
  if (readings.length < 2) return null;
  const values = readings.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(high - low, Math.abs(high) * 0.05, 1e-9);
  const x = (at) => WIDTH * (1 - (now - at) / WINDOW_S);
  const y = (value) => HEIGHT - 3 - ((value - low + (room - (high - low)) / 2) / room) * (HEIGHT - 8);
  const points = readings.filter(([at]) => at >= now - WINDOW_S).map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
  if (points.length < 2) return null;
  const [left, right] = [points[0].split(",")[0], points.at(-1).split(",")[0]];
  const summary = `${label} over five minutes: from ${text(low)} to ${text(high)}`;
  return draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": summary },
    draw("polygon", { class: "spark-area", points: `${left},${HEIGHT} ${points.join(" ")} ${right},${HEIGHT}` }),
    draw("polyline", { class: "spark-line", points: points.join(" ") }),
  );
}

function tile(title, value, unit, note, line) {
  const figureNode =
    value === null
      ? make("p", { class: "value absent" }, unit)
      : make("p", { class: "value" }, value, unit ? [" ", make("small", {}, unit)] : null);
  return make("div", { class: "panel tile" }, make("h2", {}, title), figureNode, make("p", { class: "note" }, note), line);
}

/** Return a bar of shares, for people who see it; the note beside it has the figures. */
export function shares(parts) {
  const bar = make("div", { class: "shares", "aria-hidden": "true" });
  for (const [name, value] of parts) {
    if (!value) continue;
    const part = make("span", { class: `fill-${name}` });
    part.style.flexGrow = value;
    bar.append(part);
  }
  return bar;
}

function tally(requests) {
  const routes = { cache: 0, edge: 0, cloud: 0, none: 0 };
  let total = 0;
  for (const each of requests) {
    routes[each.route] = (routes[each.route] ?? 0) + each.count;
    total += each.count;
  }
  return { routes, total };
}

export const READINGS = {
  temperature: (snapshot) => snapshot.device.temperature_c,
  memory: (snapshot) => snapshot.device.memory_free_mb,
  cpu: (snapshot) => snapshot.device.cpu,
  speed: (snapshot) => snapshot.edge.tokens_per_s,
};

/** Show the device's state. */
export function showTiles(node, state, history) {
  const { device, edge, cloud, spend } = state.snapshot;
  const now = state.now;
  const line = (name, label, text) => spark(history.of(name), now, label, text);
  const { routes, total } = tally(state.requests);
  const celsius = (value) => `${value.toFixed(1)} °C`;
  const extras = [device.power_w !== null && `${figure(device.power_w)} W`, device.battery !== null && `battery ${percent(device.battery)}`];
  const engineQueue = edge.queue ? `, ${count(edge.queue)} in the engine` : "";
  show(
    node,
    device.temperature_c === null
      ? tile("Temperature", null, "no zone is readable", "")
      : tile("Temperature", device.temperature_c.toFixed(1), "°C", heatNote(device, extras), line("temperature", "Temperature", celsius)),
    device.memory_free_mb === null
      ? tile("Memory free", null, "not readable", "")
      : tile("Memory free", ...megabytes(device.memory_free_mb).split(" "), "", line("memory", "Free memory", megabytes)),
    device.cpu === null
      ? tile("CPU", null, "not readable", "")
      : tile("CPU", percent(device.cpu).replace(" %", ""), "%", "", line("cpu", "CPU", percent)),
    edge.tokens_per_s === null
      ? tile("Tokens per second", null, edge.loaded === null ? "no engine" : "nothing generated yet", "")
      : tile("Tokens per second", figure(edge.tokens_per_s), "one stream", edge.loaded ? "" : "engine not loaded", line("speed", "Speed", figure)),
    tile(
      "Queue",
      count(state.waiting),
      "waiting",
      `${count(state.running)} of ${count(state.concurrent)} running${engineQueue}`,
      line("waiting", "Queue", count),
    ),
    tile(
      "Cache hits",
      total ? percent(routes.cache / total).replace(" %", "") : "0",
      "%",
      `of ${count(total)} requests`,
      shares([["cache", routes.cache], ["edge", routes.edge], ["cloud", routes.cloud], ["none", routes.none]]),
    ),
    tile("Spent today", spend.usd_today === null ? null : money(spend.usd_today), spend.usd_today === null ? "not counted" : "", spendNote(spend)),
    cloudTile(cloud, state),
  );
}

function heatNote(device, extras) {
  const rest = extras.filter(Boolean).join(", ");
  return device.throttled ? make("span", { class: "hot" }, "throttled") : rest;
}

function spendNote(spend) {
  return [spend.usd_hour !== null && `${money(spend.usd_hour)} in an hour`, spend.usd_month !== null && `${money(spend.usd_month)} this month`]
    .filter(Boolean)
    .map((text) => make("div", {}, text));
}

function cloudTile(cloud, state) {
  if (state.readiness.cloud === "" && cloud.reachable === null) return tile("Cloud", null, "none is configured", "");
  const breaker = cloud.breaker && cloud.breaker !== "closed" ? `breaker ${cloud.breaker.replace("_", "-")}` : "";
  const word = cloud.reachable === null ? "not probed" : cloud.reachable ? "up" : "unreachable";
  const trip = cloud.rtt_ms === null ? "" : `${figure(cloud.rtt_ms)} ms`;
  const notes = [trip && "round trip", breaker, cloud.tier && `last tier ${cloud.tier}`].filter(Boolean).join(", ");
  const each = state.readiness.clouds.map(({ name, region, state: found }) =>
    make("div", {}, `${name}${region && ` in ${region}`}: ${found === "unknown" ? "not probed" : found}`),
  );
  return tile("Cloud", word, trip, each.length ? [make("div", {}, notes), ...each] : notes);
}
