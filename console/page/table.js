// A table of any number of rows, of which those in sight exist: sorted, filtered, and walked by keys.

import { h, say } from "/dom.js";

const ROW = 28;
const NAMES = new Intl.Collator("en", { numeric: true });
const AROUND = 8;

// Columns have `name`, `value` (which sorts), `text` of the value, and `kind`: "num", "load" (with `part` of 1), or nothing.
export class Table {
  constructor(caption, columns, { key, opens = null, isBad = () => false, isShort = false, empty = "none" }) {
    Object.assign(this, { columns, key, opens, isBad, empty, all: [], rows: [], filter: "", sortBy: 0, isUp: true });
    this.active = 0;
    this.pool = [];
    this.heads = columns.map((column, at) => {
      const button = h("button", { type: "button", onclick: () => this.sort(at) }, column.name);
      return h("th", { scope: "col", class: column.kind ? "num" : null }, button);
    });
    this.top = h("tr", { class: "gap", "aria-hidden": "true" }, h("td", { colspan: columns.length }));
    this.bottom = h("tr", { class: "gap", "aria-hidden": "true" }, h("td", { colspan: columns.length }));
    this.body = h("tbody", { onkeydown: (event) => this.walk(event) }, this.top, this.bottom);
    this.table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", { "aria-rowindex": 1 }, this.heads)), this.body);
    this.none = h("p", { class: "empty" }, empty);
    this.element = h("div", { class: isShort ? "scroll short" : "scroll" }, this.table, this.none);
    this.element.addEventListener("scroll", () => this.render(), { passive: true });
    new ResizeObserver(() => this.render()).observe(this.element);
    this.mark();
  }

  sort(at) {
    this.isUp = this.sortBy === at ? !this.isUp : !this.columns[at].kind;
    this.sortBy = at;
    this.mark();
    this.arrange();
  }

  mark() {
    this.heads.forEach((head, at) => {
      if (at === this.sortBy) head.setAttribute("aria-sort", this.isUp ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
  }

  show(all) {
    this.all = all;
    this.arrange();
  }

  setFilter(text) {
    this.filter = text.trim().toLowerCase();
    this.element.scrollTop = 0;
    this.arrange();
  }

  text(column, row) {
    return column.text ? column.text(column.value(row), row) : String(column.value(row) ?? "-");
  }

  arrange() {
    const has = (row) => this.columns.some((column) => this.text(column, row).toLowerCase().includes(this.filter));
    const rows = this.filter ? this.all.filter(has) : [...this.all];
    const { value } = this.columns[this.sortBy];
    const order = this.isUp ? 1 : -1;
    rows.sort((a, b) => {
      const [one, other] = [value(a), value(b)];
      if (one == null || other == null) return (one == null) - (other == null);
      return order * (typeof one === "string" ? NAMES.compare(one, other) : one - other);
    });
    const activeKey = this.rows[this.active] && this.key(this.rows[this.active]);
    this.rows = rows;
    const found = rows.findIndex((row) => this.key(row) === activeKey);
    this.active = Math.max(0, found);
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.none.hidden = rows.length > 0;
    say(this.none, this.filter ? "nothing here has that in it" : this.empty);
    this.render();
  }

  // What is in sight, and some around it.
  render() {
    const { scrollTop, clientHeight } = this.element;
    const [first, many] = [Math.max(0, Math.floor(scrollTop / ROW) - AROUND), Math.ceil((clientHeight || 600) / ROW) + 2 * AROUND];
    const begin = Math.min(first, Math.max(0, this.rows.length - many));
    const end = Math.min(this.rows.length, begin + many);
    const hadFocus = this.body.contains(document.activeElement);
    while (this.pool.length < end - begin) this.grow();
    this.pool.forEach((line, at) => {
      const index = begin + at;
      line.element.hidden = index >= end;
      if (index < end) this.fill(line, index);
    });
    this.top.firstChild.style.height = `${begin * ROW}px`;
    this.bottom.firstChild.style.height = `${(this.rows.length - end) * ROW}px`;
    if (hadFocus) this.pool.find((line) => line.index === this.active && !line.element.hidden)?.element.focus({ preventScroll: true });
  }

  grow() {
    const cells = this.columns.map((column, at) => {
      const bar = column.kind === "load" ? h("i", { "aria-hidden": "true" }) : null;
      const text = h("span");
      const cell = h(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: column.kind === "load" ? "num load" : column.kind ?? null }, bar, text);
      return { cell, text, bar };
    });
    const line = { cells, index: 0, element: h("tr", { class: this.opens ? "opens" : null }, cells.map(({ cell }) => cell)) };
    line.element.addEventListener("click", () => this.open(line.index));
    line.element.addEventListener("focus", () => this.activate(line.index));
    this.pool.push(line);
    this.body.insertBefore(line.element, this.bottom);
  }

  fill(line, index) {
    const row = this.rows[index];
    line.index = index;
    line.element.setAttribute("aria-rowindex", index + 2);
    line.element.tabIndex = index === this.active ? 0 : -1;
    line.element.classList.toggle("bad", Boolean(this.isBad(row)));
    this.columns.forEach((column, at) => {
      const { cell, text, bar } = line.cells[at];
      const words = this.text(column, row);
      if (text.textContent !== words) {
        text.textContent = words;
        cell.title = words.length > 24 ? words : "";
      }
      if (bar) bar.style.width = `${100 * Math.min(1, Math.max(0, column.part(row) || 0))}%`;
    });
  }

  activate(index) {
    this.active = index;
    this.pool.forEach((line) => { line.element.tabIndex = line.index === index ? 0 : -1; });
  }

  open(index) {
    this.active = index;
    if (this.opens && this.rows[index]) this.opens(this.rows[index]);
  }

  walk(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.rows.length, End: this.rows.length };
    if (event.key === "Enter" || event.key === " ") {
      this.open(this.active);
    } else if (event.key in steps) {
      this.go(Math.max(0, Math.min(this.rows.length - 1, this.active + steps[event.key])));
    } else {
      return;
    }
    event.preventDefault();
  }

  // Has the row in sight, and the focus on it.
  go(index) {
    this.active = index;
    const [above, below] = [index * ROW, (index + 3) * ROW - this.element.clientHeight];
    if (this.element.scrollTop > above) this.element.scrollTop = above;
    if (this.element.scrollTop < below) this.element.scrollTop = below;
    this.render();
    this.pool.find((line) => line.index === index && !line.element.hidden)?.element.focus({ preventScroll: true });
  }
}

// A field that filters tables, and how many rows are left.
export function filterOf(...tables) {
  const output = h("output");
  const tell = () => say(output, `${tables.reduce((sum, table) => sum + table.rows.length, 0)} of ${tables.reduce((sum, table) => sum + table.all.length, 0)}`);
  const filter = (event) => {
    tables.forEach((table) => table.setFilter(event.target.value));
    tell();
  };
  const element = h("div", { class: "tools" }, h("label", {}, "Filter ", h("input", { type: "search", oninput: filter, autocomplete: "off" })), output);
  return { element, tell };
}
