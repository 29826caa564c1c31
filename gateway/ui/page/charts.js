// The dashboard's charts, drawn by hand. Each says in its label what it shows; the numbers stand beside it as text.

import { h, s } from "./dom.js";

const HEIGHT = 116;
const TOP = 14;
const BOTTOM = 18;

/**
 * Lines over the last `points` looks, the newest at the right: `series` of `{name, colour, values}`. `ceiling` is the top
 * of the scale where it is not to follow the values.
 */
export function lines(series, { width, points, label, format, ceiling = null }) {
  const most = ceiling ?? nice(Math.max(0, ...series.flatMap(({ values }) => values.filter((value) => value !== null))));
  const x = (index, count) => width - 8 - ((count - 1 - index) / (points - 1)) * (width - 8);
  const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
  const picture = frame(width, label);
  for (const level of [0, most / 2, most]) {
    picture.append(s("line", { class: "grid", x1: 0, x2: width, y1: y(level), y2: y(level) }));
  }
  picture.append(
    s("text", { class: "scale", x: 0, y: y(most) - 3 }, format(most)),
    s("text", { class: "scale", x: 0, y: HEIGHT - 4 }, `${points - 1} s ago`),
    s("text", { class: "scale", x: width - 8, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
  );
  for (const { values, colour } of series) {
    const spots = values.map((value, index) => (value === null ? null : [x(index, values.length), y(Math.min(value, most))]));
    const path = spots.map((spot, index) => (spot ? `${spots[index - 1] ? "L" : "M"}${spot[0]} ${spot[1]}` : "")).join("");
    picture.append(s("path", { class: `line ${colour}`, d: path }));
    const last = spots.at(-1);
    if (last) picture.append(s("circle", { class: `spot ${colour}`, cx: last[0], cy: last[1], r: 3.5 }));
  }
  return picture;
}

/** Bars, the count over each: `[{label, count}]`. */
export function columns(bars, { width, label, colour }) {
  const most = Math.max(1, ...bars.map(({ count }) => count));
  const step = width / bars.length;
  const picture = frame(width, label);
  const floor = HEIGHT - BOTTOM;
  picture.append(s("line", { class: "grid", x1: 0, x2: width, y1: floor, y2: floor }));
  bars.forEach(({ label: name, count }, index) => {
    const middle = (index + 0.5) * step;
    const high = (count / most) * (floor - TOP - 4);
    if (count > 0) {
      const wide = Math.min(step - 6, 48);
      picture.append(
        s("rect", { class: `column ${colour}`, x: middle - wide / 2, y: floor - high, width: wide, height: high, rx: 2 }),
        s("text", { class: "scale strong", x: middle, y: floor - high - 4, "text-anchor": "middle" }, String(count)),
      );
    }
    picture.append(s("text", { class: "scale", x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, name));
  });
  return picture;
}

/** One bar of shares, and what they are: `[{name, count, colour}]`. */
export function shares(parts, { width, label }) {
  const all = parts.reduce((total, { count }) => total + count, 0);
  const bar = s("svg", { class: "chart", viewBox: `0 0 ${width} 14`, width, height: 14, role: "img", "aria-label": label });
  bar.append(s("rect", { class: "empty", x: 0, y: 0, width, height: 14, rx: 4 }));
  let from = 0;
  for (const { count, colour } of parts) {
    const wide = all > 0 ? (count / all) * width : 0;
    if (wide > 0) bar.append(s("rect", { class: `column ${colour}`, x: from, y: 0, width: Math.max(wide - 2, 1), height: 14, rx: 3 }));
    from += wide;
  }
  return [bar, legend(parts.map(({ name, colour, count }) => ({ name, colour, value: String(count) })))];
}

/** Names with their colours, and their values now. */
export function legend(entries) {
  return h(
    "ul",
    { class: "legend" },
    entries.map(({ name, colour, value }) =>
      h("li", {}, h("span", { class: `swatch ${colour}` }), `${name} `, h("strong", {}, value)),
    ),
  );
}

function frame(width, label) {
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": label });
}

/** The next round number, so that a scale does not tremble. */
function nice(value) {
  if (value <= 0) return 1;
  const magnitude = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * magnitude).find((step) => step >= value * 1.05) ?? 20 * magnitude;
}
