// Nodes from data, never from markup. The pages of device and fleet load this file.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Return an element. `attributes` named on… are listeners; children are nodes, texts, or lists of them. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replace what a node holds. */
export function show(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** Set a text only where it differs, so that screen readers repeat nothing. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Return an element of class "pill". */
export function pill(text, kind = "") {
  return make("span", { class: `pill ${kind}` }, text);
}

/** Return a definition list of [name, value] pairs; pairs without a value are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", { class: "facts" }, known.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

/** Move the focus among the links of a list with the arrow keys, Home and End. */
export function arrowKeys(container, selector) {
  container.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    const current = event.target.closest(selector);
    if (step === undefined || current === null) return;
    const all = [...container.querySelectorAll(selector)];
    const next = Math.min(all.length - 1, Math.max(0, all.indexOf(current) + step));
    event.preventDefault();
    all[next].focus();
  });
}
