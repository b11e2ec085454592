// SPDX-License-Identifier: Apache-2.0
// Publish and subscribe: JSON over a WebSocket; the gateway is the MQTT client.

import { token } from "/ask.js";
import { $, make, named, number, put, table } from "/parts.js";

const MOST = 200;
const DRAW = 150;

// Base64 for URLs, which a subprotocol may have in it.
function encoded(text) {
  const bytes = new TextEncoder().encode(text);
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export class Bridge {
  constructor(trouble) {
    this.trouble = trouble;
    this.socket = null;
    this.messages = [];
    this.count = 0;
    this.filters = new Map();
    this.drawing = false;
    $("subscribe-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const form = event.target.elements;
      this.send({ do: "subscribe", filter: form.filter.value, qos: Number(form.qos.value) });
    });
    $("publish-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const form = event.target.elements;
      this.send({
        do: "publish", topic: form.topic.value, payload: form.payload.value,
        qos: Number(form.qos.value), retain: form.retain.checked,
      });
    });
    $("clear").addEventListener("click", () => { this.messages = []; this.count = 0; this.draw(); });
  }

  open() {
    if (this.socket) return;
    const names = ["mqtt-nats"];
    if (token()) names.push(`token.${encoded(token())}`);
    const socket = this.socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/bridge`, names);
    this.tell("connecting");
    socket.addEventListener("message", (event) => this.take(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => {
      this.socket = null;
      this.filters.clear();
      this.chips();
      this.tell(`not connected${event.reason ? `: ${event.reason}` : ""}`);
    });
  }

  send(asked) {
    this.open();
    const text = JSON.stringify(asked);
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(text);
    else this.socket.addEventListener("open", (event) => event.target.send(text), { once: true });
  }

  take(found) {
    this.trouble("");
    switch (found.is) {
      case "connected": this.tell(`connected as ${found.client}`); break;
      case "subscribed": this.filters.set(found.filter, found.qos); this.chips(); break;
      case "unsubscribed": this.filters.delete(found.filter); this.chips(); break;
      case "published": put($("published"), "published on ", named(found.topic), ` at QoS ${found.qos}`); break;
      case "message":
        this.count += 1;
        this.messages.unshift({ ...found, at: new Date() });
        this.messages.length = Math.min(this.messages.length, MOST);
        if (!this.drawing) {
          this.drawing = true;
          setTimeout(() => { this.drawing = false; this.draw(); }, DRAW);
        }
        break;
      default: this.trouble(found.text);
    }
  }

  tell(text) {
    put($("bridge"), text);
  }

  chips() {
    put($("filters"), ...[...this.filters].map(([filter, qos]) => {
      const end = make("button", { class: "quiet", type: "button", "aria-label": `Unsubscribe ${filter}` }, "×");
      end.addEventListener("click", () => this.send({ do: "unsubscribe", filter }));
      return make("li", {}, named(filter), make("span", { class: "muted" }, `QoS ${qos}`), end);
    }));
  }

  draw() {
    const rows = table([
      ["Time", "wide", (one) => one.at.toLocaleTimeString()],
      ["Topic", "text", (one) => named(one.topic)],
      ["Payload", "text", (one) => named(one.text ?? `Base64: ${one.base64}`)],
      ["QoS", "number", (one) => `${one.qos}${one.retain ? ", retained" : ""}`],
      ["Bytes", "number wide", (one) => number(one.bytes)],
    ], this.messages, "");
    put($("messages"), ...(this.messages.length ? [rows] : []));
    if (this.count > MOST) $("messages").append(make("p", {}, `${number(this.count)} messages; the last ${MOST} are shown.`));
  }
}
