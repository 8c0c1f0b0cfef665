// Formats figures and creates elements. Text from peers is only ever set as textContent, never as HTML.

const FACTORS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A number to three digits: 950, 12.3k, 4.5M; a dash if unknown. */
export function figure(value) {
  if (typeof value !== "number") return "–";
  for (const [factor, letter] of FACTORS) {
    if (Math.abs(value) >= factor) return Number((value / factor).toPrecision(3)) + letter;
  }
  return String(Number(value.toPrecision(3)));
}

/** Bytes in decimal units. */
export const size = (value) => (typeof value === "number" && value > 0 ? figure(value) + "B" : "–");

export const decimals = (value, digits) => (typeof value === "number" ? value.toFixed(digits) : "–");

/** A span of time: 4 s, 12 min, 3.1 h, 2.5 days. */
export function span(seconds) {
  if (seconds < 100) return seconds.toFixed(0) + " s";
  if (seconds < 5400) return (seconds / 60).toFixed(0) + " min";
  return seconds < 172800 ? (seconds / 3600).toFixed(1) + " h" : (seconds / 86400).toFixed(1) + " days";
}

/** A measured duration, with fractions of seconds if short: 0.35 s, 4.2 s. */
export const duration = (seconds) => (seconds < 10 ? Number(seconds.toPrecision(2)) + " s" : span(seconds));

export const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour12: false });

/** An HTML element with this text. */
export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** An SVG element with these attributes. */
export function shape(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

/** A world rank as text; -1 means that the peer has none yet. */
export const shownRank = (rank) => rank < 0 ? "–" : String(rank);

/** The CSS classes with the colour of a world rank, and with dashes that distinguish ranks of the same colour. */
export const colour = (rank) => `rank c${rank % 8} d${Math.floor(rank / 8) % 3}`;
