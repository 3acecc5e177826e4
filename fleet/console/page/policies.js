// The policies of two bundles side by side.

import { ask, withQuery } from "./api.js";
import { make, show } from "./elements.js";
import { count } from "./format.js";
import { sideBySide } from "./line_diff.js";
import { bundleName } from "./words.js";

const AROUND = 4; // unchanged lines that are shown around a change

export async function policiesView(context, _id, query) {
  const [fleet, rollouts] = await Promise.all([ask("v1/fleet"), ask("v1/rollouts")]);
  const bundles = new Set([query.get("from"), query.get("to")]);
  for (const cohort of fleet.cohorts) for (const bundle of Object.keys(cohort.running)) bundles.add(bundle);
  for (const rollout of rollouts) bundles.add(rollout.from_bundle).add(rollout.to_bundle);
  bundles.delete(null);
  bundles.delete("");
  const known = [...bundles];
  const from = query.get("from") ?? known[0] ?? "";
  const to = query.get("to") ?? known[1] ?? known[0] ?? "";
  const choice = (label, value, other) => {
    const select = make("select", {}, known.map((bundle) => make("option", { value: bundle }, bundle.slice(0, 16))));
    select.value = value;
    select.addEventListener("change", () => {
      location.hash = withQuery("#/policies", other(select.value)).slice(1);
    });
    return make("label", { class: "filter" }, make("span", {}, label), select);
  };
  return make(
    "div",
    { class: "page" },
    make("div", { class: "view-head" }, make("h2", {}, "Policies")),
    make("div", { class: "filter-bar" }, choice("From", from, (value) => ({ from: value, to })), choice("To", to, (value) => ({ from, to: value }))),
    from && to ? await difference(from, to) : make("p", { class: "panel hint quiet" }, "No bundle has been rolled out yet."),
  );
}

async function difference(from, to) {
  const texts = await ask(withQuery("v1/policies/diff", { from, to }));
  const rows = sideBySide(texts.from.trimEnd(), texts.to.trimEnd());
  const changed = rows.filter(([, , kind]) => kind === "changed").length;
  const body = make("tbody", {});
  const draw = (everything) => show(body, everything ? rows.map(rowOf) : folded(rows));
  draw(false);
  const all = make("input", { type: "checkbox" });
  all.addEventListener("change", () => draw(all.checked));
  return [
    make("p", { class: "view-head" }, make("span", { class: "soft", role: "status" }, changed ? `${count(changed)} lines differ` : "The policies are the same."), make("label", { class: "push" }, all, " show all lines")),
    make(
      "div",
      { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Policies side by side" },
      make(
        "table",
        { class: "difference" },
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, bundleName(from)), make("th", { scope: "col" }, bundleName(to)))),
        body,
      ),
    ),
  ];
}

function rowOf([left, right, kind]) {
  const side = (line, change, word) =>
    make("td", { class: line === null ? "blank" : kind === "same" ? null : change }, line === null ? null : [kind === "same" ? null : make("span", { class: "sr-only" }, `${word}: `), make("code", {}, line || " ")]);
  return make("tr", {}, side(left, "gone", "removed"), side(right, "fresh", "added"));
}

/** Leave out long runs of equal lines. */
function folded(rows) {
  const near = rows.map((_, index) => rows.slice(Math.max(0, index - AROUND), index + AROUND + 1).some(([, , kind]) => kind === "changed"));
  const nodes = [];
  let skipped = 0;
  const flush = () => {
    if (skipped) nodes.push(make("tr", {}, make("td", { class: "fold", colspan: "2" }, `${count(skipped)} equal lines`)));
    skipped = 0;
  };
  rows.forEach((row, index) => {
    if (!near[index]) {
      skipped += 1;
      return;
    }
    flush();
    nodes.push(rowOf(row));
  });
  flush();
  return nodes;
}
