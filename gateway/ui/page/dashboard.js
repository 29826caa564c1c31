// The dashboard: looks at the gateway once a second while it is shown, and asks for the admin key where it must.

import { answered, AskError } from "./ask.js";
import { openBoard } from "./board.js";
import { byId } from "./dom.js";
import { authorization, keepKey, readKey } from "./keys.js";
import { remember } from "./rates.js";

const EVERY_MS = 1000;

/** `show` starts and stops the looking. */
export function openDashboard() {
  const board = openBoard(byId("board"));
  let looks = [];
  let shown = false;
  let timer = null;

  async function look() {
    timer = null;
    try {
      const response = await answered(fetch("admin/v1/status", { headers: authorization(readKey("admin")) }));
      looks = remember(looks, await response.json());
      said(null);
      unlock(false);
      if (shown) board.render(looks);
    } catch (error) {
      if (!(error instanceof AskError)) throw error;
      if (error.status === 401) {
        said(readKey("admin") ? `This key does not open it: ${error.message}` : null);
        unlock(true);
        return;
      }
      said(error.message);
    }
    next(EVERY_MS);
  }

  function next(delay) {
    if (shown && timer === null && !document.hidden) timer = setTimeout(look, delay);
  }

  function unlock(needed) {
    byId("unlock").hidden = !needed;
    byId("board").hidden = needed;
  }

  byId("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey("admin", byId("admin-key").value.trim());
    byId("admin-key").value = "";
    look();
  });
  document.addEventListener("visibilitychange", () => next(0));

  return {
    show(yes) {
      shown = yes;
      if (yes) {
        if (looks.length > 0) board.render(looks);
        next(0);
      } else {
        clearTimeout(timer);
        timer = null;
      }
    },
  };
}

function said(words) {
  const place = byId("dashboard-trouble");
  if (place.textContent !== (words ?? "")) place.textContent = words ?? "";
  place.hidden = words === null;
}
