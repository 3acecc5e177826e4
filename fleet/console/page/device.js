// One device: what it is, what it runs and why, its history, and what an operator may do with it.

import { ask, post } from "./api.js";
import { confirm } from "./confirm.js";
import { notes } from "./devices.js";
import { facts, make } from "./elements.js";
import { ago, dayAndTime } from "./format.js";
import { bundleName, may, statePill } from "./words.js";

export async function deviceView(context, id) {
  const device = await ask(`v1/devices/${encodeURIComponent(id)}`);
  const history = [...device.history].sort((one, other) => other.at - one.at);
  return make(
    "div",
    { class: "page" },
    make(
      "div",
      { class: "view-head" },
      make("div", {}, make("p", {}, make("a", { href: "#/devices" }, "Devices")), make("h2", {}, make("span", { class: "mono" }, device.id), " ", statePill(device.state))),
      make("div", { class: "actions push" }, actions(device, context)),
    ),
    make(
      "div",
      { class: "columns even" },
      make(
        "section",
        { class: "panel block", "aria-labelledby": "now-title" },
        make("h3", { id: "now-title" }, "Now"),
        notes(device).length ? make("p", {}, notes(device)) : null,
        facts([
          ["Runs", bundleName(device.running)],
          ["Wanted", device.wanted ? bundleName(device.wanted) : null],
          ["Reason", [device.code, device.reason].filter(Boolean).join(": ")],
          ["Rollout", device.rollout ? make("a", { href: `#/rollouts/${device.rollout}` }, device.rollout) : null],
          ["Pinned to", device.pin ? bundleName(device.pin) : null],
          ["Quarantined", device.quarantined.length ? device.quarantined.map((each) => [bundleName(each), " "]) : null],
          ["Last seen", device.last_seen ? `${ago(device.last_seen, context.now())}, ${dayAndTime(device.last_seen)}` : "never"],
          ["Cohort", device.cohort],
          ["Site", device.site],
          ["Labels", Object.entries(device.labels).map(([name, value]) => `${name}=${value}`).join(", ")],
          ["Daemon", device.daemon],
          ["Enrolled", device.enrolled ? dayAndTime(device.enrolled) : null],
          ["Tenant", device.tenant],
        ]),
      ),
      make(
        "section",
        { class: "panel block", "aria-labelledby": "history-title" },
        make("h3", { id: "history-title" }, "History"),
        history.length ? make("ol", { class: "events" }, history.map(eventOf)) : make("p", { class: "quiet" }, "Nothing has changed since it enrolled."),
      ),
    ),
  );
}

function eventOf(event) {
  return make(
    "li",
    {},
    make("time", { class: "quiet" }, dayAndTime(event.at)),
    make("span", {}, statePill(event.state), " ", bundleName(event.running), event.wanted && event.wanted !== event.running ? [" → ", bundleName(event.wanted)] : null, event.code || event.reason ? make("span", { class: "soft" }, ` ${[event.code, event.reason].filter(Boolean).join(": ")}`) : null),
  );
}

function actions(device, context) {
  if (device.revoked) return [];
  const path = `v1/devices/${encodeURIComponent(device.id)}`;
  const all = [
    device.held || device.pin ? { name: "release", label: "Release", text: "The device follows its cohort's rollouts again: a hold or a pin ends." } : null,
    device.held ? null : { name: "hold", label: "Hold", text: "The device keeps what it runs, whatever a rollout says, until it is released." },
    { name: "pin", label: "Pin", text: "The device runs this signed bundle, whatever a rollout says, until it is released.", input: "Bundle id", key: "bundle", value: device.running ?? "" },
    { name: "revoke", label: "Revoke", text: "For good: its key and its tokens stop working here, and at the cloud gateways within a minute.", danger: true },
  ].filter(Boolean);
  return all.map(({ name, label, text, danger, input = "Reason", key = "reason", value = "" }) =>
    make(
      "button",
      {
        type: "button",
        class: danger ? "danger" : null,
        disabled: !may(context.session, "operator"),
        onclick: () =>
          confirm({ title: `${label} ${device.id}?`, text, button: label, danger, input, required: true, value }, (typed) => post(`${path}/${name}`, { [key]: typed })).then(
            (done) => done && context.refresh(),
          ),
      },
      label,
    ),
  );
}
