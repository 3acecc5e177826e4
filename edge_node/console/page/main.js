// The page: asks the device once a second while it is visible, and otherwise not at all.

import { ask, Refused } from "./api.js";
import { wireAsk } from "./ask.js";
import { showOverview, showRecord } from "./detail.js";
import { byId, make, pill, say, show } from "./elements.js";
import { showFleet } from "./fleet.js";
import { span } from "./format.js";
import { DecisionList } from "./list.js";
import { wirePlayground } from "./policy.js";
import { History, READINGS, showTiles } from "./tiles.js";
import { WhatIfEditor } from "./what_if.js";

const EVERY_MS = 1000;
const FIRST_PAGE = 200;

const list = new DecisionList();
const history = new History();
let newest = 0;
let paused = false;
let timer = null;
let open = null;
let byKeyboard = false; // the open decision was chosen with Enter: the focus follows, so that its reasons are read next

async function poll() {
  clearTimeout(timer);
  timer = null;
  if (paused || document.hidden) return;
  try {
    const [state, found] = await Promise.all([ask("console/state"), ask(`v1/decisions?limit=${FIRST_PAGE}&since=${newest}`)]);
    showDevice(state);
    showDecisions(found.data, state.now);
    byId("lost").hidden = true;
  } catch (error) {
    say(byId("lost"), error instanceof Refused ? error.message : "The device does not answer. Trying again every second.");
    byId("lost").hidden = false;
  }
  // One timer, however many polls were begun by a click or a tab that came back.
  clearTimeout(timer);
  timer = setTimeout(poll, EVERY_MS);
}

function showDevice(state) {
  const { readiness } = state;
  document.title = `${state.device} · Causeway`;
  say(byId("device"), state.device);
  const word = readiness.ready ? "ready" : "not ready";
  if (byId("ready").textContent !== word) show(byId("ready"), pill(word, readiness.ready ? "good" : "bad"));
  say(byId("policy"), `policy ${readiness.policy.name}@${readiness.policy.revision}`);
  say(byId("uptime"), `up ${span(readiness.uptime_s)}`);
  const refused = readiness.policy.refused ? [`the newest policy file was rejected: ${readiness.policy.refused}`] : [];
  const problems = [...readiness.waiting_for.map((each) => `waiting for ${each}`), ...readiness.problems, ...refused];
  byId("problems").hidden = problems.length === 0;
  if (byId("problems").textContent !== problems.join("")) show(byId("problems"), problems.map((text) => make("li", {}, text)));
  for (const [name, read] of Object.entries(READINGS)) history.add(name, state.now, read(state.snapshot));
  history.add("waiting", state.now, state.waiting);
  showTiles(byId("tiles"), state, history);
  showFleet(state.fleet);
}

function showDecisions(records, now) {
  const first = newest === 0;
  for (const record of records) {
    newest = Math.max(newest, record.created);
    // What the decisions of the last minutes read: the lines begin before the page was opened.
    if (first && record.decision) for (const [name, read] of Object.entries(READINGS)) history.add(name, Math.min(record.created, now), read(record.snapshot));
  }
  const added = list.add(records, !first);
  if (open === null && (added || first)) showOverview(byId("detail"), list.records);
}

async function openFromAddress() {
  const id = location.hash.slice(1);
  if (!/^[0-9a-f]{24}$/.test(id)) {
    open = null;
    list.select(null);
    showOverview(byId("detail"), list.records);
    return;
  }
  open = id;
  try {
    const record = list.find(id) ?? (await ask(`v1/decisions/${id}`));
    if (open !== id) return;
    list.add([record], false);
    list.select(id);
    showRecord(byId("detail"), record, new WhatIfEditor(id).node, close);
    if (byKeyboard) byId("detail-title").focus();
    byKeyboard = false;
  } catch (error) {
    show(byId("detail"), make("h2", { id: "detail-title" }, error instanceof Refused ? error.message : "The device does not answer."));
  }
}

function close() {
  const id = open;
  location.hash = "";
  list.focus(id);
}

function wire() {
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    byId("pause").textContent = paused ? "Paused" : "Pause";
    poll();
  });
  document.addEventListener("visibilitychange", poll);
  document.querySelector(".skip").addEventListener("click", (event) => {
    // The address names what is shown: it stays.
    event.preventDefault();
    byId("decisions").focus();
  });
  addEventListener("hashchange", openFromAddress);
  byId("rows").addEventListener("keydown", (event) => {
    byKeyboard = event.key === "Enter";
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.target.closest("input, select") && open !== null && !document.querySelector("dialog[open]")) close();
  });
}

wire();
wireAsk((id) => {
  location.hash = id;
});
wirePlayground();
openFromAddress();
poll();
