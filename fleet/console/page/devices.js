// The devices: a virtual list with a search and filters, which the control plane applies.

import { ask, withQuery } from "./api.js";
import { make, pill, say } from "./elements.js";
import { ago, count } from "./format.js";
import { VirtualList } from "./virtual_list.js";
import { bundleName, statePill } from "./words.js";

const PAGE = 200;
const PAUSE_MS = 200;
const STATES = ["idle", "check", "fetch", "verify", "dry_run", "stage", "activate", "trial", "commit", "rollback", "quarantine", "held", "pinned", "cloned", "revoked"];

export async function devicesView(context, _id, query) {
  const fleet = await ask("v1/fleet");
  const filters = { q: query.get("q") ?? "", cohort: query.get("cohort") ?? "", state: query.get("state") ?? "", site: query.get("site") ?? "" };
  const counted = make("span", { class: "quiet", role: "status" });
  const place = make("div", {});
  let timer = null;
  const list = () => {
    const shown = deviceList(context, filters, counted);
    place.replaceChildren(shown.node);
    return shown.start();
  };
  const change = (name, value) => {
    filters[name] = value;
    history.replaceState(null, "", withQuery("#/devices", filters));
    clearTimeout(timer);
    timer = setTimeout(() => list().catch(context.failed), PAUSE_MS);
  };
  const field = (label, control) => make("label", { class: "filter" }, make("span", {}, label), control);
  const text = (name, placeholder) => {
    const input = make("input", { type: "search", placeholder, value: filters[name], autocomplete: "off" });
    input.addEventListener("input", () => change(name, input.value.trim()));
    return input;
  };
  const choice = (name, values) => {
    const select = make("select", {}, make("option", { value: "" }, "all"), values.map((value) => make("option", { value }, value)));
    select.value = filters[name];
    select.addEventListener("change", () => change(name, select.value));
    return select;
  };
  await list();
  return make(
    "div",
    { class: "page" },
    make("div", { class: "view-head" }, make("h2", {}, "Devices"), counted),
    make(
      "div",
      { class: "filter-bar", role: "search" },
      field("Search", text("q", "part of the id")),
      field("Cohort", choice("cohort", fleet.cohorts.map((each) => each.name))),
      field("State", choice("state", STATES)),
      field("Site", text("site", "site")),
    ),
    place,
  );
}

function deviceList(context, filters, counted) {
  let after = null;
  let ended = false;
  return new VirtualList({
    label: "Devices",
    columns: ["Device", "Cohort", "Site", "State", "Runs", "Last seen", "Notes"],
    cells: (device) => [
      make("span", { class: "mono" }, device.id),
      device.cohort,
      device.site || "–",
      statePill(device.state),
      bundleName(device.running),
      device.last_seen ? ago(device.last_seen, context.now()) : "never",
      notes(device),
    ],
    open: (device) => {
      location.hash = `#/devices/${encodeURIComponent(device.id)}`;
    },
    load: async () => {
      if (ended) return [];
      const page = await ask(withQuery("v1/devices", { ...filters, after, limit: PAGE }));
      after = page.next;
      ended = !after;
      return page.devices;
    },
    counted: (loaded, complete) => say(counted, complete ? `${count(loaded)} found` : `${count(loaded)} loaded, more follow`),
    failed: context.failed,
  });
}

/** Return what is unusual about a device, as pills. */
export function notes(device) {
  return [
    device.revoked ? pill("revoked", "bad") : null,
    device.cloned ? pill("cloned", "bad") : null,
    device.quarantined.length ? pill(`${device.quarantined.length} quarantined`, "bad") : null,
    device.held ? pill("held", "warn") : null,
    device.pin ? pill("pinned", "warn") : null,
    device.unproven ? pill("unproven", "warn") : null,
    device.code ? make("span", { class: "soft" }, device.code) : null,
  ]
    .filter(Boolean)
    .flatMap((each) => [each, " "]);
}
