// SPDX-License-Identifier: Apache-2.0
// The dashboard. Client ids, topics and payloads are anybody's: they become text, never HTML.

import { Chart, short } from "/charts.js";
import { ask, Refused, signIn } from "/ask.js";
import { ago, dialog, make, named, number, put, size, table } from "/parts.js";
import { Bridge } from "/bridge.js";

const SPAN = 300;
const RATES_EVERY = 2000;
const TABLES_EVERY = 5000;
const MOST = 200;
const $ = (id) => document.getElementById(id);

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

// -- what is wrong ---------------------------------------------------------------------------------

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function guarded(work) {
  try {
    await work();
    trouble("");
  } catch (error) {
    if (!(error instanceof Refused) && !(error instanceof TypeError)) throw error;
    trouble(error instanceof Refused ? error.message : "the gateway does not answer");
    if (!(error instanceof Refused)) state("bad", "no answer");
  }
}

function state(kind, text) {
  $("state").className = `pill ${kind}`;
  $("state").textContent = text;
}

// -- overview --------------------------------------------------------------------------------------

const charts = {
  received: new Chart($("charts"), "Messages received per second", ["QoS 0", "QoS 1", "QoS 2"], SPAN),
  sent: new Chart($("charts"), "Messages sent per second", ["QoS 0", "QoS 1", "QoS 2"], SPAN),
  clients: new Chart($("charts"), "Clients", ["connected"], SPAN),
  times: new Chart($("charts"), "Times", ["JetStream acknowledges", "event loop late"], SPAN, " ms"),
};
let before = new Map();
let last = 0;

const sum = (values) => values.reduce((total, value) => total + value, 0);
const total = (gateways, of) => sum(gateways.map(of));

// How much something has grown per second, over all gateways that were there the last time too.
function rate(gateways, of) {
  let grown = 0;
  let known = false;
  for (const one of gateways) {
    const former = before.get(one.id);
    if (!former || former.since !== one.since || one.time <= former.time) continue;
    known = true;
    grown += Math.max(0, of(one) - of(former)) / (one.time - former.time);
  }
  return known ? grown : null;
}

function mean(gateways, key) {
  let time = 0;
  let count = 0;
  for (const one of gateways) {
    const former = before.get(one.id);
    if (!former || former.since !== one.since) continue;
    time += one[key].sum - former[key].sum;
    count += sum(one[key].counts) - sum(former[key].counts);
  }
  return count > 0 ? (time / count) * 1000 : null;
}

function tile(name, value, note = "", kind = "") {
  return make("div", { class: `tile ${kind}` },
    make("div", { class: "name" }, name), make("div", { class: "value" }, value), make("div", { class: "note" }, note));
}

// How much of JetStream's file storage is used; null is not known, or without a limit.
function storageTile({ used, allowed }) {
  const share = used === null || allowed === null ? 0 : used / Math.max(allowed, 1);
  const note = allowed === null ? (used === null ? "" : "the account has no limit") : `of ${size(allowed)}`;
  return tile("JetStream storage", size(used), note, share > 0.8 ? "warn" : "");
}

function refusedTile(gateways) {
  const counts = new Map();
  for (const one of gateways) {
    for (const [reason, count] of Object.entries(one.refused_stores ?? {})) {
      if (count) counts.set(reason, (counts.get(reason) ?? 0) + count);
    }
  }
  const reasons = [...counts].map(([reason, count]) => `${number(count)} ${reason.replaceAll("_", " ")}`);
  const refusing = rate(gateways, (one) => sum(Object.values(one.refused_stores ?? {})));
  return tile("Stores refused", number(sum([...counts.values()])), reasons.join(", ") || "by JetStream", refusing > 0 ? "warn" : "");
}

async function overview() {
  const found = await ask("GET", "/status");
  const gateways = found.gateways;
  const received = [0, 1, 2].map((qos) => rate(gateways, (one) => one.received[qos]));
  const sent = [0, 1, 2].map((qos) => rate(gateways, (one) => one.sent[qos]));
  const time = Date.now() / 1000;
  const clients = total(gateways, (one) => one.clients);
  const stored = mean(gateways, "stored");
  const lag = mean(gateways, "lag");
  if (time > last) {
    charts.received.add(time, received);
    charts.sent.add(time, sent);
    charts.clients.add(time, [clients]);
    charts.times.add(time, [stored, lag]);
    last = time;
  }
  const drops = (one) => sum(Object.values(one.dropped));
  const slow = total(gateways, (one) => one.slow + one.stalled);
  const dropping = rate(gateways, drops);
  const bytes = (key) => `${size(rate(gateways, (one) => sum(one[key])))}/s`;
  const perSecond = (values) => (values[0] === null ? "–" : `${short(sum(values))}/s`);
  const amount = (key) => (found.stored[key] === null || found.stored[key] === undefined ? "–" : number(found.stored[key]));
  put($("tiles"),
    tile("Clients", number(clients), `${number(gateways.length)} ${gateways.length === 1 ? "gateway" : "gateways"}`),
    tile("Received", perSecond(received), bytes("received_bytes")),
    tile("Sent", perSecond(sent), bytes("sent_bytes")),
    tile("Dropped", dropping === null ? "–" : `${short(dropping)}/s`, `${number(total(gateways, drops))} in all`, dropping > 0 ? "warn" : ""),
    tile("Slow clients", number(slow), slow ? "see below" : "everybody keeps up", slow ? "warn" : ""),
    tile("In flight", number(total(gateways, (one) => one.inflight)), `${number(total(gateways, (one) => one.queued))} wait`),
    tile("Not stored yet", number(total(gateways, (one) => one.pending_stores)), "by JetStream"),
    storageTile(found.storage),
    refusedTile(gateways),
    ...Object.keys(found.stored).map((key) => tile(`${key[0].toUpperCase()}${key.slice(1)} stored`, amount(key))));
  before = new Map(gateways.map((one) => [one.id, one]));
  const worst = gateways.find((one) => one.obstacle);
  const draining = gateways.some((one) => one.draining);
  if (found.silent.length) state("warn", `gateway ${found.silent.join(", ")} does not answer`);
  else if (worst) state("bad", `not ready: ${worst.obstacle}`);
  else if (draining) state("warn", "a gateway is draining");
  else state("good", "ready");
}

async function slow() {
  const found = await ask("GET", "/clients", { slow: true, limit: 20 });
  put($("slow"), clientTable(found.clients, "Everybody keeps up."));
}

// -- clients and sessions --------------------------------------------------------------------------

function clientTable(clients, nobody) {
  return table([
    ["Client", "text", (one) => link(one.client, () => showClient(one.client))],
    ["User", "wide", (one) => named(one.user ?? "")],
    ["From", "wide", (one) => one.address],
    ["Gateway", "wide", (one) => one.gateway],
    ["MQTT", "wide", (one) => one.version],
    ["Connected", "wide", (one) => ago(one.since)],
    ["In flight", "number wide", (one) => `${number(one.inflight)}/${number(one.window)}`],
    ["Queued", "number", (one) => number(one.queued)],
    ["Unread", "number", (one) => size(one.unread)],
    ["Dropped", "number wide", (one) => number(one.dropped)],
    ["", "", (one) => (one.slow ? make("span", { class: "pill warn" }, "slow") : "")],
  ], clients, nobody);
}

function link(text, act) {
  const made = make("button", { class: "link", type: "button" }, named(text));
  made.addEventListener("click", act);
  return made;
}

async function clients() {
  const form = $("clients-form").elements;
  const found = await ask("GET", "/clients", { match: pattern(form.match.value), slow: form.slow.checked, limit: MOST });
  put($("clients-table"), clientTable(found.clients, "Nobody like that is connected."), rest(found, "clients"));
}

// What a person types is a part of a client id, unless it says otherwise.
function pattern(text) {
  return text && !/[*?[]/.test(text) ? `*${text}*` : text;
}

function rest(found, key) {
  const more = (found.of ?? found.total ?? 0) - found[key].length;
  return more > 0 || found[key].length === MOST ? make("p", {}, `The first ${number(found[key].length)} are shown.`) : "";
}

async function showClient(id) {
  await guarded(async () => {
    const one = await ask("GET", `/clients/${encodeURIComponent(id)}`);
    const shown = dialog(named(one.client), [
      make("dl", {}, ...[
        ["Gateway", one.gateway], ["User", named(one.user ?? "anonymous")], ["From", one.address],
        ["Listener", one.listener], ["MQTT", `${one.version}, keepalive ${one.keepalive} s`],
        ["Connected", ago(one.since)], ["Heard", ago(one.heard)],
        ["Session", one.durable ? "outlives the connection" : "ends with the connection"],
        ["Will", named(one.will ?? "none")],
        ["In flight", `${number(one.inflight)} of ${number(one.window)}, ${number(one.queued)} wait`],
        ["Unread", size(one.unread)], ["Dropped", number(one.dropped)],
        ["State", one.slow ? "slow: it does not take what is there for it" : "keeps up"],
      ].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
      table([
        ["Subscription", "text", (each) => named(each.filter)],
        ["QoS", "number", (each) => each.qos],
      ], one.subscribed, "It has subscribed nothing."),
    ], [decisive("Disconnect", async () => {
      await ask("POST", "/clients/kick", { clients: [id] });
      shown.close();
      await refresh();
    })]);
  });
}

// A button that wants to be pressed twice.
function decisive(name, act) {
  const made = make("button", { class: "danger", type: "button" }, name);
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
  return made;
}

async function sessions() {
  const form = $("sessions-form").elements;
  const found = await ask("GET", "/sessions", { match: pattern(form.match.value), state: form.state.value, limit: MOST });
  put($("sessions-table"), table([
    ["Client", "text", (one) => (one.connected ? link(one.client, () => showClient(one.client)) : named(one.client))],
    ["Connected to", "wide", (one) => (one.connected ? one.gateway : "–")],
    ["Ends", "", (one) => (one.ends === null ? (one.connected ? "after its connection" : "–") : ago(one.ends))],
    ["Subscriptions", "number wide", (one) => number(one.subscriptions)],
    ["Queued", "number", (one) => (one.queued === null ? "–" : number(one.queued))],
    ["In flight", "number wide", (one) => (one.inflight === null ? "–" : number(one.inflight))],
    ["", "text wide", (one) => named(one.problem ?? "")],
  ], found.sessions, "There are none like that."), rest(found, "sessions"));
}

// -- gateways, streams, retained messages ----------------------------------------------------------

async function servers() {
  const [cluster, streams] = await Promise.all([ask("GET", "/cluster"), ask("GET", "/streams")]);
  put($("gateways-table"), table([
    ["Gateway", "", (one) => (one.state === "running" ? link(one.id, () => showGateway(one)) : one.id)],
    ["State", "text", (one) => one.state],
    ["Listens on", "text wide", (one) => one.listen.join(", ")],
    ["Version", "wide", (one) => one.version],
    ["Name", "", (one) => one.name],
    ["Started", "", (one) => ago(one.started)],
    ["Connections", "number", (one) => (one.connections === null ? "–" : number(one.connections))],
    ["Memory", "number wide", (one) => (one.memory ? size(one.memory) : "–")],
    ["nats-server", "text wide", (one) => one.nats ?? ""],
  ], cluster.gateways, "No gateway is known."));
  put($("warnings"), ...streams.warnings.map((line) => make("li", {}, line)));
  put($("streams-table"), table([
    ["Stream", "", (one) => one.name],
    ["", "", (one) => make("span", { class: `pill ${one.obstacle ? "bad" : "good"}` }, one.obstacle || "stores")],
    ["Replicas", "number wide", (one) => one.replicas],
    ["Leader", "wide", (one) => one.leader || "–"],
    ["Messages", "number", (one) => number(one.messages)],
    ["Bytes", "number", (one) => size(one.bytes)],
    ["Consumers", "number wide", (one) => number(one.consumers)],
  ], streams.streams, "There are no streams."));
}

function showGateway(one) {
  const shown = dialog(`Gateway ${one.id}`, [
    make("dl", {}, ...[
      ["Listens on", one.listen.join(", ")], ["Version", one.version], ["Started", ago(one.started)],
      ["Connections", one.connections === null ? "–" : number(one.connections)], ["nats-server", one.nats ?? ""],
    ].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    make("p", {}, "To drain it is to let its clients go, one after the other, to other gateways; then it ends."),
  ], [decisive("Drain", async () => {
    await ask("POST", `/gateways/${encodeURIComponent(one.id)}/drain`);
    shown.close();
    await refresh();
  })]);
}

async function retained() {
  const filter = $("retained-form").elements.filter.value || "#";
  const found = await ask("GET", "/retained", { filter, limit: MOST });
  put($("retained-table"), table([
    ["Topic", "text", (one) => link(one.topic, () => showRetained(one.topic))],
    ["QoS", "number", (one) => one.qos],
    ["Size", "number", (one) => size(one.bytes)],
    ["Stored", "", (one) => ago(one.stored)],
  ], found.retained, "Nothing is retained there."), rest(found, "retained"));
}

async function showRetained(topic) {
  await guarded(async () => {
    const one = await ask("GET", `/retained/${encodeURIComponent(topic)}`);
    dialog(named(topic), [make("pre", {}, one.text ?? `Base64: ${one.base64}`)], []);
  });
}

// -- parts of the page -----------------------------------------------------------------------------

const bridge = new Bridge(trouble);
const VIEWS = { overview: slow, clients, sessions, servers, retained, try: async () => bridge.open() };
let shown = "overview";

async function refresh() {
  await guarded(VIEWS[shown]);
}

function turn() {
  const wanted = location.hash.slice(2); // "#/clients": no section has an id like that, to which a browser would scroll
  shown = Object.hasOwn(VIEWS, wanted) ? wanted : "overview";
  for (const name of Object.keys(VIEWS)) $(name).hidden = name !== shown;
  for (const each of $("tabs").children) {
    if (each.hash === `#/${shown}`) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  refresh();
}

for (const name of ["clients", "sessions", "retained"]) {
  $(`${name}-form`).addEventListener("submit", (event) => { event.preventDefault(); refresh(); });
}

async function repeat(work, pause) {
  for (;;) {
    if (!document.hidden) await guarded(work);
    await new Promise((done) => { setTimeout(done, pause); });
  }
}

async function begin() {
  await signIn();
  const about = await ask("GET", "about", {}, "/");
  put($("gateway"), about.gateway);
  addEventListener("hashchange", turn);
  turn();
  repeat(overview, RATES_EVERY);
  repeat(async () => { if (!$("dialog").open) await VIEWS[shown](); }, TABLES_EVERY);
}

guarded(begin);
