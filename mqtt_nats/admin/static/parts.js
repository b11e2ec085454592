// SPDX-License-Identifier: Apache-2.0
// Pieces of the page. Everything that is shown goes through `make`, which makes text of it.

export function make(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((each) => (each instanceof Node ? each : String(each))));
  return made;
}

export function put(place, ...children) {
  place.replaceChildren(...children);
}

// A name that somebody else has chosen: what cannot be seen is spelled, and its direction is its own.
export function named(text) {
  const seen = String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
  return make("bdi", {}, seen);
}

export const number = (value) => Number(value).toLocaleString("en");

export function size(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= unit) return `${(value / unit).toFixed(value < 10 * unit ? 1 : 0)} ${name}`;
  }
  return `${Math.round(value)} B`;
}

export function ago(time) {
  if (time === null || time === undefined) return "–";
  const seconds = Date.now() / 1000 - time;
  const whole = Math.abs(seconds);
  const [count, unit] = whole < 90 ? [whole, "s"] : whole < 5400 ? [whole / 60, "min"]
    : whole < 129_600 ? [whole / 3600, "h"] : [whole / 86_400, "d"];
  const text = `${Math.round(count)} ${unit}`;
  return seconds < 0 ? `in ${text}` : `${text} ago`;
}

// `columns` are [heading, class, value of a row].
export function table(columns, rows, nothing) {
  if (!rows.length) return make("p", {}, nothing);
  const cell = (tag, kind, content) => make(tag, kind ? { class: kind } : {}, content);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([name, kind]) => cell("th", kind, name)))),
    make("tbody", {}, ...rows.map((row) =>
      make("tr", {}, ...columns.map(([, kind, value]) => cell("td", kind, value(row)))))));
}

// `buttons` go beside the one that closes it; null: nothing closes it.
export function dialog(title, content, buttons) {
  const place = document.getElementById("dialog");
  if (place.open) place.close();
  const parts = [make("h2", { id: "dialog-title" }, title), ...content];
  if (buttons) {
    const close = make("button", { class: "quiet", type: "button" }, "Close");
    close.addEventListener("click", () => place.close());
    parts.push(make("div", { class: "bar" }, ...buttons, close));
  }
  put(place, ...parts);
  place.showModal();
  return place;
}
