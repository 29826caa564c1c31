// Draws answers as strands over their tokens: one cable as long as they agree, parting where they do not.

import { s } from "./dom.js";

const SPACING = 5;
const GAP = 16;
const TOP = 26;
const BOTTOM = 24;
const LEFT = 6;
const RIGHT = 52;
const BEND = 22;

/** The picture of `groups` (see compare.js) of `answers`, `width` pixels wide, for answers of up to `most` tokens. */
export function draw(groups, answers, { width, most, first, unit, label }) {
  const strands = groups.reduce((sum, group) => sum + group.members.length, 0);
  const height = TOP + Math.max(strands * SPACING + (groups.length - 1) * GAP, 40) + BOTTOM;
  const picture = s("svg", { class: "branches", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  const x = (position) => LEFT + (position / most) * (width - LEFT - RIGHT);
  picture.append(axis(x, most, height, unit));
  if (first !== null) picture.append(divide(x(first), `differs at ${unit} ${first + 1}`, width, height));
  if (groups.length === 0) return picture;

  const root = grow(groups.map((group, index) => ({ ...group, index })), 0);
  const rows = leafRows(leaves(root), height);
  const lines = s("g", {});
  const heads = s("g", {});
  trace(root, null, null);
  picture.append(lines, heads);
  groups.forEach((group, index) => {
    const { middle } = rows[index];
    const text = s("text", { class: `leaf g${index % 8}`, x: width - RIGHT + 10, y: middle + 5 }, `${group.members.length}×`);
    picture.append(text);
  });
  return picture;

  /** Draws a node's strands from where its parent left them. */
  function trace(node, parent, parentY) {
    const members = node.groups.flatMap((group) => group.members.map((member) => ({ member, row: rows[group.index] })));
    members.sort((a, b) => a.row.at(a.member) - b.row.at(b.member));
    const middle = members.reduce((sum, { member, row }) => sum + row.at(member), 0) / members.length;
    const top = middle - ((members.length - 1) / 2) * SPACING;
    const spots = new Map(members.map(({ member }, rank) => [member, top + rank * SPACING]));
    const colour = parent === null && node.children.length > 0 ? "trunk" : `g${node.groups[0].index % 8}`;
    for (const { member } of members) {
      const length = answers[member].tokens.length;
      if (length < node.from) continue;
      const end = Math.min(length, node.to);
      const y = spots.get(member);
      let path = `M${x(node.from)} ${y}`;
      let start = x(node.from);
      if (parent !== null) {
        const from = parentY.get(member);
        start = Math.min(x(node.from) + BEND, Math.max(x(end), x(node.from) + 6));
        const half = (x(node.from) + start) / 2;
        path = `M${x(node.from)} ${from}C${half} ${from} ${half} ${y} ${start} ${y}`;
      }
      path += `H${Math.max(x(end), start)}`;
      lines.append(s("path", { class: `strand ${colour}`, d: path }));
      if (answers[member].state === "streaming" && length <= node.to && (length < node.to || node.children.length === 0)) {
        heads.append(s("circle", { class: `head ${colour}`, cx: Math.max(x(end), start), cy: y, r: 3 }));
      }
    }
    for (const child of node.children) trace(child, node, spots);
  }
}

/** The groups in the tree's own order, in which no strands cross. */
function leaves(node) {
  return node.children.length > 0 ? node.children.flatMap(leaves) : node.groups;
}

/** Where each group's strands end up, from the top: by the group's index. */
function leafRows(groups, height) {
  const total = groups.reduce((sum, group) => sum + group.members.length * SPACING, 0) + (groups.length - 1) * GAP;
  let y = TOP + (height - TOP - BOTTOM - total) / 2;
  const rows = [];
  for (const { index, members } of groups) {
    const top = y + SPACING / 2;
    y += members.length * SPACING + GAP;
    rows[index] = {
      middle: top + ((members.length - 1) * SPACING) / 2,
      at: (member) => top + members.indexOf(member) * SPACING,
    };
  }
  return rows;
}

/** The tree of groups that agree from token `from` on until they part. */
function grow(groups, from) {
  const shortest = Math.min(...groups.map((group) => group.tokens.length));
  let to = from;
  while (to < shortest && groups.every((group) => group.tokens[to].id === groups[0].tokens[to].id)) to += 1;
  if (groups.length === 1) return { groups, from, to, children: [] };
  const parts = new Map();
  for (const group of groups) {
    const next = group.tokens[to]?.id ?? null;
    parts.set(next, [...(parts.get(next) ?? []), group]);
  }
  return { groups, from, to, children: [...parts.values()].map((part) => grow(part, to)) };
}

function axis(x, most, height, unit) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(most / 6)));
  const ticks = s("g", { class: "axis" });
  for (let position = step; position <= most; position += step) {
    ticks.append(s("line", { x1: x(position), x2: x(position), y1: TOP - 4, y2: height - BOTTOM + 4 }));
    ticks.append(s("text", { x: x(position), y: height - 5, "text-anchor": "middle" }, String(position)));
  }
  ticks.append(s("text", { x: LEFT, y: height - 5 }, unit));
  return ticks;
}

function divide(at, words, width, height) {
  const right = at + 150 > width;
  return s(
    "g",
    { class: "divide" },
    s("line", { x1: at, x2: at, y1: 4, y2: height - BOTTOM + 4 }),
    s("text", { x: right ? at - 6 : at + 6, y: 14, "text-anchor": right ? "end" : "start" }, words),
  );
}
