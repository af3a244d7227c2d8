// The list of requests to choose from: the newest of all, light or full.
import { el } from "./dom.js";
import { clock, ms } from "./format.js";
import { chosen, ring } from "./records.js";
import { mark, rove } from "./roving.js";
import { go, place } from "./route.js";

export function startRingList(pane) {
  const list = el("div", { class: "ring-list", role: "listbox", "aria-label": "Recent requests" });
  const total = el("span", { class: "label" });
  const none = el("p", { class: "empty", text: "No request yet." });
  pane.append(el("div", { class: "pane-head" }, el("h2", { text: "Requests" }), total), none, list);
  rove(
    list,
    () => [...list.children],
    (row) => go({ id: row.dataset.id }),
  );
  const rows = new Map(); // id -> row: rows stay, so that focus and selection do
  const show = () => {
    const records = ring.value;
    none.hidden = records.length > 0;
    list.hidden = !records.length;
    total.textContent = records.length ? `last ${records.length}` : "";
    for (const id of rows.keys()) if (!records.some((one) => one.id === id)) drop(rows, id);
    const wanted = records.map((one) => filled(rows.get(one.id) ?? added(rows, one.id), one));
    wanted.forEach(
      (row, at) => list.children[at] === row || list.insertBefore(row, list.children[at] ?? null),
    );
    mark(wanted, rows.get(place.value.id));
  };
  ring.watch(show);
  chosen.watch(show);
  place.watch(show);
  show();
}

function added(rows, id) {
  const row = el("div", { class: "ring-row", role: "option" });
  row.dataset.id = id;
  rows.set(id, row);
  return row;
}

function drop(rows, id) {
  rows.get(id).remove();
  rows.delete(id);
}

function filled(row, one) {
  const said = JSON.stringify(one);
  if (row.dataset.said === said) return row;
  row.dataset.said = said;
  const state = one.state === "running" ? "running" : one.error || one.finish_reason || "done";
  row.replaceChildren(
    el("span", { class: "id mono", text: one.id }),
    el("span", { class: one.full ? "label full" : "label", text: one.full ? "full" : "light" }),
    el("span", { class: "label", text: `${clock(one.created_s)}  ${state}` }),
    el("span", { class: "num", text: `${one.prompt_tokens} + ${one.output_tokens}` }),
    el("span", { class: "label", text: one.endpoint }),
    el("span", { class: "num", text: one.e2e_ms ? ms(one.e2e_ms) : "" }),
  );
  return row;
}
