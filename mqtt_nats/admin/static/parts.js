// SPDX-License-Identifier: Apache-2.0
// Pieces of the page. Everything that is shown goes through `make`, which makes text of it.

export const $ = (id) => document.getElementById(id);

export function make(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((each) => (each instanceof Node ? each : String(each))));
  return made;
}

// Replace what is in a place. What has the keyboard keeps it: it is known by its `data-key`.
export function put(place, ...children) {
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(...children);
  if (key !== undefined) place.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

// A name that somebody else has chosen: what cannot be seen is spelled, and its direction is its own.
export function named(text) {
  const seen = String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
  return make("bdi", {}, seen);
}

export const number = (value) => Number(value).toLocaleString("en");
export const known = (value) => (value === null || value === undefined ? "–" : number(value));

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

export const clock = (time) => new Date(time * 1000).toLocaleString();

export function pill(text, kind = "") {
  return make("span", { class: `pill ${kind}` }, text);
}

export function button(text, act, kind = "") {
  const made = make("button", { class: kind, type: "button", "data-key": text }, text);
  made.addEventListener("click", act);
  return made;
}

// A name that opens something.
export function link(text, act) {
  const made = make("button", { class: "link", type: "button", "data-key": `name ${text}` }, named(text));
  made.addEventListener("click", act);
  return made;
}

// A button that wants to be pressed twice. `key` tells it from others of the same name; viewers have none.
export function decisive(name, act, key = "") {
  if (document.body.dataset.role === "viewer") return "";
  const made = make("button", { class: "danger", type: "button", "data-key": `${name} ${key}` }, name);
  made.addEventListener("click", async () => {
    if (made.dataset.sure !== "yes") {
      made.dataset.sure = "yes";
      made.textContent = `${name}: sure?`;
      return;
    }
    made.disabled = true;
    await guarded(act);
    made.disabled = false;
  });
  made.addEventListener("blur", () => {
    delete made.dataset.sure;
    made.textContent = name;
  });
  return made;
}

// `columns` are [heading, class, value of a row]; a heading may be an element.
export function table(columns, rows, nothing) {
  if (!rows.length) return make("p", {}, nothing);
  const cell = (kind, content) => make("td", kind ? { class: kind } : {}, content);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([name, kind]) => heading(name, kind)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...columns.map(([, kind, value]) => cell(kind, value(row)))))));
}

function heading(name, kind) {
  if (name === "") return make("td", kind ? { class: kind } : {});
  const made = make("th", { scope: "col", ...(kind ? { class: kind } : {}) }, name);
  if (name.dataset?.sorted) made.setAttribute("aria-sort", name.dataset.sorted);
  return made;
}

export function sheet(entries) {
  return make("dl", {}, ...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

// `buttons` go beside the one that closes it; null: nothing closes it.
export function dialog(title, content, buttons) {
  const place = $("dialog");
  if (place.open) place.close();
  const parts = [make("h2", { id: "dialog-title" }, title), ...content];
  if (buttons) parts.push(make("div", { class: "bar" }, ...buttons, button("Close", () => place.close(), "quiet")));
  put(place, ...parts);
  place.showModal();
  return place;
}

// -- what is wrong ---------------------------------------------------------------------------------

export class Refused extends Error {}

export function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

export function state(kind, text) {
  if ($("state").textContent === text) return; // a screen reader tells of every change
  $("state").className = `pill ${kind}`;
  $("state").textContent = text;
}

let troubled = null; // what the trouble that is shown came from

// Do something, and show why it cannot be done; in a dialog that is open, there. It stays until the same works, or
// something else is done: a refresh does not take away why a button did nothing. Returns whether it was done.
export async function guarded(work, of = "act") {
  try {
    await work();
    if (of === "act" || of === troubled) trouble("");
    return true;
  } catch (error) {
    if (!(error instanceof Refused) && !(error instanceof TypeError)) throw error;
    troubled = of;
    if (error instanceof Refused) {
      trouble(error.message);
      if (of === "act" && $("dialog").open) $("dialog").append(make("p", { class: "trouble", role: "alert" }, error.message));
    } else {
      trouble("the gateway does not answer");
      state("bad", "no answer");
    }
    return false;
  }
}
