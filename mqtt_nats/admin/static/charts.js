// SPDX-License-Identifier: Apache-2.0
// Line charts, in SVG. Nothing here is parsed as HTML.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 170;
const LEFT = 56;
const BOTTOM = 20;
const COLOURS = ["one", "two", "three", "four", "five"];

export const LINES_MOST = COLOURS.length;

function svg(name, attributes, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A round number that is not below `value`; of bytes in powers of two.
function ceiling(value, base) {
  if (value <= 0) return 1;
  const power = base === 1024 ? 2 ** (10 * Math.floor(Math.log2(value) / 10)) : 1;
  const ten = 10 ** Math.floor(Math.log10(value / power));
  return [1, 2, 2.5, 5, 10].map((step) => step * ten * power).find((step) => step >= value * 0.999);
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
  // `text` makes text of a value.
  constructor(place, title, text = short, base = 10) {
    Object.assign(this, { title, span: 300, text, base, names: [], points: [], at: null });
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    const heading = document.createElement("h2");
    heading.textContent = title;
    const card = document.createElement("div");
    card.className = "chart";
    card.append(heading, this.legend, this.picture);
    place.append(card);
    this.picture.addEventListener("pointermove", (event) => this.look(event));
    this.picture.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  // Seconds that are shown, names of the lines, and points [time, [value or null of each line]], the oldest first.
  show(span, names, points) {
    Object.assign(this, { span, names, points, at: null });
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
    const width = this.picture.clientWidth;
    if (!width) return; // it is not shown
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const point = this.at ?? this.points.at(-1);
    const told = this.names.map((name, index) => `${name} ${point ? this.text(point[1][index]) : "–"}`);
    this.picture.setAttribute("aria-label", `${this.title}: ${told.join(", ") || "nothing yet"}`);
    this.legend.replaceChildren(...this.names.map((name, index) => {
      const entry = document.createElement("span");
      const key = document.createElement("i");
      key.className = `key ${COLOURS[index]}`;
      const value = document.createElement("b");
      value.textContent = point ? this.text(point[1][index]) : "–";
      entry.append(key, `${name} `, value);
      return entry;
    }), this.when());
    const values = this.points.flatMap((each) => each[1]).filter((value) => value !== null && value !== undefined);
    const top = ceiling(Math.max(0, ...values), this.base);
    const bottom = HEIGHT - BOTTOM;
    const y = (value) => bottom - (value / top) * (bottom - 8);
    const last = this.points.length ? this.points.at(-1)[0] : 0;
    const x = (time) => LEFT + ((time - last + this.span) / this.span) * (width - LEFT);
    const parts = this.axes(width, top, y);
    this.names.forEach((_, index) => {
      let path = "";
      let pen = "M";
      for (const [time, each] of this.points) {
        if (each[index] === null || each[index] === undefined) { pen = "M"; continue; }
        path += `${pen}${x(time).toFixed(1)} ${y(each[index]).toFixed(1)}`;
        pen = "L";
      }
      if (path) parts.push(svg("path", { class: COLOURS[index], d: path }));
    });
    if (this.at) parts.push(svg("line", { class: "mark", x1: x(this.at[0]), x2: x(this.at[0]), y1: 8, y2: bottom }));
    this.picture.replaceChildren(...parts);
  }

  axes(width, top, y) {
    const parts = [];
    const label = (attributes, text) => {
      const made = svg("text", attributes);
      made.textContent = text;
      parts.push(made);
    };
    for (const part of [0, 0.5, 1]) {
      const height = y(top * part);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: height, y2: height }));
      label({ x: LEFT - 6, y: height + 4, "text-anchor": "end" }, this.text(top * part));
    }
    label({ x: LEFT, y: HEIGHT - 5, "text-anchor": "start" }, `${this.span / 60} min ago`);
    label({ x: width, y: HEIGHT - 5, "text-anchor": "end" }, "now");
    return parts;
  }

  when() {
    const found = document.createElement("span");
    found.textContent = this.at ? new Date(this.at[0] * 1000).toLocaleTimeString() : "";
    return found;
  }
}
