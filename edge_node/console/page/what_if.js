// "What if the temperature were 90?": an editor of a record's signals; the daemon decides the request again.

import { make, pill, show } from "./elements.js";
import { ask, Refused } from "./api.js";
import { reasonList } from "./detail.js";

const PAUSE_MS = 150;
// What people ask of first, whether or not a rule names it.
const FIRST = ["device.temperature_c", "device.memory_free_mb", "cloud.reachable"];
const RANGES = {
  "device.temperature_c": [20, 110, 1],
  "device.memory_free_mb": [0, 16384, 64],
  "request.temperature": [0, 2, 0.1],
  "0..1": [0, 1, 0.01],
};

export class WhatIfEditor {
  #id;
  #changes = {};
  #timer = null;
  #asked = 0;
  #outcomes = make("div", { "aria-live": "polite" });
  #fields = make("div");
  #reset = make("button", { type: "button", onclick: () => this.#clear() }, "Reset");
  node = make(
    "section",
    { class: "what-if", "aria-labelledby": "what-if-title" },
    make("div", { class: "what-if-head" }, make("h3", { id: "what-if-title" }, "What if a signal had been different?"), this.#reset),
    this.#fields,
    this.#outcomes,
  );

  constructor(id) {
    this.#id = id;
    this.#reset.disabled = true;
    this.#ask((answer) => this.#build(answer.signals));
  }

  async #ask(then = () => {}) {
    const turn = ++this.#asked;
    try {
      const answer = await ask("console/what-if", { id: this.#id, signals: this.#changes });
      if (turn !== this.#asked) return;
      then(answer);
      this.#show(answer);
    } catch (error) {
      if (turn !== this.#asked) return;
      const text = error instanceof Refused ? error.message : "The device does not answer.";
      show(this.#outcomes, make("p", { class: "pill bad" }, text));
    }
  }

  #build(signals) {
    const asked = FIRST.map((name) => signals.find((each) => each.name === name));
    const first = [...asked, ...signals.filter((each) => each.named && !FIRST.includes(each.name))];
    const rest = signals.filter((each) => !first.includes(each));
    show(
      this.#fields,
      make("div", { class: "signals" }, first.map((each) => this.#field(each))),
      make("details", {}, make("summary", {}, `${rest.length} more signals, which no rule names`), make("div", { class: "signals" }, rest.map((each) => this.#field(each)))),
    );
  }

  #clear() {
    this.#changes = {};
    this.#reset.disabled = true;
    this.#ask((answer) => this.#build(answer.signals));
  }

  #set(signal, row, value) {
    const same = JSON.stringify(value) === JSON.stringify(signal.value) && !signal.unrecorded;
    if (same) delete this.#changes[signal.name];
    else this.#changes[signal.name] = value;
    row.classList.toggle("altered", !same);
    this.#reset.disabled = Object.keys(this.#changes).length === 0;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), PAUSE_MS);
  }

  #field(signal) {
    const id = `signal-${signal.name}`;
    const note = [signal.meaning, signal.unit].filter(Boolean).join(", ");
    const row = make("div", { class: "signal" }, make("label", { class: "name mono", for: id, title: note }, signal.name));
    row.append(make("div", { class: "inputs" }, this.#inputs(signal, id, row)));
    if (row.querySelector("[type=range]")) row.querySelector(".inputs").classList.add("with-range");
    return row;
  }

  #inputs(signal, id, row) {
    const change = (value) => this.#set(signal, row, value);
    const placeholder = signal.unrecorded ? "not recorded" : "absent";
    if (signal.type === "bool" || (signal.type === "string" && signal.values.length)) return choice(signal, id, placeholder, change);
    const text = make("input", { id, type: "text", autocomplete: "off", placeholder });
    if (signal.type === "string" || signal.type === "list") {
      text.value = signal.type === "list" ? (signal.value ?? []).join(", ") : (signal.value ?? "");
      const items = () => text.value.split(",").map((item) => item.trim()).filter(Boolean);
      text.addEventListener("input", () => change(signal.type === "list" ? items() : text.value));
      return text;
    }
    return number(signal, id, placeholder, change);
  }

  #show(answer) {
    const before = outcome("As recorded", answer.as_recorded);
    const after = outcome("With your changes", answer.changed);
    const changed = Object.keys(this.#changes).length > 0;
    const differs = changed && before.key !== after.key;
    after.node.classList.toggle("differs", differs);
    const verdict = !changed ? null : make("p", {}, differs ? pill("the decision changes", "accent") : pill("the decision stays the same"));
    const note = `Decided by the active policy, ${answer.policy}@${answer.revision}. Nothing is run.`;
    show(
      this.#outcomes,
      verdict,
      make("div", { class: "outcomes" }, before.node, changed ? after.node : null),
      changed ? make("details", {}, make("summary", {}, "Reasons with your changes"), reasons(answer.changed)) : null,
      make("p", { class: "quiet" }, note),
    );
  }
}

function choice(signal, id, placeholder, change) {
  const bool = signal.type === "bool";
  const values = bool ? ["true", "false"] : signal.values.filter(Boolean);
  const select = make("select", { id }, make("option", { value: "" }, placeholder), values.map((value) => make("option", { value }, value)));
  select.value = signal.value === null ? "" : String(signal.value);
  const read = () => (select.value === "" ? (signal.values.includes("") ? "" : null) : bool ? select.value === "true" : select.value);
  select.addEventListener("change", () => change(read()));
  return select;
}

function number(signal, id, placeholder, change) {
  const range = RANGES[signal.name] ?? RANGES[signal.unit];
  const field = make("input", { id, type: "number", step: "any", autocomplete: "off", placeholder });
  field.value = signal.value === null ? "" : String(signal.type === "double" ? Number(signal.value.toPrecision(4)) : signal.value);
  const recorded = field.value;
  const value = () => (field.value === "" ? null : field.value === recorded ? signal.value : Number(field.value));
  if (range === undefined) {
    field.addEventListener("input", () => change(value()));
    return field;
  }
  const [min, max, step] = range;
  const slider = make("input", { type: "range", min, max, step, "aria-label": `${signal.name}, slider` });
  slider.value = signal.value ?? min;
  slider.addEventListener("input", () => {
    field.value = slider.value;
    change(Number(slider.value));
  });
  field.addEventListener("input", () => {
    slider.value = field.value || min;
    change(value());
  });
  return [slider, field];
}

function outcome(title, redecided) {
  const blocks = redecided.decisions.map((decision) => {
    if (decision === null) return make("p", {}, "Refused: no target has that name.");
    const rule = decision.rule || (decision.attempts.length ? "model named" : "no route");
    return [make("b", {}, rule), plan(decision)];
  });
  const hangs = redecided.hangs_on.length ? make("p", { class: "quiet" }, `Hangs on ${redecided.hangs_on.join(", ")}, not recorded.`) : null;
  const cached = { true: "The cache may answer.", false: "The cache is not used." }[redecided.cached] ?? "The cache: not known.";
  const key = JSON.stringify([redecided.cached, redecided.decisions.map((each) => each && [each.rule, each.attempts, each.on_device])]);
  return { key, node: make("div", { class: "outcome" }, make("h4", { class: "sr-only" }, title), make("p", { class: "quiet" }, title), blocks, hangs, make("p", { class: "quiet" }, cached)) };
}

function plan(decision) {
  if (!decision.attempts.length) return make("p", {}, decision.missing_abilities.length ? "400: no target can take it" : "503: no target is left");
  return make(
    "ol",
    {},
    decision.attempts.map(({ target, handoff }, index) =>
      make("li", {}, `${index + 1}. `, pill(target.name, target.at), handoff ? make("span", { class: "handoff" }, ` hands off below ${handoff.below}`) : null),
    ),
  );
}

function reasons(redecided) {
  return redecided.decisions.filter(Boolean).map((decision) => reasonList(decision.reasons));
}
