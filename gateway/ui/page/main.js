// Starts the page: takes the key out of the address, then shows the view that the address names.

import { openDashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { takeKeyFromAddress } from "./keys.js";
import { openPlayground } from "./playground.js";

const VIEWS = ["playground", "dashboard"];

takeKeyFromAddress();
openPlayground();
const dashboard = openDashboard();

function show() {
  const named = location.hash.slice(1);
  if (named === "main") return; // the skip link's
  const view = VIEWS.includes(named) ? named : VIEWS[0];
  for (const name of VIEWS) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `Verbatim: ${view}`;
  dashboard.show(view === "dashboard");
}

addEventListener("hashchange", () => {
  takeKeyFromAddress();
  show();
});
show();
