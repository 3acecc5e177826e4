// The policies of two bundles side by side, and a draft beside the policy of one.

import { ask, post, withQuery } from "./api.js";
import { difference, differenceTable } from "./difference.js";
import { make, show } from "./elements.js";
import { count } from "./format.js";
import { Playground } from "./playground.js";
import { bundleName, may } from "./words.js";

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
    make("div", { class: "filter-bar" }, choice("From", from, (value) => ({ from: value, to })), choice("To", to, (value) => ({ from, to: value })), to && may(context.session, "operator") ? make("a", { class: "button push", href: `#/policies/${to}` }, "Edit a draft of To") : null),
    from && to ? await compared(from, to) : make("p", { class: "panel hint quiet" }, "No bundle has been rolled out yet."),
  );
}

/** A draft beside the policy of a bundle: the control plane checks, replays and proves it. */
export async function draftView(context, bundle) {
  const { from: base } = await ask(withQuery("v1/policies/diff", { from: bundle, to: bundle }));
  const playground = new Playground({
    base,
    name: bundleName(bundle),
    check: (policy) => post("v1/policies/try", { bundle, policy }),
    next: "A good draft goes into the fleet's folder; causeway-fleet sign and apply roll it out.",
  });
  return make(
    "div",
    { class: "page" },
    make("div", { class: "view-head" }, make("div", {}, make("p", {}, make("a", { href: "#/policies" }, "Policies")), make("h2", {}, "Draft of ", bundleName(bundle)))),
    playground.node,
  );
}

async function compared(from, to) {
  const texts = await ask(withQuery("v1/policies/diff", { from, to }));
  const { changed, rows } = difference(texts.from, texts.to);
  const body = make("tbody", {}, rows());
  const all = make("input", { type: "checkbox" });
  all.addEventListener("change", () => show(body, rows(all.checked)));
  return [
    make("p", { class: "view-head" }, make("span", { class: "soft", role: "status" }, changed ? `${count(changed)} lines differ` : "The policies are the same."), make("label", { class: "push" }, all, " show all lines")),
    differenceTable([bundleName(from), bundleName(to)], body),
  ];
}
