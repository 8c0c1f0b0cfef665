// Draws the last rounds as bars: the parts of each peer's time from its readiness to its commit.

import { duration, element, shape } from "./format.js";
import { ticks } from "./charts.js";

// The parts in their order. The time of a round before its last attempt counts as failed attempts.
const PARTS = [
  ["wait_s", "gather"],
  ["failed_s", "failed attempts"],
  ["connect_s", "connect"],
  ["reduce_s", "reduce"],
  ["preview_s", "digest"],
  ["vote_s", "vote"],
  ["apply_s", "apply"],
];
const MAX_ROUNDS = 6;
const MAX_PEERS = 16;
const BAR = 12, ROW = 16, LEFT = 34, RIGHT = 58, AXIS = 20, GAP = 6;
const NOTICEABLE_S = 0.05;
/** Bars longer than this multiple of the median round are cut off. */
const CLIPPED_AT = 3;

export function drawKey(holder) {
  holder.replaceChildren(...PARTS.map(([part, name]) => {
    const entry = element("span", name);
    entry.prepend(element("i", "", `part ${part}`));
    return entry;
  }));
}

/** A peer's bar: start time, length, and seconds of each part, from its readiness to its commit. */
export function barOf(peer) {
  const ofAttempt = PARTS.slice(2).reduce((sum, [part]) => sum + (peer[part] ?? 0), 0);
  const failed = Math.max(0, (peer.round_s ?? 0) - ofAttempt);
  const parts = { ...peer, failed_s: failed > NOTICEABLE_S ? failed : 0 };
  const length = PARTS.reduce((sum, [part]) => sum + (parts[part] ?? 0), 0);
  return { rank: peer.world_rank, start: peer.time - length, length, parts };
}

/** Seconds from the first peer's readiness to the last commit. */
export function longestOf(round) {
  const bars = round.peers.map(barOf);
  const start = Math.min(...bars.map((bar) => bar.start));
  return Math.max(...bars.map((bar) => bar.start - start + bar.length));
}

/** The length of the axis: that of the longest round, but at most CLIPPED_AT times the median. */
export function axisOf(lengths) {
  const sorted = [...lengths].sort((a, b) => a - b);
  const median = sorted[Math.floor((sorted.length - 1) / 2)];
  return Math.max(0.01, Math.min(sorted.at(-1), CLIPPED_AT * median));
}

/** Draws the rounds, and returns a description of the axis. */
export function drawRounds(holder, rounds) {
  const shown = rounds.slice(-MAX_ROUNDS).reverse();
  const width = holder.clientWidth;
  if (!shown.length || !width) {
    holder.replaceChildren(element("p", "no round has ended yet", "quiet"));
    return "";
  }
  const drawn = shown.map((round) => {
    const bars = round.peers.slice(0, MAX_PEERS).map(barOf);
    return { round, bars, start: Math.min(...bars.map((bar) => bar.start)), length: longestOf(round) };
  });
  const longest = axisOf(drawn.map((one) => one.length));
  const scale = (width - LEFT - RIGHT) / longest;
  holder.replaceChildren(...drawn.map((one) => roundOf(one, scale, longest, width)), axis(scale, longest, width));
  const isCut = drawn.some((one) => one.length > longest * 1.001);
  return `seconds since the first peer was ready${isCut ? `; bars longer than ${duration(longest)} are cut off` : ""}`;
}

/** The common axis of all rounds, below them. */
function axis(scale, longest, width) {
  const svg = shape("svg", { role: "img", width, height: AXIS, "aria-label": "seconds" });
  for (const at of ticks(0, longest, Math.max(3, width / 140))) {
    svg.append(shape("text", { x: LEFT + at * scale, y: AXIS - 6, class: "axis x" }, `${Number(at.toPrecision(3))} s`));
  }
  return svg;
}

function roundOf({ round, bars, start, length }, scale, longest, width) {
  const box = element("div", "", "round");
  const missing = round.peers.length - bars.length;
  const heading = element("h3", `epoch ${round.epoch} `);
  heading.append(element("small", `${round.contributors.length} peer${round.contributors.length === 1 ? "" : "s"}, ${duration(length)}` +
    (missing > 0 ? `, ${missing} more` : "")));
  if (round.num_failures) heading.append(element("strong", failuresOf(round), "fault"));
  if (!round.agrees) heading.append(element("strong", "anchors differ", "fault"));
  const height = bars.length * ROW + GAP;
  const svg = shape("svg", { role: "img", width, height, "aria-label": `the parts of epoch ${round.epoch}` });
  bars.forEach((bar, index) => drawBar(svg, bar, bar.start - start, index * ROW, scale, longest));
  box.append(heading, svg);
  return box;
}

function drawBar(svg, bar, from, top, scale, longest) {
  svg.append(shape("text", { x: LEFT - 6, y: top + BAR / 2 + 1, class: "axis y" }, String(bar.rank)));
  let at = from;
  for (const [part, name] of PARTS) {
    const seconds = bar.parts[part] ?? 0;
    if (seconds <= 0) continue;
    const shown = Math.min(at + seconds, longest) - Math.min(at, longest);
    if (shown > 0) {
      const barWidth = Math.max(shown * scale, 0.75);
      const rect = shape("rect", { x: LEFT + at * scale, y: top, width: barWidth, height: BAR, class: `part ${part}` });
      rect.append(shape("title", {}, `peer ${bar.rank}, ${name}: ${seconds.toFixed(3)} s`));
      svg.append(rect);
    }
    at += seconds;
  }
  if (at > longest * 1.001) {
    const end = LEFT + longest * scale;
    svg.append(shape("path", { d: `M${end - 8} ${top - 1}l5 ${BAR + 2}h5l-5 -${BAR + 2}z`, class: "cut" }));
    svg.append(shape("text", { x: end + 6, y: top + BAR / 2 + 1, class: "axis beyond" }, duration(at)));
  }
}

function failuresOf(round) {
  const number = `${round.num_failures} failed attempt${round.num_failures === 1 ? "" : "s"}`;
  return round.failures.length ? `${number}: ${round.failures.join("; ")}` : number;
}
