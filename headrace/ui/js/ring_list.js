// The list of requests to choose from: the newest of all, light or full.
import { el } from "./dom.js";
import { clock, ms } from "./format.js";
import { chosen, ring, unanswered } from "./records.js";
import { go, place } from "./route.js";
import { rowList } from "./row_list.js";

export function startRingList(pane) {
  const list = rowList("Recent requests", parts, (id) => go({ id }));
  const total = el("span", { class: "label" });
  const none = el("p", { class: "empty", text: "No request yet." });
  const head = el("div", { class: "pane-head" }, el("h2", { text: "Requests" }), total);
  pane.append(head, none, list.node);
  const show = () => {
    const records = ring.value;
    none.hidden = records.length > 0;
    const silent = unanswered.value;
    const missing = silent ? `${silent} HTTP ${silent > 1 ? "processes" : "process"} silent` : "";
    const last = records.length ? `last ${records.length}` : "";
    total.textContent = [last, missing].filter(Boolean).join(", ");
    // Clients give several requests one id; each has a key of its own.
    const { id, record } = chosen.value;
    list.show(
      records.map((one) => ({ ...one, id: one.key, name: one.id })),
      id === place.value.id ? record?.key : place.value.id,
    );
  };
  ring.watch(show);
  unanswered.watch(show);
  chosen.watch(show);
  place.watch(show);
  show();
}

function parts(one) {
  const state = one.state === "running" ? "running" : one.error || one.finish_reason || "done";
  return [
    el("span", { class: "id mono", text: one.name }),
    el("span", { class: one.full ? "label full" : "label", text: one.full ? "full" : "light" }),
    el("span", { class: "label", text: `${clock(one.created_s)}  ${state}` }),
    el("span", { class: "num", text: `${one.prompt_tokens} + ${one.output_tokens}` }),
    el("span", { class: "label", text: one.endpoint }),
    el("span", { class: "num", text: one.e2e_ms ? ms(one.e2e_ms) : "" }),
  ];
}
