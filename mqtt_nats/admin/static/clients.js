// SPDX-License-Identifier: Apache-2.0
// Clients that are connected, and sessions, also of clients that are not.

import { ask } from "/ask.js";
import { List, pattern } from "/list.js";
import { Refused, ago, button, decisive, dialog, guarded, known, link, named, number, pill, sheet, size, table } from "/parts.js";

export const clientColumns = [
  ["Client", "text", (one) => link(one.client, () => showClient(one.client)), "client"],
  ["State", "", (one) => (one.slow ? pill("slow", "warn") : "keeps up")],
  ["User", "text wide", (one) => named(one.user ?? ""), "user"],
  ["From", "wide", (one) => one.address],
  ["Gateway", "wide", (one) => one.gateway],
  ["MQTT", "wide", (one) => one.version],
  ["Connected", "wide", (one) => ago(one.since), "since"],
  ["In flight", "number wide", (one) => `${number(one.inflight)}/${number(one.window)}`, "inflight"],
  ["Queued", "number", (one) => number(one.queued), "queued"],
  ["Unread", "number", (one) => size(one.unread), "unread"],
  ["Dropped", "number wide", (one) => number(one.dropped), "dropped"],
];
export const clients = new List("clients", "/clients", clientColumns, "Nobody like that is connected.", {
  sort: "slowest",
  values: (form) => ({ match: pattern(form.match.value), user: form.user.value, slow: form.slow.checked }),
});

export const sessions = new List("sessions", "/sessions", [
  ["Client", "text", (one) => link(one.client, () => showSession(one.client)), "client"],
  ["User", "text wide", (one) => named(one.user ?? "")],
  ["Connected to", "", (one) => (one.connected ? one.gateway : "–")],
  ["Ends", "", (one) => ends(one)],
  ["Subscriptions", "number wide", (one) => number(one.subscriptions)],
  ["Queued", "number", (one) => known(one.queued), "queued"],
  ["In flight", "number wide", (one) => known(one.inflight)],
  ["Record written", "wide", (one) => ago(one.written), "written"],
  ["Problem", "text wide", (one) => named(one.problem ?? "")],
], "There are none like that.", {
  sort: "client",
  values: (form) => ({ match: pattern(form.match.value), state: form.state.value }),
});

function ends(one) {
  if (one.ends !== null) return ago(one.ends);
  if (!one.durable) return "with its connection";
  return one.connected ? "after its connection" : "–";
}

function showClient(id) {
  return guarded(async () => {
    const one = await ask("GET", `/clients/${encodeURIComponent(id)}`);
    const shown = dialog(named(one.client), [
      sheet([
        ["Gateway", one.gateway], ["User", named(one.user ?? "anonymous")], ["From", one.address],
        ["Listener", one.listener], ["MQTT", `${one.version}, keep alive ${one.keepalive} s`],
        ["Connected", ago(one.since)], ["Heard", ago(one.heard)],
        ["Session", one.durable ? "outlives the connection" : "ends with the connection"],
        ["Will", named(one.will ?? "none")],
        ["In flight", `${number(one.inflight)} of ${number(one.window)}, ${number(one.queued)} wait`],
        ["Unread", size(one.unread)], ["Dropped", number(one.dropped)],
        ["Not stored", `${number(one.unstored)} of what it has published`],
        ["Not read from", one.not_read_from.join("; ") || "it is read from"],
        ["State", one.slow ? "slow: it does not take what is there for it" : "keeps up"],
      ]),
      table([
        ["Subscription", "text", (each) => named(each.filter)],
        ["QoS", "number", (each) => each.qos],
      ], one.subscribed, "It has subscribed nothing."),
    ], [
      button("Session", () => showSession(id), "quiet"),
      decisive("Disconnect", async () => {
        await ask("POST", "/clients/kick", { clients: [id] });
        shown.close();
        await clients.refresh();
      }),
    ]);
  });
}

function showSession(id) {
  return guarded(async () => {
    const one = await ask("GET", `/sessions/${encodeURIComponent(id)}`);
    const shown = dialog(named(one.client), [
      sheet([
        ["User", named(one.user || "anonymous")],
        ["Connected", one.connected ? `to gateway ${one.gateway}` : "no"],
        ["Record", `written ${ago(one.written)} by gateway ${one.owner || "unknown"}`],
        ["Ends", ends(one)],
        ["Queued", known(one.queued)], ["In flight", known(one.inflight)],
        ...(one.problem ? [["Problem", named(one.problem)]] : []),
      ]),
      table([
        ["Subscription", "text", (each) => named(each.filter)],
        ["QoS", "number", (each) => each.qos],
        ["Queued", "number", (each) => known(each.queued)],
        ["In flight", "number", (each) => known(each.inflight)],
        ["Consumers", "text", (each) => (each.missing ? `${each.missing} of ${each.consumers} are gone` : each.consumers)],
      ], one.subscribed, "It has no subscriptions."),
    ], [one.connected ? button("Client", () => showClient(id), "quiet") : decisive("End session", async () => {
      const done = await ask("POST", "/sessions/clean", { clients: [id] });
      if (done.kept.length) throw new Refused(done.kept[0].why);
      shown.close();
      await sessions.refresh();
    })]);
  });
}
