// Numbers and times for people. The pages of device and fleet load this file.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });

export const count = (value) => plain.format(value);

/** Return three significant digits: 0.0123, 1.23, 12.3, 1,234. */
export function figure(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return plain.format(value);
  return String(Number(value.toPrecision(3)));
}

/** Return a duration given in milliseconds. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${figure(ms)} ms`;
  return span(ms / 1000);
}

/** Return a duration given in seconds. */
export function span(seconds) {
  if (seconds < 60) return `${figure(seconds)} s`;
  const [minutes, hours, days] = [seconds / 60, seconds / 3600, seconds / 86400].map(Math.floor);
  if (hours === 0) return `${minutes} min`;
  if (days === 0) return `${hours} h ${minutes % 60} min`;
  return `${days} d ${hours % 24} h`;
}

/** Return how long ago a time was, all in Unix seconds. */
export function ago(at, now) {
  return now - at < 2 ? "now" : `${span(Math.max(0, Math.round(now - at)))} ago`;
}

export const timeOfDay = (unix) => clock.format(unix * 1000);
export const dayAndTime = (unix) => `${day.format(unix * 1000)}, ${clock.format(unix * 1000)}`;
export const percent = (share, digits = 0) => `${(share * 100).toFixed(digits)} %`;
export const money = (usd) => (usd !== 0 && Math.abs(usd) < 0.01 ? `$${figure(usd)}` : `$${usd.toFixed(2)}`);

/** Return a number of megabytes (2^20 bytes). */
export function megabytes(mb) {
  return mb >= 1024 ? `${figure(mb / 1024)} GB` : `${figure(mb)} MB`;
}
