// Where the gateway's page begins: each part gets its place in the document.
import { el } from "../dom.js";
import { count } from "../format.js";
import { startLogin } from "../login.js";
import { getJson } from "../server.js";
import { startTheme } from "../theme.js";
import { startDecisionView } from "./decision_view.js";
import { startFleetView } from "./fleet_view.js";
import { startLintView } from "./lint_view.js";
import { startNewestList } from "./newest_list.js";
import { place, VIEWS } from "./route.js";
import { look, moment, startWatch, trouble } from "./watch.js";

const byId = (id) => document.getElementById(id);

const PULSE = {
  up: ({ workers }) => workers.filter((one) => one.state === "up").length,
  requests: ({ workers }) => workers.reduce((total, one) => total + one.requests, 0),
  waiting: ({ queue }) => queue.waiting,
};

function showView() {
  for (const view of VIEWS) {
    const on = place.value.view === view;
    byId(`view-${view}`).hidden = !on;
    if (on) byId(`to-${view}`).setAttribute("aria-current", "page");
    else byId(`to-${view}`).removeAttribute("aria-current");
  }
}

/** "", or what is wrong with a key that the gateway knows. */
async function tryKey() {
  try {
    await getJson("queue");
  } catch (error) {
    return error.status === 401 ? "" : error.message;
  }
  return "";
}

function startPulse(bar) {
  const shown = Object.entries(PULSE).map(([name, read]) => {
    const value = el("dd", { text: "–" });
    bar.append(el("div", {}, el("dt", { text: name }), value));
    return [value, read];
  });
  moment.watch((now) => {
    for (const [value, read] of shown) value.textContent = count(read(now));
  });
  trouble.watch((words) => (byId("link").textContent = words));
}

startTheme(byId("theme"));
startPulse(byId("pulse"));
startLogin(tryKey, look);
startFleetView(byId("view-fleet"));
startDecisionView(byId("view-decision"));
startLintView(byId("view-lint"));
startNewestList(byId("newest"));
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address belongs to the view
  byId("work").focus();
});
place.watch(showView);
showView();
startWatch();
