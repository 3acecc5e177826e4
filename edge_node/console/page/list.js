// The list of decisions: newest first, bounded, each a link that opens it.

import { arrowKeys, byId, make, pill, say } from "./elements.js";
import { count, duration, money, timeOfDay } from "./format.js";
import { decidedBy, searchable } from "./words.js";

const MOST = 300;

export class DecisionList {
  #rows = new Map(); // id → {record, row, text}
  #route = "";
  #search = "";
  #body = byId("rows");

  constructor() {
    byId("search").addEventListener("input", (event) => {
      this.#search = event.target.value.trim().toLowerCase();
      this.#filter();
    });
    for (const button of document.querySelectorAll(".filters button")) {
      button.addEventListener("click", () => {
        this.#route = button.dataset.route;
        for (const each of document.querySelectorAll(".filters button")) each.setAttribute("aria-pressed", String(each === button));
        this.#filter();
      });
    }
    arrowKeys(this.#body, "tr:not([hidden]) a");
    this.#body.addEventListener("click", (event) => {
      const link = event.target.closest("tr")?.querySelector("a");
      if (link && !getSelection().toString()) location.hash = link.hash;
    });
  }

  /** Return the records in the list, newest first. */
  get records() {
    return [...this.#rows.values()].map((each) => each.record).reverse();
  }

  /** Return a record; undefined if the list does not hold it. */
  find(id) {
    return this.#rows.get(id)?.record;
  }

  /** Add records, newest first as the daemon returns them; return how many are new. */
  add(records, arrived) {
    let added = 0;
    for (const record of [...records].reverse()) {
      if (this.#rows.has(record.id)) continue;
      const row = rowOf(record, arrived);
      this.#rows.set(record.id, { record, row, text: searchable(record) });
      row.hidden = !this.#matches(this.#rows.get(record.id));
      this.#body.prepend(row);
      added += 1;
    }
    this.#trim();
    if (added) this.#count();
    return added;
  }

  /** Mark the row of the open decision. */
  select(id) {
    for (const [each, { row }] of this.#rows) {
      row.classList.toggle("selected", each === id);
      row.querySelector("a").toggleAttribute("aria-current", each === id);
    }
  }

  focus(id) {
    this.#rows.get(id)?.row.querySelector("a").focus();
  }

  #trim() {
    for (const [id, { row }] of this.#rows) {
      if (this.#rows.size <= MOST) return;
      if (row.contains(document.activeElement) || row.classList.contains("selected")) continue;
      row.remove();
      this.#rows.delete(id);
    }
  }

  #matches({ record, text }) {
    return (this.#route === "" || record.outcome.route === this.#route) && text.includes(this.#search);
  }

  #filter() {
    for (const each of this.#rows.values()) each.row.hidden = !this.#matches(each);
    this.#count();
  }

  #count() {
    const visible = [...this.#rows.values()].filter((each) => !each.row.hidden).length;
    byId("empty").hidden = visible > 0;
    byId("empty").textContent = this.#rows.size ? "No decision matches." : "No decision yet. The next request appears here.";
    const filtered = this.#route !== "" || this.#search !== "";
    say(byId("shown"), filtered ? `${count(visible)} of the newest ${count(this.#rows.size)}` : `the newest ${count(this.#rows.size)}`);
  }
}

function rowOf(record, arrived) {
  const { outcome } = record;
  const tokens = outcome.usage.prompt_tokens + outcome.usage.completion_tokens;
  const why = decidedBy(record);
  return make(
    "tr",
    { class: arrived ? "arrived" : null },
    make("td", {}, make("a", { href: `#${record.id}` }, timeOfDay(record.created))),
    make("td", {}, routePill(outcome)),
    make("td", {}, make("span", { class: "why", title: why }, why)),
    make("td", { class: outcome.target ? "" : "quiet" }, outcome.target || "–"),
    make("td", { class: "right" }, duration(outcome.ttft_ms)),
    make("td", { class: "right" }, duration(outcome.total_ms)),
    make("td", { class: "right" }, tokens ? count(tokens) : "–"),
    make("td", { class: "right" }, outcome.usd ? money(outcome.usd) : "–"),
  );
}

/** Return the route as a pill; a request without an answer says its status. */
export function routePill(outcome) {
  if (outcome.status === "cancelled") return pill("cancelled");
  if (outcome.status !== "ok") return pill(outcome.http_status < 400 ? "broken off" : String(outcome.http_status), "bad");
  return [pill(outcome.route, outcome.route), outcome.degraded ? [" ", pill("degraded", "warn")] : null];
}
