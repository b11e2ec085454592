// SPDX-License-Identifier: Apache-2.0
// A part of a long list: the gateways search, sort and count; the page has one part of it.

import { ask } from "/ask.js";
import { $, button, guarded, make, number, put, table } from "/parts.js";

const PART = 50;

export class List {
  // `name` is that of the section, and of the list in the answer of `path`. A column is [heading, class, value, sort].
  constructor(name, path, columns, nothing, more = {}) {
    Object.assign(this, { name, path, columns, nothing, offset: 0, seen: "", sort: more.sort ?? "", reverse: more.reverse ?? false });
    this.key = more.key ?? name;
    this.values = more.values ?? (() => ({}));
    $(`${name}-form`)?.addEventListener("submit", (event) => {
      event.preventDefault();
      this.offset = 0;
      guarded(() => this.refresh());
    });
  }

  async refresh() {
    const form = $(`${this.name}-form`)?.elements;
    const asked = { ...(form ? this.values(form) : {}), offset: this.offset, limit: PART };
    if (this.sort) Object.assign(asked, { sort: this.sort, reverse: this.reverse });
    const turn = this.turn = {};
    const found = await ask("GET", this.path, asked);
    if (turn !== this.turn) return; // something else was asked for meanwhile
    const rows = found[this.key];
    if (!rows.length && this.offset) { // the list has become shorter
      this.offset = Math.max(0, Math.floor((found.total - 1) / PART) * PART);
      if (found.total) return this.refresh();
    }
    const seen = JSON.stringify([asked, found]);
    if (seen === this.seen) return;
    this.seen = seen;
    put($(`${this.name}-table`), table(this.headed(), rows, this.nothing), ...this.footer(found.total, rows.length));
  }

  headed() {
    return this.columns.map(([heading, kind, value, sort]) => {
      if (!sort) return [heading, kind, value];
      const sorted = this.sort === sort;
      const made = button(heading, () => {
        this.reverse = sorted && !this.reverse;
        this.sort = sort;
        this.offset = 0;
        guarded(() => this.refresh());
      }, "sort");
      if (sorted) made.dataset.sorted = this.reverse ? "descending" : "ascending";
      return [made, kind, value];
    });
  }

  footer(total, count) {
    if (!count) return [];
    const move = (text, offset, possible) => {
      const made = button(text, () => { this.offset = offset; guarded(() => this.refresh()); }, "quiet");
      made.disabled = !possible;
      return made;
    };
    const last = this.offset + count;
    const text = `${number(this.offset + 1)} to ${number(last)} of ${number(total)}`;
    return [make("div", { class: "bar pages" }, make("span", { role: "status" }, text),
      ...(total > count ? [
        move("Previous", Math.max(0, this.offset - PART), this.offset > 0),
        move("Next", last, last < total),
      ] : []))];
  }
}

// What a person types is a part of a name, unless it says otherwise.
export function pattern(text) {
  return text && !/[*?[]/.test(text) ? `*${text}*` : text;
}
