// The audit log, newest first. Each row's hash covers the row before.

import { ask, withQuery } from "./api.js";
import { make, pill } from "./elements.js";
import { count, dayAndTime } from "./format.js";
import { inPlainWords } from "./words.js";

const [PAGE, MOST_PAGES] = [1000, 20];

export async function auditView() {
  const rows = await everything();
  const broken = rows.findIndex((row, index) => index > 0 && row.previous !== rows[index - 1].hash);
  const chain = broken < 0 ? pill("chain unbroken", "good") : pill(`chain broken at row ${rows[broken].n}`, "bad");
  const head = ["Row", "When", "Who", "Action", "What", "Hash"];
  return make(
    "div",
    { class: "page" },
    make("div", { class: "view-head" }, make("h2", {}, "Audit"), make("span", { class: "quiet" }, `${count(rows.length)} rows`), rows.length ? chain : null),
    make("p", { class: "quiet" }, "The page compares each row with the hash of the one before; `causeway-fleet audit --verify` computes the hashes again."),
    make(
      "div",
      { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Audit rows" },
      make(
        "table",
        {},
        make("thead", {}, make("tr", {}, head.map((text) => make("th", { scope: "col" }, text)))),
        make("tbody", {}, [...rows].reverse().map(rowOf)),
      ),
    ),
  );
}

async function everything() {
  const rows = [];
  for (let page = 0; page < MOST_PAGES; page += 1) {
    const { rows: more } = await ask(withQuery("v1/audit", { after: rows.at(-1)?.n ?? 0, limit: PAGE }));
    if (more.length === 0) break;
    rows.push(...more);
  }
  return rows;
}

function rowOf(row) {
  return make(
    "tr",
    {},
    make("td", { class: "quiet" }, String(row.n)),
    make("td", {}, dayAndTime(row.at)),
    make("td", {}, row.actor),
    make("td", {}, make("b", {}, inPlainWords(row.action))),
    make("td", { class: "what" }, inWords(row.what)),
    make("td", {}, make("code", { class: "quiet", title: row.hash }, row.hash.slice(0, 10))),
  );
}

function inWords(what) {
  if (typeof what !== "object" || what === null) return String(what ?? "");
  return Object.entries(what)
    .filter(([, value]) => value !== "" && value !== null)
    .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)
    .join(", ");
}
