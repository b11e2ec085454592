// SPDX-License-Identifier: Apache-2.0
// What a client sends and gets, or what becomes of messages, as it happens.

import { fetched } from "/ask.js";
import { $, Refused, guarded, named, number, put, table } from "/parts.js";

const MOST = 300;
const DRAW = 250;
const LASTS = "15m";
const APART = ["time", "client", "gateway", "event"];

let stopping = null; // ends the trace that runs
let events = [];
let count = 0;
let drawing = null;

function draw() {
  drawing = null;
  put($("trace-table"), ...(events.length ? [table([
    ["Time", "", (one) => (one.time ? new Date(one.time * 1000).toISOString().slice(11, 23) : "")],
    ["Client", "text", (one) => named(one.client ?? "")],
    ["Event", "", (one) => one.event],
    ["About", "text", (one) => named(about(one))],
    ["Gateway", "wide", (one) => one.gateway],
  ], events, "")] : []));
  put($("trace-state"), `${stopping ? "running" : "stopped"}, ${number(count)} events${count > MOST ? `, the last ${MOST} are shown` : ""}`);
}

function about(one) {
  return Object.entries(one).filter(([name]) => !APART.includes(name))
    .map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(", ") : value}`).join("; ");
}

function add(line) {
  if (!line) return;
  count += 1;
  events.unshift(JSON.parse(line));
  events.length = Math.min(events.length, MOST);
  drawing ??= setTimeout(draw, DRAW);
}

async function follow(values, signal) {
  const answer = await fetched("GET", "/api/v1/trace", { ...values, lasts: LASTS }, signal);
  if (!answer.ok) throw new Refused((await answer.json()).error);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach(add);
  }
}

async function start(values) {
  stop();
  const mine = stopping = new AbortController();
  events = [];
  count = 0;
  draw();
  await guarded(async () => {
    try {
      await follow(values, mine.signal);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  });
  if (stopping === mine) stop();
}

// A trace costs the gateways something: it ends when nobody looks.
export function stop() {
  stopping?.abort();
  stopping = null;
  $("trace-stop").disabled = true;
  draw();
}

export async function trace() {} // events come by themselves

$("trace-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target.elements;
  start({ [form.of.value]: form.name.value });
  $("trace-stop").disabled = false;
});
$("trace-stop").addEventListener("click", stop);
