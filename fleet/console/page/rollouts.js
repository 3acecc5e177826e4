// The first view: the cohorts with what their devices run, and the rollouts.

import { ask, post, withQuery } from "./api.js";
import { stack } from "./charts.js";
import { confirm } from "./confirm.js";
import { facts, make, pill } from "./elements.js";
import { ago, count, money, percent } from "./format.js";
import { ladder } from "./ladder.js";
import { bundleName, ENDED, may, statePill } from "./words.js";

const SHADES = ["shade-1", "shade-2", "shade-3", "shade-4"];

export async function rolloutsView(context) {
  const [fleet, rollouts] = await Promise.all([ask("v1/fleet"), ask("v1/rollouts")]);
  const live = rollouts.filter((each) => !ENDED.includes(each.state));
  const ended = rollouts.filter((each) => !live.includes(each));
  return make(
    "div",
    { class: "page" },
    make("h2", { class: "sr-only" }, "Rollouts"),
    fleet.problems.length ? make("ul", { class: "panel block warn" }, fleet.problems.map((text) => make("li", {}, text))) : null,
    fleetTiles(fleet.cohorts),
    make("section", { "aria-labelledby": "cohorts-title" }, make("h3", { id: "cohorts-title" }, "Cohorts"), make("ul", { class: "cards" }, fleet.cohorts.map((each) => cohortCard(each, context)))),
    make(
      "section",
      { "aria-labelledby": "live-title" },
      make("h3", { id: "live-title" }, "In progress"),
      live.length ? make("ul", { class: "rows" }, live.map((each) => rolloutRow(each, context))) : make("p", { class: "panel hint quiet" }, "No rollout is in progress."),
    ),
    ended.length
      ? make("section", { "aria-labelledby": "ended-title" }, make("h3", { id: "ended-title" }, "Ended"), make("ul", { class: "rows" }, ended.map((each) => rolloutRow(each, context))))
      : null,
  );
}

/** The whole fleet: devices, share on the device, spend and heat, of all requests under the bundles that devices run. */
function fleetTiles(cohorts) {
  const sum = (read, of = cohorts) => of.reduce((total, each) => total + read(each), 0);
  const measured = cohorts.filter(({ figures }) => figures.requests && figures.on_device !== null);
  const requests = sum(({ figures }) => figures.requests, measured);
  const share = requests ? sum(({ figures }) => figures.requests * figures.on_device, measured) / requests : null;
  const usd = sum(({ figures }) => (figures.requests * (figures.usd ?? 0)) / 1000, measured);
  const hottest = cohorts.filter(({ figures }) => figures.hottest_c !== null).sort((one, other) => other.figures.hottest_c - one.figures.hottest_c)[0];
  const tile = (title, value, note) => make("li", { class: "panel tile" }, make("h4", {}, title), make("p", { class: "big" }, value), make("p", { class: "quiet" }, note));
  return make(
    "section",
    { "aria-labelledby": "fleet-title" },
    make("h3", { id: "fleet-title" }, "Fleet"),
    make(
      "ul",
      { class: "tiles" },
      tile("Devices", count(sum((each) => each.devices)), `${count(sum((each) => each.recently_seen))} seen lately`),
      tile("On the device", share === null ? "–" : percent(share, 1), requests ? `of ${count(requests)} requests` : "no request measured yet"),
      tile("Spend", requests ? money(usd) : "–", requests ? `${money((1000 * usd) / requests)} per 1,000 requests` : "no request measured yet"),
      tile("Hottest device", hottest ? `${hottest.figures.hottest_c.toFixed(0)} °C` : "–", hottest ? `in ${hottest.name}` : "no temperature is readable"),
    ),
  );
}

function cohortCard(cohort, context) {
  const running = Object.entries(cohort.running).sort(([, one], [, other]) => other - one);
  const parts = running.map(([bundle, devices], index) => [bundle.slice(0, 12) || "factory's files", devices, SHADES[Math.min(index, 3)]]);
  const start = () =>
    confirm(
      {
        title: `Start a rollout in ${cohort.name}`,
        text: "The bundle must be signed by the role artifacts. It is linted and replayed first; then the first stage begins.",
        button: "Start",
        input: "Bundle id",
        required: true,
      },
      async (bundle) => {
        const made = await post("v1/rollouts", { cohort: cohort.name, to_bundle: bundle });
        location.hash = `#/rollouts/${made.id}`;
      },
    );
  return make(
    "li",
    { class: "panel card" },
    make("div", { class: "card-head" }, make("h4", {}, cohort.name), cohort.rollout ? make("a", { href: `#/rollouts/${cohort.rollout}` }, "rollout") : null),
    make("p", { class: "big" }, count(cohort.devices), make("small", {}, cohort.devices === 1 ? " device" : " devices")),
    make("p", { class: "quiet" }, seenText(cohort), cohort.ahead ? [" ", pill(`${count(cohort.ahead)} ahead of this server`, "warn")] : null),
    stack(parts, `What the devices of ${cohort.name} run`),
    make("ul", { class: "legend" }, running.slice(0, 3).map(([bundle, devices], index) => make("li", {}, make("span", { class: `swatch ${SHADES[index]}` }), bundleName(bundle), ` ${count(devices)}`))),
    figuresOf(cohort.figures),
    make(
      "div",
      { class: "card-foot" },
      make("a", { href: withQuery("#/devices", { cohort: cohort.name }) }, "Devices"),
      may(context.session, "operator")
        ? make(
            "span",
            { class: "push" },
            make("button", { type: "button", onclick: () => addDevices(cohort.name) }, "Add devices"),
            " ",
            cohort.rollout ? null : make("button", { type: "button", onclick: start }, "New rollout"),
          )
        : null,
    ),
  );
}

/** What a cohort's requests did: where they were answered, their cost and time, heat and drift of the devices. */
function figuresOf(figures) {
  if (!figures.requests) return null;
  return facts([
    ["Requests", count(figures.requests)],
    ["On the device", figures.on_device === null ? "-" : percent(figures.on_device, 1)],
    ["Cost", figures.usd === null ? "-" : `${figures.usd.toPrecision(3)} USD per 1,000 requests`],
    ["95 % within", figures.p95_s === null ? "more than 8 s" : `${figures.p95_s} s`],
    ["Hottest device", figures.hottest_c === null ? null : `${figures.hottest_c.toFixed(0)} °C`],
    ["Largest drift", figures.drift === null ? null : figures.drift.toFixed(2)],
    ["Records", `${count(figures.records)} of ${count(figures.recorded_devices)} devices`],
  ]);
}

/** Make a join token and show it, once. */
async function addDevices(cohort) {
  let token = "";
  const made = await confirm(
    {
      title: `Add devices to ${cohort}`,
      text: "A join token for so many devices, valid for a day. Give it to `causeway-edge fleet join` on each of them.",
      button: "Make a token",
      input: "Devices",
      required: true,
      value: "1",
    },
    async (uses) => ({ token } = await post("v1/join-tokens", { cohort, uses: Number(uses) })),
  );
  if (made) await confirm({ title: "The join token", text: "It is shown once: copy it now.", button: "Done", input: "Token", value: token }, async () => null);
}

function seenText(cohort) {
  if (!cohort.devices) return "none has enrolled yet";
  return cohort.recently_seen === cohort.devices ? "all seen lately" : `${count(cohort.recently_seen)} seen lately, ${percent(cohort.recently_seen / cohort.devices)}`;
}

function rolloutRow(rollout, context) {
  return make(
    "li",
    { class: "panel row" },
    make(
      "div",
      { class: "row-head" },
      make("a", { class: "strong", href: `#/rollouts/${rollout.id}` }, rollout.cohort),
      statePill(rollout.state),
      make("span", { class: "soft" }, bundleName(rollout.from_bundle), " → ", bundleName(rollout.to_bundle)),
      make("span", { class: "push quiet" }, rollout.entered ? ago(rollout.entered, context.now()) : ""),
    ),
    ladder(rollout),
    rollout.reason ? make("p", { class: "soft" }, rollout.reason) : null,
  );
}
