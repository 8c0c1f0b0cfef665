// Line charts in plain SVG, without a library. They are redrawn whenever there are new points.

import { colour, element, shape } from "./format.js";

const MARGIN = { right: 14, top: 10, bottom: 22 };
const DIGIT_WIDTH = 6.6;
const MIN_LEFT = 30;
const HEIGHT = 220;
const MAX_POINTS = 600;
const MAX_TICKS = 100;

/** Round numbers that divide a range into about `number` parts. */
export function ticks(low, high, number) {
  const rough = (high - low) / number || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((one) => one >= rough);
  // Multiples instead of repeated addition, which has no effect if the step is below the float resolution.
  const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-6);
  return Array.from({ length: Math.min(last - first + 1, MAX_TICKS) }, (_, index) => (first + index) * step);
}

/** A chart with one line per world rank; `lines` maps ranks to [[x, y], ...]. */
export class Chart {
  constructor(holder, { name, formatX, formatY, fromZero }) {
    Object.assign(this, { holder, formatX, formatY, fromZero });
    this.lines = new Map();
    this.points = [];
    this.gone = new Map();
    this.svg = shape("svg", { role: "img", height: HEIGHT, "aria-label": name });
    this.key = element("p", "", "key");
    holder.replaceChildren(this.svg, this.key);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.updateKey(null));
    new ResizeObserver(() => this.draw()).observe(holder);
  }

  /** Adds points to a line, and drops every second point if there are too many. */
  add(rank, points) {
    let line = [...(this.lines.get(rank) ?? []), ...points.filter(([, y]) => typeof y === "number")];
    if (line.length > MAX_POINTS) line = line.filter((_, index) => index % 2 === 0);
    if (line.length) this.lines.set(rank, line);
  }

  draw() {
    const width = this.holder.clientWidth;
    const all = [...this.lines.values(), this.points].flat();
    this.svg.replaceChildren();
    this.svg.setAttribute("width", width);
    if (!all.length || !width) {
      this.svg.append(shape("text", { x: 8, y: 24, class: "axis" }, "nothing yet"));
      this.key.replaceChildren();
      return;
    }
    this.scale(all, width);
    this.drawAxes(width);
    for (const [rank, line] of this.lines) {
      const path = line.map(([x, y], i) => `${i ? "L" : "M"}${this.atX(x).toFixed(1)} ${this.atY(y).toFixed(1)}`);
      this.svg.append(shape("path", { d: path.join(""), class: `line ${colour(rank)}${this.gone.has(rank) ? " faded" : ""}` }));
      const [x, y] = line.at(-1);
      this.svg.append(shape("circle", { cx: this.atX(x), cy: this.atY(y), r: 2.5, class: `dot ${colour(rank)}` }));
    }
    for (const [x, y] of this.points) {
      this.svg.append(shape("circle", { cx: this.atX(x), cy: this.atY(y), r: 4, class: "validation" }));
    }
    this.cursor = shape("path", { class: "cursor" });
    this.svg.append(this.cursor);
    this.updateKey(null);
  }

  scale(all, width) {
    const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
    const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    [this.lowX, this.highX] = extent(xs);
    let [low, high] = extent(ys);
    if (this.fromZero) low = Math.min(0, low);
    const padding = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    [this.lowY, this.highY] = [this.fromZero ? low : low - padding, high + padding];
    const longest = Math.max(...this.labels().map(([, label]) => label.length));
    // Leave room for the widest label.
    this.left = Math.max(MIN_LEFT, longest * DIGIT_WIDTH + 10);
    const spanX = this.highX - this.lowX || 1, inner = width - this.left - MARGIN.right;
    this.atX = (x) => this.left + ((x - this.lowX) / spanX) * inner;
    const plotHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
    this.atY = (y) => MARGIN.top + (1 - (y - this.lowY) / (this.highY - this.lowY)) * plotHeight;
    this.fromX = (pixels) => this.lowX + ((pixels - this.left) / inner) * spanX;
  }

  /** Ticks and labels of the vertical axis, without common trailing zeros: 3, 4, 5 for 3.000, 4.000, 5.000. */
  labels() {
    const values = ticks(this.lowY, this.highY, 4);
    let labels = values.map((y) => this.formatY(y));
    while (labels.length && labels.every((label) => /\.\d*0$/.test(label))) {
      labels = labels.map((label) => label.replace(/\.?0$/, ""));
    }
    return values.map((y, index) => [y, labels[index]]);
  }

  drawAxes(width) {
    for (const [y, label] of this.labels()) {
      const at = this.atY(y).toFixed(1);
      this.svg.append(shape("path", { d: `M${this.left} ${at}H${width - MARGIN.right}`, class: "grid" }));
      this.svg.append(shape("text", { x: this.left - 6, y: at, class: "axis y" }, label));
    }
    for (const x of ticks(this.lowX, this.highX, Math.max(2, width / 110))) {
      const text = this.formatX(x), half = (text.length * DIGIT_WIDTH) / 2;
      const within = Math.max(half + 2, Math.min(width - half - 2, this.atX(x)));
      this.svg.append(shape("text", { x: within, y: HEIGHT - 6, class: "axis x" }, text));
    }
  }

  point(event) {
    if (!this.lines.size || !this.fromX) return;
    this.updateKey(this.fromX(event.clientX - this.svg.getBoundingClientRect().left));
  }

  /** Updates the key. It shows values only at the pointer, since the table has the newest ones. */
  updateKey(x) {
    const entries = [...this.lines].sort(([a], [b]) => a - b).map(([rank, line]) => {
      const text = x === null ? this.gone.get(rank) : this.formatY(nearest(line, x)[1]);
      const entry = element("span", text ? `peer ${rank}: ${text}` : `peer ${rank}`, this.gone.has(rank) ? "gone" : "");
      entry.prepend(element("i", "", colour(rank)));
      return entry;
    });
    if (this.points.length) {
      const value = x === null ? "" : `: ${this.formatY(nearest(this.points, x)[1])}`;
      const entry = element("span", `validation${value}`);
      entry.prepend(element("i", "", "ring"));
      entries.push(entry);
    }
    if (x !== null) entries.unshift(element("span", `at ${this.formatX(x)}`));
    this.key.replaceChildren(...entries);
    const at = x === null ? "" : `M${this.atX(x)} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}`;
    this.cursor?.setAttribute("d", at);
  }
}

function nearest(line, x) {
  return line.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
}
