// SPDX-License-Identifier: Apache-2.0
// The dashboard. Client ids, topics and payloads are anybody's: they become text, never HTML.

import { ask, signIn } from "/ask.js";
import { Bridge } from "/bridge.js";
import { clients, sessions } from "/clients.js";
import { groups, retained, subscriptions, topics } from "/messages.js";
import { audit, bans, gateways, plugins, rules, streams } from "/operation.js";
import { overview } from "/overview.js";
import { $, guarded, put, state, trouble } from "/parts.js";
import { stop, trace } from "/trace.js";

const PAUSE = 5000;
// A view is looked at again after so many times the time that it took: however long a list is, the page costs the
// gateways no more than one in a hundred of their time.
const REST = 100;
const AGAIN = 10_000; // after a look that has failed: a slow failure says little of what a look costs

// -- colours ---------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("theme");
if (!THEMES.includes(theme)) theme = "system";

function colour() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  $("theme").textContent = `Theme: ${theme}`;
}

dark.addEventListener("change", colour);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  colour();
});
colour();

// -- tables ----------------------------------------------------------------------------------------

// A table may be wider than the page: the keyboard reaches it to scroll, and its name is the heading before it.
for (const place of document.querySelectorAll(".table")) {
  const section = place.closest("section");
  const headings = [...section.querySelectorAll("h2")].filter((one) => one.compareDocumentPosition(place) & Node.DOCUMENT_POSITION_FOLLOWING);
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", headings.at(-1)?.textContent ?? section.getAttribute("aria-label"));
  place.tabIndex = 0;
}

// -- views -----------------------------------------------------------------------------------------

const bridge = new Bridge(trouble);
const listed = (list) => () => list.refresh();
const VIEWS = {
  overview,
  clients: listed(clients),
  sessions: listed(sessions),
  subscriptions: listed(subscriptions),
  groups: listed(groups),
  topics: listed(topics),
  retained: listed(retained),
  gateways,
  streams,
  plugins,
  bans,
  rules,
  trace,
  try: async () => bridge.open(),
  audit: listed(audit),
};
const FOR_ADMINISTRATORS = ["trace", "try"];
let shown = "overview";
let timer = 0;
let current = null; // the refresh that counts: another one has been begun since for any other

function turn() {
  const wanted = location.hash.slice(2); // "#/clients": no section has an id like that, to which a browser would scroll
  const barred = document.body.dataset.role === "viewer" && FOR_ADMINISTRATORS.includes(wanted);
  shown = Object.hasOwn(VIEWS, wanted) && !barred ? wanted : "overview";
  for (const name of Object.keys(VIEWS)) $(name).hidden = name !== shown;
  for (const each of $("tabs").querySelectorAll("a")) {
    if (each.hash === `#/${shown}`) {
      each.setAttribute("aria-current", "page");
      each.scrollIntoView({ block: "nearest", inline: "nearest" });
      document.title = `${each.textContent} – mqtt-nats`;
    } else each.removeAttribute("aria-current");
  }
  if (shown !== "trace") stop();
  trouble("");
  refresh();
}

async function look() {
  if (shown === "overview") return overview();
  const about = await ask("GET", "about", {}, "/");
  if (about.obstacle) state("bad", `not ready: ${about.obstacle}`);
  else state("good", "ready");
  return VIEWS[shown]();
}

// Look at the view that is shown, again and again; in a tab that nobody sees, not before somebody does.
async function refresh() {
  clearTimeout(timer);
  const mine = current = {};
  if (document.hidden) return;
  const begun = performance.now();
  const done = $("dialog").open || await guarded(look, "refresh");
  const rest = done ? Math.max(PAUSE, REST * (performance.now() - begun)) : AGAIN;
  if (mine === current) timer = setTimeout(refresh, rest);
}

async function begin() {
  await signIn();
  const about = await ask("GET", "about", {}, "/");
  document.body.dataset.role = about.role;
  put($("gateway"), about.gateway);
  put($("administrator"), `${about.administrator}, ${about.role}`);
  addEventListener("hashchange", turn);
  document.addEventListener("visibilitychange", refresh);
  turn();
}

guarded(begin);
