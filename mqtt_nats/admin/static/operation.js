// SPDX-License-Identifier: Apache-2.0
// Gateways, listeners, streams, plugins, bans, rules, actions of administrators.

import { ask } from "/ask.js";
import { List } from "/list.js";
import { $, ago, clock, decisive, dialog, guarded, known, link, make, named, number, pill, put, sheet, size, table } from "/parts.js";

export async function gateways() {
  const [cluster, found] = await Promise.all([ask("GET", "/cluster"), ask("GET", "/listeners")]);
  put($("gateways-table"), table([
    ["Gateway", "", (one) => (one.state === "running" ? link(one.id, () => showGateway(one)) : one.id)],
    ["State", "text", (one) => one.state],
    ["Listens on", "text wide", (one) => one.listen.join(", ")],
    ["Version", "wide", (one) => one.version],
    ["Name", "", (one) => one.name],
    ["Started", "", (one) => ago(one.started)],
    ["Connections", "number", (one) => known(one.connections)],
    ["Memory", "number wide", (one) => (one.memory ? size(one.memory) : "–")],
    ["nats-server", "text wide", (one) => one.nats ?? ""],
  ], cluster.gateways, "No gateway is known."));
  put($("listeners-table"), table([
    ["Gateway", "", (one) => one.gateway],
    ["Listens on", "text", (one) => one.listen.join(", ")],
    ["Type", "", (one) => one.type],
    ["Connections", "number", (one) => number(one.connections)],
    ["At most", "number wide", (one) => known(one.max_connections)],
    ["Who gets in", "text", (one) => whoGetsIn(one)],
  ], found.listeners, "There are no listeners."));
}

function whoGetsIn(one) {
  if (one.use_identity) return `certificates (${one.use_identity})`;
  return [...one.authenticators, ...(one.anonymous ? ["anonymous"] : [])].join(", ") || "nobody";
}

function showGateway(one) {
  const shown = dialog(`Gateway ${one.id}`, [
    sheet([
      ["Listens on", one.listen.join(", ")], ["Version", one.version], ["Build", one.build], ["Started", ago(one.started)],
      ["Connections", known(one.connections)], ["nats-server", one.nats ?? ""],
    ]),
    make("p", {}, "To drain it is to let its clients go, one after the other, to other gateways; then it ends."),
  ], [decisive("Drain", async () => {
    await ask("POST", `/gateways/${encodeURIComponent(one.id)}/drain`);
    shown.close();
    await gateways();
  })]);
}

export async function streams() {
  const found = await ask("GET", "/streams");
  put($("warnings"), ...found.warnings.map((line) => make("li", {}, line)));
  put($("streams-table"), table([
    ["Stream", "", (one) => one.name],
    ["State", "", (one) => pill(one.obstacle || "stores", one.obstacle ? "bad" : "good")],
    ["Replicas", "number wide", (one) => one.replicas],
    ["Leader", "wide", (one) => one.leader || "–"],
    ["Messages", "number", (one) => number(one.messages)],
    ["Bytes", "number", (one) => size(one.bytes)],
    ["Consumers", "number wide", (one) => number(one.consumers)],
  ], found.streams, "There are no streams."));
}

export async function plugins() {
  const [every, found] = await Promise.all([ask("GET", "/plugins"), ask("GET", "/hooks")]);
  const rows = every.flatMap((gateway) => gateway.plugins.map((one) => ({ ...one, gateway: gateway.id })));
  put($("plugins-table"), table([
    ["Gateway", "", (one) => one.gateway],
    ["Plugin", "", (one) => one.name],
    ["State", "", (one) => (one.loaded ? pill("loaded", "good") : one.error ? pill(one.error, "bad") : "not loaded")],
    ["Package", "text wide", (one) => one.package],
    ["Change", "", (one) => change(one)],
  ], rows, "No plugin is installed."));
  put($("hooks-table"), table([
    ["Gateway", "wide", (one) => one.gateway],
    ["Point", "", (one) => one.point],
    ["Callback", "text", (one) => one.callback],
    ["Of", "text", (one) => one.owner],
    ["Priority", "number wide", (one) => one.priority],
    ["Calls", "number", (one) => number(one.calls)],
    ["Failures", "number", (one) => number(one.failures)],
  ], found.hooks, "There are no hooks."));
}

function change(one) {
  const what = one.loaded ? "unload" : "load";
  return decisive(one.loaded ? "Unload" : "Load", async () => {
    await ask("POST", `/plugins/${encodeURIComponent(one.name)}/${what}`, { gateway: one.gateway });
    await plugins();
  }, `${one.name} ${one.gateway}`);
}

export async function bans() {
  put($("bans-table"), table([
    ["What", "", (one) => one.kind],
    ["Who", "text", (one) => named(one.value)],
    ["Until", "", (one) => (one.until ? ago(one.until) : "always")],
    ["Set by", "text wide", (one) => named(one.by)],
    ["Reason", "text", (one) => named(one.reason)],
    ["Change", "", (one) => decisive("Lift", async () => {
      await ask("DELETE", `/bans/${one.kind}/${encodeURIComponent(one.value)}`);
      await bans();
    }, `${one.kind} ${one.value}`)],
  ], await ask("GET", "/bans"), "Nobody is banned."));
}

$("bans-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target.elements;
  guarded(async () => {
    await ask("POST", "/bans", { kind: form.kind.value, who: form.who.value, lasts: form.lasts.value, reason: form.reason.value });
    event.target.reset();
    await bans();
  });
});

$("rules-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target.elements;
  guarded(async () => {
    const found = await ask("GET", "/acl/check", {
      user: form.user.value || "-", topic: form.topic.value, client: form.client.value, address: form.address.value,
      access: form.access.value,
    });
    put($("rules-table"), table([
      ["Access", "", (one) => one.access],
      ["QoS", "number", (one) => one.qos],
      ["Decision", "", (one) => pill(one.allowed ? "allowed" : "denied", one.allowed ? "good" : "bad")],
      ["Decided by", "text", (one) => named(one.why)],
      ["Gateway", "wide", (one) => one.gateway],
    ], found.decisions, "No gateway decides."));
    const told = found.decisions.some((one) => one.hooks) ? "Hooks are asked after the rules, and have the last word. " : "";
    const there = found.decisions.some((one) => one.connected) ? "The client is connected: its address, groups and own rules count too." : "";
    put($("rules-note"), told + there);
  });
});

export async function rules() {} // nothing changes by itself

export const audit = new List("audit", "/audit", [
  ["When", "", (one) => clock(one.time)],
  ["Who", "text", (one) => named(one.who)],
  ["Role", "wide", (one) => one.role],
  ["From", "wide", (one) => one.address],
  ["Operation", "", (one) => one.operation],
  ["Arguments", "text", (one) => named(one.arguments)],
  ["Outcome", "text", (one) => (one.outcome === "done" ? pill("done", "good") : named(one.outcome || "not ended"))],
  ["Gateway", "wide", (one) => one.gateway],
], "No administrator has done anything since the gateways were started.", { key: "actions", values: (form) => ({ who: form.who.value }) });
