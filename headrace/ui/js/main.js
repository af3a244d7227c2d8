// Where the page begins: each part gets its place in the document.
import { Chat } from "./chat.js";
import { el } from "./dom.js";
import { startFleet } from "./fleet.js";
import { count } from "./format.js";
import { again, moment, startLive, trouble } from "./live.js";
import { startLogin } from "./login.js";
import { startPipeline } from "./pipeline.js";
import { look, startRecords } from "./records.js";
import { startRingList } from "./ring_list.js";
import { place } from "./route.js";
import { getJson } from "./server.js";
import { startTheme } from "./theme.js";

const byId = (id) => document.getElementById(id);

async function nameModel() {
  try {
    const models = await getJson("v1/models");
    byId("model").textContent = models.data[0].id;
  } catch (error) {
    byId("model").textContent = error.status === 401 ? "" : error.message;
  }
}

function showView() {
  const fleet = place.value.view === "fleet";
  byId("view-fleet").hidden = !fleet;
  byId("view-request").hidden = fleet;
  for (const [id, on] of [
    ["to-fleet", fleet],
    ["to-request", !fleet],
  ]) {
    if (on) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
}

function startPulse(bar) {
  const shown = {
    running: (now) => now.running,
    waiting: (now) => now.waiting,
    "tok/s": (now) => now.tokens_per_s,
    KV: (now) => (now.kv?.blocks ? now.kv.used / now.kv.blocks : null),
  };
  const values = Object.keys(shown).map((name) => {
    const value = el("dd", { text: "–" });
    bar.append(el("div", {}, el("dt", { text: name }), value));
    return [name, value];
  });
  moment.watch((now) => {
    for (const [name, value] of values) {
      const figure = shown[name](now);
      value.textContent =
        name === "KV" && figure !== null ? `${Math.round(figure * 100)}%` : count(figure);
    }
  });
  trouble.watch((words) => (byId("link").textContent = words));
}

startTheme(byId("theme"));
startPulse(byId("pulse"));
startLogin(nameModel, () => {
  again();
  look();
});
startPipeline(byId("pipeline"));
startFleet(byId("view-fleet"));
startRingList(byId("ring"));
new Chat(byId("chat"));
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address belongs to the view
  byId("work").focus();
});
place.watch(showView);
showView();
nameModel();
startRecords();
startLive();
