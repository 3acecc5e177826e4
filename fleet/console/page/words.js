// States and ids in words.

import { make, pill } from "./elements.js";

const KINDS = {
  draft: "bad",
  lint: "accent",
  replay: "accent",
  stage: "accent",
  soak: "accent",
  done: "good",
  paused: "warn",
  aborted: "bad",
  reverting: "bad",
  reverted: "bad",
  pass: "good",
  fail: "bad",
  inconclusive: "warn",
  idle: "",
  trial: "accent",
  commit: "good",
  rollback: "bad",
  quarantine: "bad",
};

// A rollout goes to its checks when it begins: a draft is one that they refused.
export const ENDED = ["draft", "done", "reverted"];

/** Return a state as a pill. */
export function statePill(state) {
  return pill(state === "draft" ? "refused" : inPlainWords(state), KINDS[state] ?? "accent");
}

/** Return a bundle's id, cut; the whole one is its title. */
export function bundleName(id) {
  return id ? make("code", { title: id }, id.slice(0, 12)) : make("span", { class: "quiet" }, "factory's files");
}

/** Return the name of an action or a state without its dots and underscores. */
export const inPlainWords = (name) => name.replaceAll(/[._]/g, " ");

/** Return a share of 100,000 in percent. */
export function shareText(share) {
  return `${Number((share / 1000).toPrecision(3))} %`;
}

const RANKS = { viewer: 0, operator: 1, approver: 2 };
export const may = (session, role) => RANKS[session.role] >= RANKS[role];
