// The page: what the server sends, shown.

import { Chart } from "./charts.js";
import { clock, colour, decimals, element, figure, shownRank, size, span } from "./format.js";
import { drawKey, drawRounds } from "./rounds.js";

const GONE = new Set(["lost", "silent"]);
const COLUMNS = [
  ["rank", (peer) => shownRank(peer.world_rank), "number"],
  ["state", (peer) => peer.state, "state"],
  ["epoch", (peer) => String(peer.epoch), "number"],
  ["step", (peer) => String(peer.step), "number"],
  ["loss", (peer) => decimals(peer.loss, 3), "number"],
  ["tokens/s", (peer) => figure(peer.tokens_per_s), "number"],
  ["up", (peer) => size(peer.upload_bytes_per_s) + (peer.upload_bytes_per_s ? "/s" : ""), "number"],
  ["down", (peer) => size(peer.download_bytes_per_s) + (peer.download_bytes_per_s ? "/s" : ""), "number"],
  ["path", (peer) => peer.path || "–", ""],
  ["on", (peer) => peer.hardware || "–", ""],
  ["anchor", (peer) => peer.anchor_digest.slice(0, 12) || "–", "mono"],
  ["seen", (peer) => span(peer.last_seen_s) + " ago", "number"],
  ["peer", (peer) => "…" + peer.peer_id.slice(-6), "mono"],
];

const at = (id) => document.getElementById(id);
const loss = new Chart(at("loss"), { formatX: figure, formatY: (y) => decimals(y, 3), fromZero: false });
const speed = new Chart(at("speed"), { formatX: clock, formatY: figure, fromZero: true });
let rounds = [];

function showSwarm(swarm) {
  const there = swarm.peers.filter((peer) => !GONE.has(peer.state));
  document.title = `diloco ${swarm.run_id}: epoch ${swarm.epoch}, ${there.length} peers`;
  at("run").textContent = swarm.run_id;
  const totals = [["epoch", swarm.epoch], ["peers", there.length], ["tokens/s", figure(swarm.tokens_per_s)]];
  if (there.length < swarm.peers.length) totals.push(["gone", swarm.peers.length - there.length]);
  at("totals").replaceChildren(...totals.map(([name, value]) => {
    const box = element("div", "", name === "gone" ? "fault" : "");
    box.append(element("dt", name), element("dd", String(value)));
    return box;
  }));
  at("peers").tBodies[0].replaceChildren(...swarm.peers.map(rowOf));
  at("stragglers").replaceChildren(...swarm.stragglers.map((one) =>
    element("li", `Peer ${one.leader} waits for peer ${one.world_rank}: ${one.reason}.`)));
  at("events").replaceChildren(...[...swarm.events].reverse().map(eventOf));
}

function rowOf(peer) {
  const row = element("tr", "", GONE.has(peer.state) ? "gone" : "");
  row.dataset.rank = peer.world_rank;
  for (const [name, cellOf, className] of COLUMNS) {
    const cell = element("td", cellOf(peer), className);
    cell.dataset.label = name;
    if (name === "rank") cell.prepend(element("i", "", colour(peer.world_rank)));
    if (name === "state") cell.dataset.state = peer.state;
    if (name === "state" && peer.waits_for) cell.title = `waits for ${peer.waits_for}`;
    row.append(cell);
  }
  return row;
}

function eventOf(event) {
  const isFault = /lost|fail|ended|differ|answer/.test(event.what);
  const item = element("li", "", isFault ? "fault" : "");
  const said = event.said_by === null ? "" : " says:";
  item.append(element("time", clock(event.time)), ` peer ${shownRank(event.world_rank)}${said} ${event.what}`);
  return item;
}

function addPoints(curves) {
  for (const [rank, points] of Object.entries(curves)) {
    loss.add(Number(rank), points.map(([, step, value]) => [step, value]));
    speed.add(Number(rank), points.map(([time, , , rate]) => [time, rate]));
  }
  loss.draw();
  speed.draw();
}

function follow() {
  const source = new EventSource("/events");
  const say = (text, isLive) => {
    at("link").textContent = text;
    at("link").dataset.live = isLive;
  };
  // The server tells everything anew on a new connection.
  source.addEventListener("open", () => {
    loss.lines.clear();
    speed.lines.clear();
    say("live", true);
  });
  source.addEventListener("error", () => say("not connected; trying again", false));
  source.addEventListener("swarm", (event) => showSwarm(JSON.parse(event.data)));
  source.addEventListener("curves", (event) => addPoints(JSON.parse(event.data)));
  source.addEventListener("rounds", (event) => {
    rounds = JSON.parse(event.data);
    drawRounds(at("rounds"), rounds);
  });
}

const head = element("tr");
head.append(...COLUMNS.map(([name, , className]) => element("th", name, className === "number" ? "number" : "")));
at("peers").tHead.replaceChildren(head);
drawKey(at("rounds-key"));
new ResizeObserver(() => drawRounds(at("rounds"), rounds)).observe(at("rounds"));
loss.draw();
speed.draw();
follow();
