// A list of any length: only the rows in view are in the document, and pages are loaded when they come near.

import { make, show } from "./elements.js";

const ROW_PX = 38; // as in the style sheet
const SPARE = 8;

/**
 * A grid whose rows are made when they are seen.
 *
 * `columns` are titles; `cells(item)` returns the cells of a row; `load()` resolves to the next items, an empty list at
 * the end; `open(item)` is for a click or Enter.
 */
export class VirtualList {
  #items = [];
  #complete = false;
  #loading = null;
  #active = 0;
  #options;
  #body = make("div", { class: "grid-body", role: "rowgroup" });
  #view;
  #frame = null;

  constructor(options) {
    this.#options = options;
    const head = make("div", { class: "grid-row grid-head", role: "row", "aria-rowindex": "1" }, options.columns.map((title) => make("span", { role: "columnheader" }, title)));
    this.#view = make(
      "div",
      { class: "grid", role: "grid", tabindex: "0", "aria-label": options.label, "aria-rowcount": "-1" },
      make("div", { role: "rowgroup", class: "grid-top" }, head),
      this.#body,
    );
    this.#view.addEventListener("scroll", () => this.#later());
    this.#view.addEventListener("keydown", (event) => this.#key(event));
    this.#body.addEventListener("click", (event) => {
      const row = event.target.closest(".grid-row");
      if (row && !getSelection().toString()) this.#options.open(this.#items[Number(row.dataset.index)]);
    });
    new ResizeObserver(() => this.#later()).observe(this.#view);
  }

  get node() {
    return this.#view;
  }

  /** Load the first page; resolves when it is shown. */
  async start() {
    await this.#more();
    this.#draw();
  }

  async #more() {
    if (this.#complete) return;
    this.#loading ??= this.#options.load().then((items) => {
      this.#items.push(...items);
      this.#complete = items.length === 0;
      this.#loading = null;
      this.#view.setAttribute("aria-rowcount", this.#complete ? String(this.#items.length + 1) : "-1");
      this.#options.counted(this.#items.length, this.#complete);
    });
    await this.#loading;
  }

  #later() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#draw();
    });
  }

  #draw() {
    const { scrollTop, clientHeight } = this.#view;
    const first = Math.max(0, Math.floor(scrollTop / ROW_PX) - SPARE);
    const end = Math.min(this.#items.length, Math.ceil((scrollTop + clientHeight) / ROW_PX) + SPARE);
    this.#body.style.height = `${this.#items.length * ROW_PX}px`;
    show(this.#body, this.#items.slice(first, end).map((item, index) => this.#row(item, first + index)));
    const active = this.#body.querySelector(".active");
    if (active) this.#view.setAttribute("aria-activedescendant", active.id);
    else this.#view.removeAttribute("aria-activedescendant");
    if (end > this.#items.length - 2 * SPARE && !this.#complete && this.#loading === null) this.#more().then(() => this.#later(), this.#options.failed);
  }

  #row(item, index) {
    const row = make(
      "div",
      { class: index === this.#active ? "grid-row active" : "grid-row", role: "row", id: `row-${index}`, "aria-rowindex": index + 2, "data-index": index },
      this.#options.cells(item).map((cell) => make("span", { role: "gridcell" }, cell)),
    );
    row.style.transform = `translateY(${index * ROW_PX}px)`;
    return row;
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.#view.clientHeight / ROW_PX) - 2);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" && this.#items[this.#active]) {
      event.preventDefault();
      this.#options.open(this.#items[this.#active]);
    }
    if (step === undefined) return;
    event.preventDefault();
    this.#active = Math.min(this.#items.length - 1, Math.max(0, this.#active + step));
    const top = this.#active * ROW_PX;
    const { scrollTop, clientHeight } = this.#view;
    if (top < scrollTop) this.#view.scrollTop = top;
    else if (top + 2 * ROW_PX > scrollTop + clientHeight) this.#view.scrollTop = top + 2 * ROW_PX - clientHeight;
    this.#draw();
  }
}
