// One mode's panel: the verdict, the strands, the state of each request, and the distinct answers side by side.

import { draw } from "./branches.js";
import { parting, verdict } from "./compare.js";
import { h, plural } from "./dom.js";
import { say } from "./verdict.js";

const TITLES = { off: "Mode off", verified: "Mode verified" };
const LETTERS = "ABCDEFGHIJKLMNOP";

/** A panel in `root`. `render` draws what is known of the answers now, and returns the verdict. */
export function openPanel(root) {
  const mode = root.dataset.mode;
  const headline = h("p", { class: "headline" });
  const why = h("p", { class: "why" });
  const picture = h("div", { class: "picture" });
  const dots = h("ol", { class: "dots", "aria-label": `Requests in mode ${mode}` });
  const troubles = h("div", { class: "troubles" });
  const cards = h("div", { class: "cards" });
  root.append(
    h("header", {}, h("h2", { id: `${mode}-title` }, TITLES[mode]), dots),
    headline,
    why,
    picture,
    troubles,
    cards,
  );

  function render(answers, { asked, running, most }) {
    const found = verdict(answers);
    const said = say(mode, found, asked, running);
    root.dataset.tone = said.tone;
    headline.textContent = said.headline;
    why.textContent = said.why;
    const longest = Math.max(1, ...answers.map((answer) => answer.tokens.length));
    const width = Math.max(240, picture.clientWidth);
    const label = `${said.headline}. ${said.why}`;
    const options = { width, most: running ? most : longest, first: found.firstDifference, unit: found.unit, label };
    picture.replaceChildren(...(answers.length > 0 ? [draw(found.groups, answers, options)] : []));
    dots.replaceChildren(...answers.map((answer, index) => dot(answer, index, found.groups)));
    troubles.replaceChildren(...troublesOf(answers));
    cards.replaceChildren(...found.groups.map((group, index) => card(group, index, found, answers, running)));
    return { title: TITLES[mode], ...said };
  }

  return { render };
}

function dot(answer, index, groups) {
  const home = groups.findIndex((group) => group.members.includes(index));
  const words = { waiting: "waiting", streaming: "being written", done: "complete", failed: "failed", stopped: "stopped" };
  const belongs = home >= 0 ? `, answer ${LETTERS[home]}` : "";
  return h(
    "li",
    { class: `dot ${answer.state}${home >= 0 ? ` g${home % 8}` : ""}` },
    h("span", { class: "unseen" }, `Request ${index + 1}: ${words[answer.state]}${belongs}`),
  );
}

/** What went wrong, said once for all requests it happened to. */
function troublesOf(answers) {
  const counted = new Map();
  for (const { error } of answers) {
    if (!error) continue;
    const wait = error.retryAfter ? ` It may be tried again in ${error.retryAfter} s.` : "";
    const words = `${error.status ? `${error.status}${error.code ? ` ${error.code}` : ""}: ` : ""}${error.message}${wait}`;
    counted.set(words, (counted.get(words) ?? 0) + 1);
  }
  return [...counted].map(([words, count]) =>
    h("p", { class: "trouble" }, h("strong", {}, plural(count, "request failed", "requests failed")), ` ${words}`),
  );
}

function card(group, index, found, answers, running) {
  const share = group.members.length;
  const title = found.distinct === 1 ? `All ${plural(share, "answer")}` : `${share} of ${plural(answers.length, "answer")}`;
  const others = found.groups.filter((other) => other !== group);
  const marks = [...new Set(others.map((other) => parting(group, other)))].sort((a, b) => a - b);
  return h(
    "article",
    { class: `card g${index % 8}` },
    h(
      "header",
      {},
      h("span", { class: "letter", "aria-hidden": "true" }, LETTERS[index]),
      h("h3", {}, h("span", { class: "unseen" }, `Answer ${LETTERS[index]}: `), title),
      index > 0 && h("span", { class: "parts" }, partsFrom(group, found.groups.slice(0, index), found.unit)),
    ),
    h("p", { class: "answer" }, ...spelled(group, marks), running && !group.ended ? h("span", { class: "caret" }) : null),
    running ? null : h("p", { class: "bits" }, bits(group, answers)),
  );
}

/** Which of the answers above it went along with the longest. */
function partsFrom(group, earlier, unit) {
  const places = earlier.map((other) => parting(group, other));
  const last = Math.max(...places);
  return `parts from ${LETTERS[places.indexOf(last)]} at ${unit} ${last + 1}`;
}

/** The text, what all answers share and the tokens at which others part from it set off. */
function spelled(group, marks) {
  const parts = [];
  let from = 0;
  for (const mark of marks) {
    parts.push(h("span", { class: from === 0 ? "shared" : "own" }, text(group.tokens.slice(from, mark))));
    const [, space, word] = /^(\s*)(.*)$/s.exec(visible(group.tokens[mark]));
    parts.push(space, h("mark", {}, word));
    from = mark + 1;
  }
  return [...parts, text(group.tokens.slice(from))];
}

function text(tokens) {
  return tokens.map((token) => token.text).join("");
}

/** A token that can be seen, whatever it is. */
function visible(token) {
  if (token === undefined || token.ends) return "∎ end";
  if (token.text.trim()) return token.text;
  return token.text === "" ? "�" : token.text.replaceAll(" ", "␣").replaceAll("\n", "⏎\n");
}

function bits(group, answers) {
  const done = group.members.map((member) => answers[member]).filter((answer) => answer.state === "done");
  if (done.length === 0) return "Not complete.";
  if (done.some((answer) => answer.tokens.some((token) => token.logprob === null))) return "No logprobs came with it.";
  const versions = new Set(done.map((answer) => answer.tokens.map((token) => token.logprob).join()));
  const length = plural(done[0].tokens.length, "token");
  if (done.length === 1) return `${length}.`;
  return versions.size === 1
    ? `${length}, logprobs equal to the last bit.`
    : `${length}, in ${versions.size} versions of the logprobs.`;
}
