// SPDX-License-Identifier: Apache-2.0
// Subscriptions, groups of shared subscriptions, topics, retained messages.

import { ask } from "/ask.js";
import { List, pattern } from "/list.js";
import { ago, decisive, dialog, guarded, link, named, number, sheet, size, make } from "/parts.js";

export const subscriptions = new List("subscriptions", "/subscriptions", [
  ["Filter", "text", (one) => named(one.filter), "filter"],
  ["Client", "text", (one) => named(one.client), "client"],
  ["QoS", "number", (one) => one.qos, "qos"],
  ["Gateway", "wide", (one) => one.gateway || "not connected"],
  ["No local", "wide", (one) => (one.no_local ? "yes" : "")],
  ["Retain as published", "wide", (one) => (one.retain_as_published ? "yes" : "")],
  ["Identifier", "number wide", (one) => one.identifier ?? ""],
], "There are none like that.", {
  sort: "filter",
  values: (form) => ({
    filter: pattern(form.filter.value), match: pattern(form.match.value), topic: form.topic.value, stored: form.stored.checked,
  }),
});

export const groups = new List("groups", "/groups", [
  ["Group", "text", (one) => named(one.group)],
  ["Filter", "text", (one) => named(one.filter), "filter"],
  ["Connected members", "number", (one) => number(one.members), "members"],
  ["Gateways", "text wide", (one) => one.gateways.join(", ")],
], "No member of a group is connected.", { sort: "filter", values: (form) => ({ filter: pattern(form.filter.value) }) });

export const topics = new List("topics", "/topics", [
  ["Topic", "text", (one) => named(one.topic), "topic"],
  ["Stored messages", "number", (one) => number(one.stored), "stored"],
  ["Retained", "", (one) => (one.retained ? "yes" : "")],
  ["Used lately at", "text wide", (one) => one.gateways.join(", ")],
], "No topic matches.", { sort: "topic", values: (form) => ({ filter: form.filter.value || "#" }) });

export const retained = new List("retained", "/retained", [
  ["Topic", "text", (one) => (document.body.dataset.role === "viewer" ? named(one.topic) : link(one.topic, () => showRetained(one.topic))), "topic"],
  ["QoS", "number", (one) => one.qos, "qos"],
  ["Size", "number", (one) => size(one.bytes), "bytes"],
  ["Stored", "", (one) => ago(one.stored), "stored"],
], "Nothing is retained there.", { sort: "topic", values: (form) => ({ filter: form.filter.value || "#" }) });

function showRetained(topic) {
  return guarded(async () => {
    const one = await ask("GET", `/retained/${encodeURIComponent(topic)}`);
    const shown = dialog(named(topic), [
      sheet([["QoS", one.qos], ["Size", size(one.bytes)], ["Stored", ago(one.stored)]]),
      make("pre", { tabindex: "0", "aria-label": "Payload" }, one.text ?? `Base64: ${one.payload}`),
    ], [decisive("Delete", async () => {
      await ask("DELETE", `/retained/${encodeURIComponent(topic)}`);
      shown.close();
      await retained.refresh();
    })]);
  });
}
