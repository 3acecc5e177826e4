// A draft of a policy: edited here, checked, compared, replayed and, where the server can, proved there. Nothing is activated.

import { difference, differenceTable } from "./difference.js";
import { make, pill, show } from "./elements.js";
import { count, money } from "./format.js";

const MOST = 20; // requests that leave the device, and moves, that are listed
const STATUS = { proved: "good", refuted: "bad", undecided: "warn" };
const CAUSES = { leaves: "leaves", may_leave: "may leave, after a failure or a handoff", unknown: "may leave" };

export class Playground {
  #base;
  #check;
  #unproved;
  #heads;
  #turn = 0;
  #editor = make("textarea", { id: "draft", spellcheck: "false", autocomplete: "off", autocapitalize: "off", wrap: "off" });
  #button = make("button", { type: "button", class: "primary", onclick: () => this.check() }, "Check");
  #results = make("div", { class: "results", "aria-live": "polite" });
  node;

  /**
   * @param base the text of the policy that the draft would replace
   * @param name its name
   * @param check takes the draft's text and returns the server's report
   * @param next what to do with a good draft
   * @param unproved why this server proves nothing; "" where it proves
   */
  constructor({ base, name, check, next, unproved = "" }) {
    [this.#base, this.#check, this.#unproved, this.#heads] = [base, check, unproved, [name, "the draft"]];
    this.#editor.value = base;
    const reset = make("button", { type: "button", onclick: () => this.#reset() }, "Reset");
    this.#editor.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.check();
    });
    this.node = make(
      "div",
      { class: "playground" },
      make(
        "div",
        { class: "draft" },
        make("label", { for: "draft" }, "Draft of the policy"),
        this.#editor,
        make("div", { class: "actions" }, make("span", { class: "quiet" }, "Ctrl+Enter checks. Nothing is activated."), reset, this.#button),
        make("p", { class: "quiet" }, next),
      ),
      this.#results,
    );
  }

  /** Let the server check the draft, and show its report. */
  async check() {
    if (this.#button.disabled) return; // one at a time
    const [turn, text] = [++this.#turn, this.#editor.value];
    this.#button.disabled = true;
    try {
      const report = await this.#check(text);
      if (turn === this.#turn) show(this.#results, this.#report(report, text));
    } catch (error) {
      if (turn === this.#turn) show(this.#results, make("p", { class: "pill bad", role: "alert" }, error.message));
    }
    this.#button.disabled = false;
  }

  #reset() {
    this.#turn += 1;
    this.#editor.value = this.#base;
    show(this.#results);
    this.#editor.focus();
  }

  #report(report, text) {
    return [
      part("Check", problems(report, (line) => this.#goTo(line))),
      part("Difference", this.#difference(text)),
      report.replay && part("Replay", replayed(report.replay, report.old)),
      report.policy ? part("Proof", this.#unproved ? make("p", { class: "quiet" }, this.#unproved) : proofs(report.proofs)) : null,
    ];
  }

  #difference(text) {
    const { changed, rows } = difference(this.#base, text);
    if (changed === 0) return make("p", {}, "The draft is the policy itself.");
    return [make("p", {}, `${count(changed)} ${changed === 1 ? "line differs" : "lines differ"}.`), differenceTable(this.#heads, make("tbody", {}, rows()))];
  }

  #goTo(line) {
    const lines = this.#editor.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    this.#editor.focus();
    this.#editor.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
  }
}

function part(title, ...children) {
  return make("section", {}, make("h3", {}, title), children);
}

function problems({ problems: found, policy }, goTo) {
  const errors = found.filter((each) => each.severity === "error").length;
  const verdict = errors ? pill(`${count(errors)} ${errors === 1 ? "error" : "errors"}`, "bad") : pill(`${policy} has no errors`, "good");
  const listed = found.map(({ location: { line, column, path }, message, severity }) =>
    make(
      "li",
      {},
      pill(severity, severity === "error" ? "bad" : "warn"),
      " ",
      line ? [make("button", { type: "button", class: "line", onclick: () => goTo(line) }, `line ${line}:${column}`), " "] : null,
      path ? [make("code", {}, path), " "] : null,
      message,
    ),
  );
  return [make("p", {}, verdict), listed.length ? make("ul", { class: "problems" }, listed) : null];
}

function replayed(report, old) {
  const { leaving, moves, unknown, cost } = report;
  if (report.requests === 0) return make("p", { class: "quiet" }, "No recorded request to replay yet.");
  const usd = cost.after_least_usd === cost.after_most_usd ? money(cost.after_least_usd) : `${money(cost.after_least_usd)} to ${money(cost.after_most_usd)}`;
  const moved = moves.filter((each) => each.moved);
  return [
    make(
      "p",
      {},
      leaving.length ? pill(`${count(leaving.length)} would or may leave the device`, "bad") : pill("no more leave the device", "good"),
      ` ${count(report.unchanged)} of ${count(report.requests)} recorded requests stay where ${old} sends them. Their cost: ${money(cost.before_usd)} before, ${usd} with the draft.`,
    ),
    table(
      ["Requests", "From", "To", "Rule before", "Rule now"],
      [
        ...moved.map((each) => [count(each.requests), each.before, each.after, each.rule_before, each.rule_after]),
        ...unknown.map((each) => [count(each.requests), each.before, each.possible.join(" or "), "", `hangs on ${each.hangs_on.join(", ")}, not recorded`]),
      ],
      "Requests that move",
    ),
    table(
      ["Leaves", "Tags", "From", "To", "Why"],
      leaving.map((each) => [each.id, each.tags.join(", "), each.before, each.after, [CAUSES[each.cause], each.bound_by.length ? `bound by ${each.bound_by.join(", ")}` : ""].filter(Boolean).join("; ")]),
      "Requests that leave the device",
    ),
  ];
}

function table(head, rows, label) {
  if (!rows.length) return null;
  const more = rows.length - MOST;
  return [
    make(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      make("table", {}, make("thead", {}, make("tr", {}, head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, rows.slice(0, MOST).map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell || "–")))))),
    ),
    more > 0 ? make("p", { class: "quiet" }, `and ${count(more)} more`) : null,
  ];
}

/** Return a counterexample as JSON, which a file of test cases takes, without what it leaves open. */
function caseText(example) {
  const open = (value) => value === null || value === "" || (typeof value === "object" && Object.keys(value).length === 0);
  const filled = (value, drop = open) => Object.fromEntries(Object.entries(value).map(([key, one]) => [key, one !== null && typeof one === "object" && !Array.isArray(one) ? filled(one) : one]).filter(([, one]) => !drop(one)));
  return JSON.stringify({ ...filled(example), request: filled(example.request, (value) => value === false || open(value)) }, null, 2);
}

function proofs(statements) {
  if (!statements.length) return make("p", { class: "quiet" }, "The policy promises nothing that can be proved.");
  return make(
    "ul",
    { class: "problems" },
    statements.map(({ name, text, status, why, case: example }) =>
      make("li", {}, pill(status, STATUS[status]), " ", make("b", {}, name), ` ${text}`, why ? make("span", { class: "soft" }, ` (${why})`) : null, example ? make("pre", { tabindex: "0", role: "region", "aria-label": `Counterexample of ${name}` }, caseText(example)) : null),
    ),
  );
}
