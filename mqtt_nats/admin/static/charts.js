// SPDX-License-Identifier: Apache-2.0
// Line charts of the last minutes, in SVG. Nothing here is parsed as HTML.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 170;
const LEFT = 48;
const BOTTOM = 20;
const COLOURS = ["one", "two", "three"];

function svg(name, attributes, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A round number that is not below `value`.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) {
      const scaled = value / (unit === "k" ? 1e3 : size);
      return `${scaled.toFixed(scaled < 100 ? 1 : 0)} ${unit}`;
    }
  }
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value < 10 ? 2 : 1);
}

export class Chart {
  // `names` of the lines; `span` seconds that are shown.
  constructor(place, title, names, span, unit = "") {
    this.names = names;
    this.span = span;
    this.unit = unit;
    this.points = [];
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.picture.setAttribute("aria-label", title);
    const heading = document.createElement("h2");
    heading.textContent = title;
    const card = document.createElement("div");
    card.className = "chart";
    card.append(heading, this.legend, this.picture);
    place.append(card);
    this.picture.addEventListener("pointermove", (event) => this.look(event));
    this.picture.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.at = null;
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  add(time, values) {
    this.points.push([time, values]);
    while (this.points.length && this.points[0][0] < time - this.span) this.points.shift();
    this.draw();
  }

  look(event) {
    const box = this.picture.getBoundingClientRect();
    const x = event.clientX - box.left;
    if (!this.points.length || box.width <= LEFT) return;
    const last = this.points.at(-1)[0];
    const time = last - this.span + ((x - LEFT) / (box.width - LEFT)) * this.span;
    const distance = (point) => Math.abs(point[0] - time);
    this.at = this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    this.draw();
  }

  draw() {
    const width = this.picture.clientWidth || WIDTH;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const point = this.at ?? this.points.at(-1);
    this.legend.replaceChildren(...this.names.map((name, index) => {
      const entry = document.createElement("span");
      const key = document.createElement("i");
      key.className = `key ${COLOURS[index]}`;
      const value = document.createElement("b");
      value.textContent = point ? `${short(point[1][index])}${this.unit}` : "–";
      entry.append(key, `${name} `, value);
      return entry;
    }), this.when());
    const parts = [];
    const values = this.points.flatMap((each) => each[1]).filter((value) => value !== null);
    const top = ceiling(Math.max(0, ...values));
    const bottom = HEIGHT - BOTTOM;
    const y = (value) => bottom - (value / top) * (bottom - 8);
    for (const part of [0, 0.5, 1]) {
      const height = y(top * part);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: height, y2: height }));
      const label = svg("text", { x: LEFT - 6, y: height + 4, "text-anchor": "end" });
      label.textContent = short(top * part);
      parts.push(label);
    }
    const last = this.points.length ? this.points.at(-1)[0] : 0;
    const x = (time) => LEFT + ((time - last + this.span) / this.span) * (width - LEFT);
    for (const [share, text, anchor] of [[0, `${this.span / 60} min ago`, "start"], [1, "now", "end"]]) {
      const label = svg("text", { x: LEFT + share * (width - LEFT), y: HEIGHT - 5, "text-anchor": anchor });
      label.textContent = text;
      parts.push(label);
    }
    this.names.forEach((_, index) => {
      let path = "";
      let pen = "M";
      for (const [time, each] of this.points) {
        if (each[index] === null) { pen = "M"; continue; }
        path += `${pen}${x(time).toFixed(1)} ${y(each[index]).toFixed(1)}`;
        pen = "L";
      }
      if (path) parts.push(svg("path", { class: COLOURS[index], d: path }));
    });
    if (this.at) parts.push(svg("line", { class: "mark", x1: x(this.at[0]), x2: x(this.at[0]), y1: 8, y2: bottom }));
    this.picture.replaceChildren(...parts);
  }

  when() {
    const found = document.createElement("span");
    found.textContent = this.at ? new Date(this.at[0] * 1000).toLocaleTimeString() : "";
    return found;
  }
}
