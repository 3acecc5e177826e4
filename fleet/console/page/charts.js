// Canary against control as small drawings: the difference with its interval at each look.

import { draw, make } from "./elements.js";
import { dayAndTime } from "./format.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [460, 128, 52, 12, 10, 20];

/** Return points of a difference of shares, with a sign. */
export function points(difference) {
  const value = Math.abs(difference) * 100;
  const digits = value >= 10 ? 0 : value >= 1 ? 1 : 2;
  const sign = difference > 0 ? "+" : difference < 0 ? "−" : "±";
  return `${sign}${value.toFixed(digits)}`;
}

/** Whether canary and control were compared, with an interval that ends: JSON has no infinity. */
export const hasInterval = (metric) => metric.low !== null && metric.high !== null;

/** Return the intervals of one metric over the looks; positive is worse than the control. `looks` has [at, metric]. */
export function intervals(name, looks) {
  const known = looks.filter(([, metric]) => hasInterval(metric));
  if (known.length === 0) return make("p", { class: "quiet" }, "No interval yet: too few devices with requests.");
  const margin = known.at(-1)[1].margin ?? null;
  const ends = known.flatMap(([, metric]) => [metric.low, metric.high]);
  const [low, high] = [Math.min(0, ...ends), Math.max(0, margin ?? 0, ...ends)];
  const room = Math.max(high - low, 1e-4) * 0.08;
  const [bottom, top] = [low - room, high + room];
  const y = (value) => TOP + ((top - value) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
  const step = (WIDTH - LEFT - RIGHT) / Math.max(known.length, 4);
  const x = (index) => LEFT + step * (index + 0.5);
  const last = known.at(-1)[1];
  const summary =
    `${name}, canary minus control in percentage points at ${known.length} looks; ` +
    `at the last between ${points(last.low)} and ${points(last.high)}`;
  return draw(
    "svg",
    { class: "intervals", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary },
    line(y(0), "zero"),
    label(y(0), "0"),
    margin === null ? null : [line(y(margin), "margin"), label(y(margin), points(margin))],
    Math.abs(y(low) - y(0)) < 12 ? null : label(y(low), points(low)),
    Math.abs(y(high) - y(0)) < 12 || (margin !== null && Math.abs(y(high) - y(margin)) < 12) ? null : label(y(high), points(high)),
    known.map(([at, metric], index) => whisker(x(index), y, at, metric, index, step)),
  );
}

function line(y, kind) {
  return draw("line", { class: kind, x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y });
}

function label(y, text) {
  return draw("text", { class: "axis", x: LEFT - 8, y: y + 4, "text-anchor": "end" }, text);
}

function whisker(x, y, at, metric, index, step) {
  const middle = metric.canary !== null && metric.control !== null ? metric.canary - metric.control : (metric.low + metric.high) / 2;
  return draw(
    "g",
    { class: `whisker ${metric.outcome}` },
    draw("title", {}, `${dayAndTime(at)}: ${points(metric.low)} to ${points(metric.high)}, ${metric.outcome}`),
    draw("rect", { class: "hit", x: x - step / 2, y: TOP, width: step, height: HEIGHT - TOP - BOTTOM }),
    draw("line", { x1: x, x2: x, y1: y(metric.low), y2: y(metric.high) }),
    draw("line", { x1: x - 5, x2: x + 5, y1: y(metric.low), y2: y(metric.low) }),
    draw("line", { x1: x - 5, x2: x + 5, y1: y(metric.high), y2: y(metric.high) }),
    draw("circle", { cx: x, cy: y(middle), r: 3.5 }),
    draw("text", { class: "axis", x, y: HEIGHT - 4, "text-anchor": "middle" }, String(index + 1)),
  );
}

/** Return a bar of counts by name; `parts` has [name, count, kind]. */
export function stack(parts, label) {
  const bar = make("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.map(([name, count]) => `${count} ${name}`).join(", ")}` });
  for (const [name, count, kind] of parts) {
    if (!count) continue;
    const part = make("span", { class: `part ${kind}`, title: `${name}: ${count}` });
    part.style.flexGrow = count;
    bar.append(part);
  }
  return bar;
}
