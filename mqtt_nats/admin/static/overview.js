// SPDX-License-Identifier: Apache-2.0
// The overview: present numbers, and the last hour as the gateways have kept it.

import { ask } from "/ask.js";
import { Chart, LINES_MOST, short } from "/charts.js";
import { clientColumns } from "/clients.js";
import { $, make, number, put, size, state, table } from "/parts.js";

const SPAN = 3600;
const SHORTEST = 300;
const milliseconds = (value) => (value === null || value === undefined ? "–" : `${short(value * 1000)} ms`);
const percent = (value) => (value === null || value === undefined ? "–" : `${short(value * 100)} %`);

const charts = {};
for (const [name, title, ...more] of [
  ["messages", "Messages per second"],
  ["clients", "Clients"],
  ["connects", "Connects per second"],
  ["drops", "Drops per second, by reason"],
  ["cpu", "CPU, of a core", percent],
  ["memory", "Memory of the gateways", size, 1024],
  ["storage", "JetStream storage", size, 1024],
  ["times", "Times", milliseconds],
]) charts[name] = new Chart($("charts"), title, ...more);

let points = new Map(); // by gateway, those of the last hour
let since = 0;

const sum = (values) => values.reduce((total, value) => total + value, 0);
const total = (gateways, of) => sum(gateways.map(of));

// Ask for the points since the last time; returns whether there were any.
async function collect() {
  const found = await ask("GET", "/history", { since });
  let latest = since;
  let more = false;
  for (const { gateway, points: sent } of found.gateways) {
    const before = points.get(gateway) ?? [];
    const added = sent.filter((one) => one.time > (before.at(-1)?.time ?? 0));
    const all = [...before, ...added];
    points.set(gateway, all);
    latest = Math.max(latest, all.at(-1)?.time ?? 0);
    more ||= added.length > 0;
  }
  // Gateways whose clocks differ a little have their points of this time later: they are asked for again.
  since = Math.max(0, latest - 2 * found.step);
  for (const [gateway, all] of points) {
    const kept = all.filter((one) => one.time > latest - SPAN);
    if (kept.length) points.set(gateway, kept);
    else points.delete(gateway);
  }
  return more;
}

// The points of all gateways at each time, the oldest first.
function moments() {
  const found = new Map();
  for (const all of points.values()) {
    for (const one of all) {
      if (!found.has(one.time)) found.set(one.time, []);
      found.get(one.time).push(one);
    }
  }
  return [...found].sort(([one], [other]) => one - other);
}

const added = (key) => (several) => {
  const values = several.map((one) => one[key]).filter((value) => value !== null);
  return values.length ? sum(values) : null;
};
const largest = (key) => (several) => {
  const values = several.map((one) => one[key]).filter((value) => value !== null);
  return values.length ? Math.max(...values) : null;
};

function draw(all) {
  // Of gateways that were just started, what there is of the hour, in steps of five minutes.
  const age = all.length ? all.at(-1)[0] - all[0][0] : 0;
  const span = Math.min(SPAN, Math.ceil(Math.max(age, 1) / SHORTEST) * SHORTEST);
  const show = (chart, lines) => charts[chart].show(span, Object.keys(lines),
    all.map(([time, several]) => [time, Object.values(lines).map((of) => of(several))]));
  show("messages", { received: added("received"), sent: added("sent") });
  show("clients", { connected: added("clients") });
  show("connects", { connects: added("connects") });
  show("cpu", { "all gateways": added("cpu"), "the busiest": largest("cpu") });
  show("memory", { "all gateways": added("memory") });
  show("storage", { used: largest("storage") });
  show("times", { "JetStream acknowledges": largest("stored"), "event loop late": largest("lag") });
  const counts = new Map();
  for (const [, several] of all) {
    for (const one of several) {
      for (const [reason, count] of Object.entries(one.dropped)) counts.set(reason, (counts.get(reason) ?? 0) + count);
    }
  }
  const reasons = [...counts].sort(([, one], [, other]) => other - one).map(([reason]) => reason);
  const shown = reasons.slice(0, reasons.length > LINES_MOST ? LINES_MOST - 1 : LINES_MOST);
  const lines = Object.fromEntries(shown.map((reason) => [reason, (several) => total(several, (one) => one.dropped[reason] ?? 0)]));
  if (shown.length < reasons.length) {
    lines["other reasons"] = (several) => sum(reasons.slice(shown.length).map((reason) => total(several, (one) => one.dropped[reason] ?? 0)));
  }
  show("drops", reasons.length ? lines : { none: (several) => total(several, () => 0) });
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
  const refused = sum([...counts.values()]);
  return tile("Stores refused", number(refused), reasons.join(", ") || "by JetStream", refused ? "warn" : "");
}

// What runs: compiled modules, or pure Python and why; gateways that differ are counted.
function buildTile(gateways) {
  const builds = [...new Set(gateways.map((one) => one.build ?? "not known"))];
  if (builds.length > 1) {
    const counts = builds.map((build) => `${number(gateways.filter((one) => (one.build ?? "not known") === build).length)} ${build}`);
    return tile("Build", "different", counts.join("; "));
  }
  const [name, ...why] = (builds[0] ?? "–").split(": ");
  return tile("Build", name, why.join(": "));
}

function tiles(found, now) {
  const gateways = found.gateways;
  const drops = (one) => sum(Object.values(one.dropped));
  const slow = total(gateways, (one) => one.slow + one.stalled);
  const rate = (key, text = short) => (now.length ? `${text(total(now, (one) => one[key]))}/s` : "–");
  const dropping = total(now, drops);
  const amount = (key) => (found.stored[key] === null || found.stored[key] === undefined ? "–" : number(found.stored[key]));
  put($("tiles"),
    tile("Clients", number(total(gateways, (one) => one.clients)), `${number(gateways.length)} ${gateways.length === 1 ? "gateway" : "gateways"}`),
    tile("Received", rate("received"), rate("received_bytes", size)),
    tile("Sent", rate("sent"), rate("sent_bytes", size)),
    tile("Dropped", now.length ? `${short(dropping)}/s` : "–", `${number(total(gateways, drops))} in all`, dropping > 0 ? "warn" : ""),
    tile("Slow clients", number(slow), slow ? "see below" : "everybody keeps up", slow ? "warn" : ""),
    tile("In flight", number(total(gateways, (one) => one.inflight)), `${number(total(gateways, (one) => one.queued))} wait`),
    tile("Not stored yet", number(total(gateways, (one) => one.pending_stores)), "by JetStream"),
    storageTile(found.storage),
    refusedTile(gateways),
    buildTile(gateways),
    ...Object.keys(found.stored).map((key) => tile(`${key[0].toUpperCase()}${key.slice(1)} stored`, amount(key))));
  const worst = gateways.find((one) => one.obstacle);
  if (found.silent.length) state("warn", `gateway ${found.silent.join(", ")} does not answer`);
  else if (worst) state("bad", `not ready: ${worst.obstacle}`);
  else if (gateways.some((one) => one.draining)) state("warn", "a gateway is draining");
  else state("good", "ready");
}

let seen = ""; // the slow clients that are shown

export async function overview() {
  const asked = [ask("GET", "/status"), ask("GET", "/clients", { slow: true, limit: 20 }), collect()];
  const [found, slow, more] = await Promise.all(asked);
  const all = moments();
  tiles(found, all.at(-1)?.[1] ?? []);
  if (more || !all.length) draw(all);
  const now = JSON.stringify(slow.clients);
  if (now !== seen) put($("slow"), table(clientColumns, slow.clients, "Everybody keeps up."));
  seen = now;
}
