// The table of peers, with those that have problems first.

import { colour, decimals, element, figure, shape, shownRank, size, span } from "./format.js";

export const GONE = new Set(["lost", "silent"]);
const SPARK = { width: 72, height: 18, points: 40 };
const rate = (bytes) => (bytes ? `${size(bytes)}/s` : "–");

// [name, function that makes the cell, class]; style.css hides some columns on narrow screens.
const COLUMNS = [
  ["peer", nameOf, "name"],
  ["doing", doingOf, "state"],
  ["step", (peer) => String(peer.step), "number"],
  ["loss", (peer, lines) => withSpark(decimals(peer.loss, 3), lines.loss), "number spark"],
  ["tokens/s", (peer, lines) => withSpark(figure(peer.tokens_per_s), lines.speed), "number spark"],
  ["up", (peer) => rate(peer.upload_bytes_per_s), "number"],
  ["down", (peer) => rate(peer.download_bytes_per_s), "number"],
  ["path", (peer) => peer.path || "–", ""],
  ["hardware", (peer) => peer.hardware || "–", ""],
  ["weights", (peer) => peer.anchor_digest.slice(0, 8) || "–", "mono"],
  ["seen", (peer) => span(peer.last_seen_s) + " ago", "number"],
];
const rows = new Map();

export function drawHead(table) {
  const head = element("tr");
  head.append(...COLUMNS.map(([name, , className]) => {
    const cell = element("th", name, className.includes("number") ? "number" : "");
    cell.scope = "col";
    return cell;
  }));
  table.tHead.replaceChildren(head);
}

/** The severity of a peer's problems, for sorting: higher is worse. */
export function troubleOf(peer) {
  if (GONE.has(peer.state)) return 4;
  if (peer.troubles.length) return 3;
  if (peer.is_still) return 2;
  return peer.state === "training" || peer.state === "averaging" ? 0 : 1;
}

/** `losses` and `speeds` are lines by world rank, as the charts have them. */
export function drawPeers(table, peers, losses, speeds) {
  const sorted = [...peers].sort((a, b) => troubleOf(b) - troubleOf(a) || a.world_rank - b.world_rank);
  const shown = new Set(peers.map((peer) => peer.peer_id));
  for (const id of rows.keys()) if (!shown.has(id)) rows.delete(id);
  const drawn = sorted.map((peer) =>
    rowOf(peer, { loss: losses.get(peer.world_rank) ?? [], speed: speeds.get(peer.world_rank) ?? [] }));
  const body = table.tBodies[0];
  // Replace rows only if their order changes, so that a focused element keeps the focus.
  const isMoved = drawn.length !== body.rows.length || drawn.some((row, index) => body.rows[index] !== row);
  if (isMoved) body.replaceChildren(...drawn);
}

function rowOf(peer, lines) {
  const row = rows.get(peer.peer_id) ?? element("tr");
  rows.set(peer.peer_id, row);
  row.className = GONE.has(peer.state) ? "gone" : "";
  row.dataset.rank = peer.world_rank;
  for (const [index, [name, cellOf, className]] of COLUMNS.entries()) {
    const cell = row.cells[index] ?? row.insertCell();
    cell.className = className;
    cell.dataset.label = name;
    // Keep the cell with the name, since replacing its button would lose the focus.
    if (name === "peer" && cell.dataset.id === `${peer.world_rank} ${peer.peer_id}`) continue;
    if (name === "peer") cell.dataset.id = `${peer.world_rank} ${peer.peer_id}`;
    if (name === "doing") cell.dataset.state = peer.is_still ? "still" : peer.troubles.length ? "trouble" : peer.state;
    const content = cellOf(peer, lines);
    cell.replaceChildren(...[content].flat());
  }
  return row;
}

function nameOf(peer) {
  const button = element("button", "…" + peer.peer_id.slice(-6), "mono");
  button.type = "button";
  button.title = `${peer.peer_id} (click to copy)`;
  button.setAttribute("aria-label", `${button.textContent}: copy the id of peer ${shownRank(peer.world_rank)}`);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(peer.peer_id);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "…" + peer.peer_id.slice(-6); }, 1000);
  });
  return [element("i", "", colour(peer.world_rank)), element("strong", shownRank(peer.world_rank)), button];
}

function doingOf(peer) {
  const text = GONE.has(peer.state) || !peer.phase ? peer.state : peer.phase.short;
  const parts = [element("span", peer.is_still ? `${text}, stands still` : text)];
  const detail = peer.troubles[0] ?? (GONE.has(peer.state) || !peer.phase ? "" : detailsOf(peer.phase));
  if (detail) parts.push(element("small", detail));
  return parts;
}

/** The details of a phase, without its name. */
function detailsOf(phase) {
  const rest = phase.text.slice(phase.name.length).replace(/^[:,] /, "");
  return phase.name === "training" ? "" : rest;
}

function withSpark(text, line) {
  const points = line.slice(-SPARK.points);
  if (points.length < 2) return [text];
  const ys = points.map(([, y]) => y);
  const low = Math.min(...ys), high = Math.max(...ys), height = SPARK.height - 4;
  const at = (y, index) =>
    `${((index / (points.length - 1)) * SPARK.width).toFixed(1)} ${(2 + (1 - (y - low) / (high - low || 1)) * height).toFixed(1)}`;
  const svg = shape("svg", { width: SPARK.width, height: SPARK.height, class: "sparkline", "aria-hidden": "true" });
  svg.append(shape("path", { d: `M${ys.map(at).join("L")}` }));
  return [svg, text];
}
