// SPDX-License-Identifier: Apache-2.0
// A program of the kit on MQTT.js: TCP, ws and wss, as the address says.
"use strict";
const mqtt = require("mqtt");
const readline = require("node:readline");

const EXPIRY_S = 300;
const say = (...words) => process.stdout.write(words.join(" ") + "\n");
const fail = (error) => {
  if (error) {
    console.error(error);
    process.exit(1);
  }
};

const [address, version, clientId, clean, will] = process.argv.slice(2);
const options = { protocolVersion: Number(version) + (version === "3" ? 1 : 0), clientId, clean: clean === "1", reconnectPeriod: 200 };
if (version === "5") options.properties = { sessionExpiryInterval: clean === "1" ? 0 : EXPIRY_S };
if (will) options.will = { topic: will, payload: "gone", qos: 1 };
const client = mqtt.connect(address, options);
client.on("connect", (connack) => say("connected", Number(connack.sessionPresent)));
client.on("message", (topic, payload, packet) => say("message", topic, packet.qos, payload));
client.on("error", (error) => console.error(error));

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const [command, topic, qos, payload] = line.split(" ");
  if (command === "subscribe")
    client.subscribe(topic, { qos: Number(qos) }, (error, granted) => fail(error) || say("subscribed", granted[0].qos));
  else if (command === "publish") client.publish(topic, payload, { qos: Number(qos) }, (error) => fail(error) || say("published"));
  else client.end(false, {}, () => process.exit(0));
});
