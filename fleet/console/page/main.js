// The views by address, the session, and a refresh every few seconds while the page is visible.

import { ask, Refused } from "./api.js";
import { auditView } from "./audit.js";
import { deviceView } from "./device.js";
import { devicesView } from "./devices.js";
import { byId, make, say } from "./elements.js";
import { draftView, policiesView } from "./policies.js";
import { rolloutView } from "./rollout.js";
import { rolloutsView } from "./rollouts.js";
import { signInView } from "./sign_in.js";

const EVERY_MS = 5000;
// path → [view of the list, view of one]
const VIEWS = {
  rollouts: [rolloutsView, rolloutView],
  devices: [devicesView, deviceView],
  policies: [policiesView, draftView],
  audit: [auditView, auditView],
};
const REFRESHED = [rolloutsView, rolloutView, deviceView];

let timer = null;
let turn = 0;
const context = {
  session: null,
  now: () => Date.now() / 1000,
  refresh: () => open({ keep: true }),
  failed: (error) => fail(error),
};

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name: name in VIEWS ? name : "rollouts", id: decodeURIComponent(rest.join("/")), query: new URLSearchParams(query) };
}

async function open({ keep = false } = {}) {
  const mine = ++turn;
  clearTimeout(timer);
  if (context.session === null) return;
  const { name, id, query } = address();
  const view = VIEWS[name][id ? 1 : 0];
  try {
    const node = await view(context, id, query);
    if (mine !== turn) return;
    byId("lost").hidden = true;
    place(node, keep);
    for (const link of byId("views").children) link.toggleAttribute("aria-current", link.hash === `#/${name}`);
    document.title = `${id || name[0].toUpperCase() + name.slice(1)} · Causeway fleet`;
  } catch (error) {
    if (mine === turn) await fail(error, keep);
  }
  if (REFRESHED.includes(view) && mine === turn) timer = setTimeout(tick, EVERY_MS);
}

/** Put a view into the page. A refresh keeps what the reader opened, and leaves a focused control in place. */
function place(node, keep) {
  const view = byId("view");
  if (keep) {
    const opened = [...view.querySelectorAll("details")].map((each) => each.open);
    [...node.querySelectorAll("details")].forEach((each, index) => (each.open = opened[index] ?? false));
  }
  const focused = keep && view.contains(document.activeElement) ? pathTo(view, document.activeElement) : null;
  view.replaceChildren(node);
  focused?.reduce((parent, index) => parent?.children[index], view)?.focus({ preventScroll: true });
}

function pathTo(root, node) {
  const path = [];
  for (let each = node; each !== root; each = each.parentElement) path.unshift([...each.parentElement.children].indexOf(each));
  return path;
}

function tick() {
  if (document.hidden || byId("confirm").open) timer = setTimeout(tick, EVERY_MS);
  else open({ keep: true });
}

async function fail(error, keep = false) {
  if (error instanceof Refused && error.status === 401) {
    await signIn();
    return;
  }
  const text = error instanceof Refused ? error.message : "The control plane does not answer. Trying again.";
  if (keep || !(error instanceof Refused)) {
    say(byId("lost"), text);
    byId("lost").hidden = false;
  } else byId("view").replaceChildren(make("p", { class: "panel hint" }, text));
  if (!(error instanceof Refused)) timer = setTimeout(() => open({ keep: true }), EVERY_MS);
}

async function signIn() {
  context.session = null;
  byId("views").hidden = byId("sign-out").hidden = true;
  byId("actor").textContent = "";
  byId("view").replaceChildren(await signInView(start));
  byId("token").focus();
}

async function start() {
  try {
    const session = await ask("v1/session");
    context.session = session;
    say(byId("fleet"), (await ask("v1/fleet")).name);
    say(byId("actor"), `${session.name} (${session.role})`);
    byId("views").hidden = byId("sign-out").hidden = false;
    await open();
  } catch (error) {
    if (error instanceof Refused) await signIn();
    else {
      say(byId("lost"), "The control plane does not answer. Trying again.");
      byId("lost").hidden = false;
      setTimeout(start, EVERY_MS);
    }
  }
}

byId("sign-out").addEventListener("click", async () => {
  await ask("v1/session", { method: "DELETE" }).catch(() => null);
  await signIn();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  // The address names what is shown: it stays.
  event.preventDefault();
  byId("view").focus();
});
addEventListener("hashchange", () => {
  open().then(() => byId("view").focus({ preventScroll: true }));
});
start();
