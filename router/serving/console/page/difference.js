// The difference of two texts as a table of two columns, with long runs of equal lines left out.

import { make } from "./elements.js";
import { count } from "./format.js";
import { sideBySide } from "./line_diff.js";

const AROUND = 4; // unchanged lines that are shown around a change

/** Return the number of lines that differ, and a function that returns the table's rows, all of them or those near a change. */
export function difference(before, after) {
  const rows = sideBySide(before.trimEnd(), after.trimEnd());
  const changed = rows.filter(([, , kind]) => kind === "changed").length;
  return { changed, rows: (everything = false) => (everything ? rows.map(rowOf) : folded(rows)) };
}

/** Return the table around such rows; `heads`: the names of both texts. */
export function differenceTable(heads, body) {
  return make(
    "div",
    { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Policies side by side" },
    make("table", { class: "difference" }, make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))), body),
  );
}

function rowOf([left, right, kind]) {
  const side = (line, change, word) =>
    make("td", { class: line === null ? "blank" : kind === "same" ? null : change }, line === null ? null : [kind === "same" ? null : make("span", { class: "sr-only" }, `${word}: `), make("code", {}, line || " ")]);
  return make("tr", {}, side(left, "gone", "removed"), side(right, "fresh", "added"));
}

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
