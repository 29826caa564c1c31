// The dashboard's cards. Each is drawn anew only where what it shows has changed, so that text can be selected.

import { columns, legend, lines, shares } from "./charts.js";
import { h, plural } from "./dom.js";
import { bars, gained, gainedHistogram, KEPT, quantile, rates, sum, total } from "./rates.js";

const COLOURS = { off: "off", verified: "verified", batch_invariant: "g0", batch_of_one: "g2" };
const OVER = "in the last two minutes";

/** Cards in `root`; `render` shows the looks so far (rates.js). */
export function openBoard(root) {
  const cards = new Map();

  function card(id, title, shown, build, wide = false) {
    let entry = cards.get(id);
    if (entry === undefined) {
      const body = h("div", { class: "card-body" });
      const section = h("section", { class: wide ? "tile wide" : "tile", "aria-labelledby": `card-${id}` });
      section.append(h("h2", { id: `card-${id}` }, title), body);
      root.append(section);
      entry = { body, key: null };
      cards.set(id, entry);
    }
    const width = Math.max(220, entry.body.clientWidth);
    const key = JSON.stringify([width, shown]);
    if (key === entry.key) return;
    entry.key = key;
    entry.body.replaceChildren(...[build(shown, width)].flat(Infinity).filter(Boolean));
  }

  function render(looks) {
    const now = looks.at(-1);
    const modes = Object.keys(now.modes).sort((a, b) => order(a) - order(b));
    card("gateway", "This gateway", gatewayOf(now), gateway, true);
    card("requests", "Requests per second", perMode(looks, modes, (mode) => sum(mode?.requests)), rateLines);
    card("tokens", "Answered tokens per second", perMode(looks, modes, (mode) => mode?.tokens?.completion ?? 0), rateLines);
    card("windows", "Windows that agreed", windowsOf(looks), windows);
    card("rollbacks", "Rollbacks by position in the answer", now.work.rolled_back_at, rollbacks);
    card("latency", "Latency", latencyOf(looks, modes), latency);
    card("log", "Commit log", now.logs, log);
    card("replicas", "Replicas", now.models, replicas, true);
  }

  return { render };
}

function order(mode) {
  const index = Object.keys(COLOURS).indexOf(mode);
  return index < 0 ? 99 : index;
}

// --- one card each ---------------------------------------------------------------------------------------------------

function gatewayOf(now) {
  const { draining, choices_in_flight, most_choices } = now.requests;
  return {
    state: draining ? "draining" : "serving",
    up: uptime(now.up_s),
    policy: now.policy,
    places: [choices_in_flight, most_choices],
    refusals: sum(now.refusals),
    conflicts: now.logs.conflicts,
  };
}

function gateway({ state, up, policy, places, refusals, conflicts }) {
  const fact = (name, value, tone = null) => h("div", { class: tone }, h("dt", {}, name), h("dd", {}, value));
  return [
    conflicts > 0 &&
      h(
        "p",
        { class: "trouble" },
        h("strong", {}, `${plural(conflicts, "conflict")} in the commit log. `),
        "A verifier contradicted what stands: the guarantee was broken there, and it is asked no more.",
      ),
    h(
      "dl",
      { class: "facts" },
      fact("State", state, state === "draining" ? "warn" : null),
      fact("Up for", up),
      fact("Choices in flight", `${places[0]} of ${places[1]}`),
      fact("Refused for want of room", String(refusals)),
      fact("Policy", h("code", {}, policy)),
    ),
  ];
}

function perMode(looks, modes, pick) {
  return modes.map((mode) => ({ mode, values: rates(looks, (look) => pick(look.modes[mode])) }));
}

function rateLines(series, width) {
  const named = series.map(({ mode, values }) => ({ name: mode, colour: COLOURS[mode] ?? "g4", values }));
  const format = (value) => (value >= 10 ? value.toFixed(0) : value.toFixed(1));
  const entries = named.map(({ name, colour, values }) => ({ name, colour, value: format(values.at(-1) ?? 0) }));
  const label = entries.map(({ name, value }) => `${name}: ${value}`).join(", ") || "nothing yet";
  const picture = lines(named, { width, points: KEPT, label, format });
  return [entries.length > 0 ? legend(entries) : h("p", { class: "note" }, "No requests yet."), picture];
}

function windowsOf(looks) {
  const pick = (name) => (look) => look.work.windows[name] ?? 0;
  const [agreed, back, undrafted] = ["agreed", "rolled_back", "undrafted"].map((name) => gained(looks, pick(name)));
  const both = rates(looks, (look) => pick("agreed")(look) + pick("rolled_back")(look));
  const share = rates(looks, pick("agreed")).map((rate, index) => (both[index] > 0 ? rate / both[index] : null));
  return { agreed, back, undrafted, share };
}

function windows({ agreed, back, undrafted, share }, width) {
  const drafted = agreed + back;
  const percent = drafted > 0 ? `${((100 * agreed) / drafted).toFixed(drafted >= 100 ? 1 : 0)} %` : "–";
  const said =
    drafted > 0
      ? `of ${plural(drafted, "window")} drafted ${OVER}`
      : undrafted > 0
        ? "none drafted: the verifier decodes by itself"
        : `none ${OVER}`;
  const label = `Windows that agreed: ${percent} ${said}`;
  return [
    h("p", { class: "figure" }, h("strong", {}, percent), ` ${said}`),
    lines([{ name: "agreed", colour: "verified", values: share }], {
      width,
      points: KEPT,
      label,
      ceiling: 1,
      format: (value) => `${(100 * value).toFixed(0)} %`,
    }),
    h("p", { class: "note" }, `${agreed} agreed, ${back} rolled back, ${undrafted} without a draft`),
  ];
}

function rollbacks(histogram, width) {
  const count = histogram ? total(histogram) : 0;
  if (count === 0) return h("p", { class: "note" }, "No draft was rolled back since the start.");
  const found = bars(histogram);
  const label = `Rollbacks by position: ${found.filter((bar) => bar.count).map((bar) => `${bar.range}: ${bar.count}`).join(", ")}`;
  return [
    h("p", { class: "figure" }, h("strong", {}, String(count)), " since the start, by the position of the first token that fell"),
    columns(found, { width, label, colour: "off" }),
  ];
}

function latencyOf(looks, modes) {
  const times = (mode, which) => {
    const recent = gainedHistogram(looks, (look) => look.modes[mode]?.[which]);
    return recent && [quantile(recent, 0.5), quantile(recent, 0.95)];
  };
  return modes.map((mode) => ({ mode, first: times(mode, "first_token_s"), between: times(mode, "between_tokens_s") }));
}

function latency(rows) {
  if (rows.length === 0) return h("p", { class: "note" }, "No requests yet.");
  const line = (name, which, index) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      rows.map((row) => h("td", {}, row[which] ? milliseconds(row[which][index]) : "–")),
    );
  return [
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, `Latency ${OVER}`),
      h("thead", {}, h("tr", {}, h("td", {}), rows.map(({ mode }) => modeName(mode)))),
      h(
        "tbody",
        {},
        line("First token, p50", "first", 0),
        line("First token, p95", "first", 1),
        line("Between tokens, p50", "between", 0),
        line("Between tokens, p95", "between", 1),
      ),
    ),
    h("p", { class: "note" }, `Estimated from buckets, ${OVER}.`),
  ];
}

function modeName(mode) {
  return h("th", { scope: "col" }, h("span", { class: `swatch ${COLOURS[mode] ?? "g4"}` }), mode);
}

function log({ served, in_flight, memory, shared, conflicts }, width) {
  const { hit = 0, follow = 0, lead = 0 } = served;
  const parts = [
    { name: "hits", count: hit, colour: "verified" },
    { name: "followed", count: follow, colour: "g0" },
    { name: "led", count: lead, colour: "g7" },
  ];
  const all = hit + follow + lead;
  const percent = all > 0 ? `${((100 * (hit + follow)) / all).toFixed(0)} %` : "–";
  const redis = shared === null ? "" : ` Redis ${shared.answers ? `holds ${plural(shared.keys, "key")}` : "does not answer"}.`;
  return [
    h("p", { class: "figure" }, h("strong", {}, percent), " of readings needed nothing generated for them alone"),
    shares(parts, { width, label: parts.map(({ name, count }) => `${name}: ${count}`).join(", ") }),
    h(
      "p",
      { class: "note" },
      `${plural(memory.logs, "log")} in ${bytes(memory.bytes)} of ${bytes(memory.max_bytes)}, ${in_flight} in flight,` +
        ` ${plural(conflicts, "conflict")}.${redis}`,
    ),
  ];
}

function replicas(models) {
  const rows = models.flatMap((model) => [
    ...model.replicas.map((replica) => row(model, replica, replica.roles.join(", "), replica.fingerprint)),
    ...model.upstreams.map((upstream) => row(model, { ...upstream, well: upstream.breaker !== "open" }, "upstream", null)),
  ]);
  const heads = ["Model", "Address", "Roles", "Health", "Calls", "Fingerprint"];
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table of replicas" },
    h(
      "table",
      { class: "left" },
      h("caption", { class: "unseen" }, "Replicas and upstreams by model"),
      h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows),
    ),
  );
}

function row(model, { url, well, trouble, breaker, in_flight }, roles, fingerprint) {
  const odd = fingerprint !== null && fingerprint !== model.fingerprint;
  const health = well ? "well" : (trouble ?? `breaker ${breaker}`);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, model.model),
    h("td", {}, url),
    h("td", {}, roles),
    h("td", {}, h("span", { class: `health ${well ? "well" : "ill"}` }, health)),
    h("td", {}, String(in_flight)),
    h("td", {}, fingerprint === null ? "–" : h("code", { class: odd ? "odd" : null }, fingerprint)),
  );
}

// --- how numbers are said --------------------------------------------------------------------------------------------

function milliseconds(seconds) {
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

function uptime(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return "under a minute";
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} days`;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let index = 0;
  while (count >= 1024 && index < units.length - 1) {
    count /= 1024;
    index += 1;
  }
  return `${count < 10 && index > 0 ? count.toFixed(1) : count.toFixed(0)} ${units[index]}`;
}
