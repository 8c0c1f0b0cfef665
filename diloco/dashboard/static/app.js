// The page: receives the server's events and updates the views.

import { Chart } from "./charts.js";
import { clock, decimals, duration, element, figure, shownRank, size, span } from "./format.js";
import { drawLinks } from "./links.js";
import { GONE, drawHead, drawPeers } from "./peers.js";
import { drawKey, drawRounds, longestOf } from "./rounds.js";

const SAME_EVENT_S = 5;
const at = (id) => document.getElementById(id);
const loss = new Chart(at("loss"), { name: "loss by step", formatX: figure, formatY: (y) => decimals(y, 3), fromZero: false });
const speed = new Chart(at("speed"), { name: "tokens per second by time", formatX: clock, formatY: figure, fromZero: true });
let rounds = [];

function showSwarm(swarm) {
  const present = swarm.peers.filter((peer) => !GONE.has(peer.state));
  document.title = `${swarm.verdict.level === "fault" ? "(!) " : ""}${swarm.run_id}: epoch ${swarm.epoch}`;
  at("run").textContent = `run ${swarm.run_id}`;
  showVerdict(swarm.verdict);
  at("totals").replaceChildren(...tiles(swarm, present).map(tileOf));
  const gone = new Map(swarm.peers.filter((peer) => GONE.has(peer.state)).map((peer) => [peer.world_rank, peer.state]));
  for (const chart of [loss, speed]) chart.gone = gone;
  loss.points = swarm.evaluations.map(({ step, loss: value }) => [step, value]);
  drawPeers(at("peers"), swarm.peers, loss.lines, speed.lines);
  drawLinks(at("links"), swarm.peers);
  at("stragglers").replaceChildren(...swarm.stragglers.map((one) =>
    element("li", `Peer ${one.leader} waits for peer ${one.world_rank}: ${one.reason}.`)));
  at("events").replaceChildren(...grouped(swarm.events).reverse().map(eventOf));
  loss.draw();
  speed.draw();
}

function showVerdict(verdict) {
  const box = at("verdict");
  // Update only if changed: a screen reader would otherwise repeat it every second.
  const [text, more] = [box.querySelector("p"), box.querySelector("ul")];
  const capital = verdict.text[0].toUpperCase() + verdict.text.slice(1);
  if (text.textContent !== capital) text.replaceChildren(...worded(capital));
  box.dataset.level = verdict.level;
  const shown = [...more.children].map((item) => item.textContent).join("\n");
  if (shown !== verdict.more.join("\n")) more.replaceChildren(...verdict.more.map((one) => {
    const item = element("li", "");
    item.append(...worded(one));
    return item;
  }));
}

/** Splits a text into parts so that CSS can prevent line breaks within flags. */
function worded(text) {
  return text.split(/(--[a-z][\w.-]*)/).map((part, index) => (index % 2 ? element("span", part, "flag") : part));
}

/** The main figures as [name, figure, details, fraction done]. */
function tiles(swarm, present) {
  const { step, end_step: end, left_s: left } = swarm.progress;
  const losses = present.map((peer) => peer.loss).filter((value) => typeof value === "number").sort((a, b) => a - b);
  const evaluation = swarm.evaluations.at(-1);
  const sent = swarm.peers.reduce((sum, peer) => sum + (peer.sent_bytes ?? 0), 0);
  const last = rounds.at(-1);
  const gone = swarm.peers.length - present.length;
  const rest = typeof left === "number" ? `${span(left)} left` : "";
  return [
    ["progress", end ? `${Math.floor((100 * Math.min(step, end)) / end)} %` : `step ${step}`,
      end ? `step ${step} of ${end}${rest ? `, ${rest}` : ""}` : rest, end ? Math.min(1, step / end) : null],
    ["training loss", decimals(losses[Math.floor(losses.length / 2)], 3), losses.length > 1 ? "nats per token, median of the peers" : "nats per token"],
    ["validation loss", decimals(evaluation?.loss, 3), evaluation ? `nats per token, at step ${evaluation.step}` : "not evaluated yet"],
    ["tokens/s", figure(swarm.tokens_per_s), `${present.length} peer${present.length === 1 ? "" : "s"}${gone ? `, ${gone} gone` : ""}`],
    ["sent", size(sent), last ? `${size(last.peers.reduce((sum, peer) => sum + peer.sent_bytes, 0))} in the last round` : ""],
    ["epoch", String(swarm.epoch), last ? `last round ${duration(longestOf(last))}` : ""],
  ];
}

function tileOf([name, value, more, share]) {
  const box = element("div");
  box.append(element("dt", name), element("dd", value), element("dd", more || "\u00a0", "more"));
  if (typeof share === "number") {
    const bar = document.createElement("progress");
    bar.value = share;
    bar.setAttribute("aria-label", "fraction of the steps that are done");
    box.lastChild.append(bar);
  }
  return box;
}

/** Merges equal events that several peers reported at about the same time. */
function grouped(events) {
  const found = [];
  for (const event of events) {
    const same = found.find((one) =>
      one.what === event.what && event.said_by !== null && one.said_by !== null && event.time - one.time < SAME_EVENT_S);
    if (same) same.ranks.push(event.world_rank);
    else found.push({ ...event, ranks: [event.world_rank] });
  }
  return found;
}

function eventOf(event) {
  const isFault = /lost|fail|ended|differ|answer|cannot|not a number/.test(event.what);
  const item = element("li", "", isFault ? "fault" : "");
  const ranks = [...new Set(event.ranks)].sort((a, b) => a - b).map(shownRank);
  const several = ranks.length > 1;
  const names = several ? `Peers ${ranks.slice(0, -1).join(", ")} and ${ranks.at(-1)}` : `Peer ${ranks[0]}`;
  const verb = event.said_by === null ? "" : several ? " say:" : " says:";
  item.append(element("time", clock(event.time)), ` ${names}${verb} ${event.what}`);
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

function showRounds() {
  at("rounds-scale").textContent = drawRounds(at("rounds"), rounds);
}

function follow() {
  const source = new EventSource("/events");
  const showConnection = (text, isLive) => {
    if (at("link").textContent !== text) at("link").textContent = text;
    at("link").dataset.live = isLive;
  };
  // The server sends all points again on a new connection.
  source.addEventListener("open", () => {
    loss.lines.clear();
    speed.lines.clear();
    showConnection("live", true);
  });
  source.addEventListener("error", () => showConnection("not connected; reconnecting", false));
  source.addEventListener("swarm", (event) => showSwarm(JSON.parse(event.data)));
  source.addEventListener("curves", (event) => addPoints(JSON.parse(event.data)));
  source.addEventListener("rounds", (event) => {
    rounds = JSON.parse(event.data);
    showRounds();
  });
}

drawHead(at("peers"));
drawKey(at("rounds-key"));
new ResizeObserver(showRounds).observe(at("rounds"));
loss.draw();
speed.draw();
follow();
