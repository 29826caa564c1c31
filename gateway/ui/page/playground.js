// The playground: asks one thing many times in both modes under the same load, and shows what came.

import { AskError, ask, listModels } from "./ask.js";
import { byId, h, plural } from "./dom.js";
import { keepKey, readKey } from "./keys.js";
import { keepBusy } from "./load.js";
import { openPanel } from "./panel.js";

const MODES = ["off", "verified"];
/** Requests of one mode at a time. Browsers open six connections to a server: four for answers, one for the load. */
const AT_ONCE = 2;
const STAGGER_MS = 150;

export function openPlayground() {
  const form = byId("ask");
  const panels = Object.fromEntries(MODES.map((mode) => [mode, openPanel(document.querySelector(`[data-mode=${mode}]`))]));
  let run = null;
  let answers = { off: [], verified: [] };
  let shown = { asked: 0, most: 1 };
  let dirty = false;

  function render() {
    const said = MODES.map((mode) => panels[mode].render(answers[mode], { ...shown, running: run !== null }));
    byId("summary").hidden = shown.asked === 0;
    byId("summary").replaceChildren(
      ...said.map(({ title, tone, headline }) => h("p", { "data-tone": tone }, h("span", {}, title), ` ${headline}`)),
    );
    const done = MODES.flatMap((mode) => answers[mode]).filter((answer) => answer.state === "done").length;
    byId("progress").textContent = run ? `${done} of ${2 * shown.asked} answers are complete.` : "";
    return said.map(({ title, headline, why }) => `${title}: ${headline}. ${why}`);
  }

  function renderSoon() {
    if (dirty) return;
    dirty = true;
    requestAnimationFrame(() => {
      dirty = false;
      render();
    });
  }

  async function start() {
    const plan = readPlan();
    if (plan === null) return;
    run = new AbortController();
    const { signal } = run;
    shown = { asked: plan.repeats, most: plan.maxTokens };
    answers = Object.fromEntries(MODES.map((mode) => [mode, Array.from({ length: plan.repeats }, blank)]));
    trouble(null);
    busy(true);
    announce(`Asking ${2 * plan.repeats} times.`);
    const load = new AbortController();
    signal.addEventListener("abort", () => load.abort());
    const loading = keepBusy({ ...plan, most: plan.load, signal: load.signal }, (words) =>
      trouble(`The answers were compared with less load than asked for: ${words}`),
    );
    try {
      await Promise.all(MODES.map((mode) => askAll(mode, plan, signal)));
    } finally {
      load.abort();
      await loading;
      run = null;
      busy(false);
    }
    announce(render().join(" "));
    locked(MODES.flatMap((mode) => answers[mode]).find((answer) => answer.error?.status === 401)?.error);
  }

  /** All answers of one mode, a few at a time. */
  async function askAll(mode, plan, signal) {
    const waiting = answers[mode].values();
    async function lane() {
      for (const answer of waiting) {
        if (signal.aborted) {
          answer.state = "stopped";
          continue;
        }
        await new Promise((resolve) => setTimeout(resolve, Math.random() * STAGGER_MS));
        await askOnce(answer, { ...plan, mode, signal });
        renderSoon();
      }
    }
    await Promise.all(Array.from({ length: AT_ONCE }, lane));
  }

  async function askOnce(answer, request) {
    answer.state = "streaming";
    try {
      answer.said = await ask(request, (tokens) => {
        answer.tokens.push(...tokens);
        renderSoon();
      });
      answer.state = "done";
    } catch (error) {
      if (error.name === "AbortError") {
        answer.state = "stopped";
        return;
      }
      if (!(error instanceof AskError)) throw error;
      answer.state = "failed";
      answer.error = error;
    }
  }

  /** What the form says; null, with the field at fault focused, where it says nothing sensible. */
  function readPlan() {
    for (const field of form.querySelectorAll("textarea, select, input")) {
      const wrong = !field.checkValidity() || (field.id === "prompt" && !field.value.trim());
      field.setAttribute("aria-invalid", String(wrong));
      if (!wrong) continue;
      const name = field.labels[0].firstChild.textContent.trim();
      trouble(`${name}: ${field.validationMessage || "say something."}`);
      field.focus();
      return null;
    }
    return {
      model: byId("model").value,
      prompt: byId("prompt").value,
      repeats: byId("repeats").valueAsNumber,
      maxTokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      seed: byId("seed").valueAsNumber,
      load: byId("load").valueAsNumber,
      key: readKey("api"),
    };
  }

  async function fillModels() {
    const select = byId("model");
    try {
      const models = await listModels(readKey("api"));
      const chosen = select.value;
      select.replaceChildren(...models.map((model) => new Option(model, model, false, model === chosen)));
      trouble(models.length > 0 ? null : "There is no model that this key sees.");
      byId("api-key").removeAttribute("aria-invalid");
    } catch (error) {
      if (!(error instanceof AskError)) throw error;
      if (error.status === 401) locked(error);
      else trouble(error.message);
    }
  }

  /** Point at the key, where that is what is missing. */
  function locked(error) {
    if (!error) return;
    byId("key-details").open = true;
    byId("api-key").setAttribute("aria-invalid", "true");
    trouble(`An API key is needed here: ${error.message}`);
  }

  function busy(yes) {
    form.setAttribute("aria-busy", String(yes));
    byId("run").hidden = yes;
    byId("stop").hidden = !yes;
    (yes ? byId("stop") : byId("run")).focus({ preventScroll: true });
    render();
  }

  function label() {
    const repeats = byId("repeats").valueAsNumber;
    byId("run").textContent = repeats > 0 ? `Ask ${plural(2 * repeats, "time")}` : "Ask";
    byId("load-shown").textContent = byId("load").value === "0" ? "none" : `up to ${byId("load").value}`;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (run === null) start();
  });
  form.addEventListener("input", label);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape") run?.abort();
  });
  byId("stop").addEventListener("click", () => run?.abort());
  byId("api-key").value = readKey("api");
  byId("api-key").addEventListener("change", () => {
    keepKey("api", byId("api-key").value.trim());
    fillModels();
  });
  new ResizeObserver(renderSoon).observe(byId("panels"));
  label();
  render();
  fillModels();
}

function blank() {
  return { tokens: [], state: "waiting", said: null, error: null };
}

function trouble(words) {
  byId("trouble").textContent = words ?? "";
  byId("trouble").hidden = words === null;
}

function announce(words) {
  byId("announcement").textContent = words;
}
