// Draws the links between peers, by the kind of path, and the bandwidth of each peer.

import { colour, element, shape, shownRank, size } from "./format.js";

const HEIGHT = 260, MAX_PEERS = 24;
const NAMES = { direct: "direct", plain: "direct, not encrypted", libp2p: "through libp2p", relay: "through a third peer" };

export function drawLinks(holder, peers) {
  const shown = peers.filter((peer) => peer.world_rank >= 0 && !["lost", "silent"].includes(peer.state)).slice(0, MAX_PEERS);
  const width = holder.clientWidth;
  if (shown.length < 2 || !width) {
    holder.replaceChildren(element("p", "no links yet", "quiet"));
    return;
  }
  const places = placesOf(shown, width);
  const svg = shape("svg", { role: "img", width, height: HEIGHT, "aria-label": labelOf(shown) });
  const kinds = new Set();
  for (const peer of shown) {
    for (const [other, path] of Object.entries(peer.paths)) {
      const [from, to] = [places.get(peer.world_rank), places.get(Number(other))];
      // Draw each pair once, as the lower rank reports it.
      if (!to || Number(other) < peer.world_rank) continue;
      kinds.add(path);
      const line = shape("path", { d: `M${from.x} ${from.y}L${to.x} ${to.y}`, class: `link ${kindOf(path)}` });
      line.append(shape("title", {}, `peers ${peer.world_rank} and ${other}: ${NAMES[path] ?? path}`));
      svg.append(line);
    }
  }
  for (const peer of shown) svg.append(...nodeOf(peer, places.get(peer.world_rank), width));
  const key = element("p", "", "key");
  key.append(...[...kinds].sort().map((path) => {
    const entry = element("span", NAMES[path] ?? path);
    const mark = shape("svg", { width: 24, height: 8, "aria-hidden": "true" });
    mark.append(shape("path", { d: "M0 4H24", class: `link ${kindOf(path)}` }));
    entry.prepend(mark);
    return entry;
  }));
  holder.replaceChildren(svg, key);
}

const kindOf = (path) => (path in NAMES ? path : "libp2p");
const bandwidthOf = (peer) => peer.link_bytes_per_s || Math.max(peer.upload_bytes_per_s ?? 0, peer.download_bytes_per_s ?? 0);
const speedOf = (peer) => (bandwidthOf(peer) ? `${size(bandwidthOf(peer))}/s` : "not measured");

function placesOf(peers, width) {
  const [centre, radius] = [width / 2, Math.max(40, Math.min(width / 2 - 86, 230))];
  return new Map(peers.map((peer, index) => {
    const angle = (2 * Math.PI * index) / peers.length - Math.PI / 2;
    return [peer.world_rank, { x: centre + radius * Math.cos(angle), y: HEIGHT / 2 + (HEIGHT / 2 - 34) * Math.sin(angle), angle }];
  }));
}

function nodeOf(peer, { x, y, angle }, width) {
  const side = Math.cos(angle);
  const anchor = side > 0.3 ? "start" : side < -0.3 ? "end" : "middle";
  const text = shape("text", {
    x: Math.max(4, Math.min(width - 4, x + (anchor === "middle" ? 0 : 16 * Math.sign(side)))),
    y: anchor === "middle" ? y + (Math.sin(angle) < 0 ? -17 : 25) : y + 4,
    class: "node-label", "text-anchor": anchor,
  }, speedOf(peer));
  return [
    shape("circle", { cx: x, cy: y, r: 11, class: `node ${colour(peer.world_rank)}` }),
    shape("text", { x, y: y + 4, class: "node-rank" }, shownRank(peer.world_rank)),
    text,
  ];
}

const labelOf = (peers) =>
  `links between ${peers.length} peers: ${peers.map((peer) => `peer ${peer.world_rank} ${speedOf(peer)}`).join(", ")}`;
