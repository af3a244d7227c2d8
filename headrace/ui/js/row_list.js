// A list of things to choose one of. Rows stay while their things do, and with them the focus.
import { el } from "./dom.js";
import { mark, rove } from "./roving.js";

/**
 * label: for those who do not see it; fill(thing): nodes of a row; choose(id). Things have an `id`.
 * Returns {node, show(things, id of the chosen one)}.
 */
export function rowList(label, fill, choose) {
  const node = el("div", { class: "ring-list", role: "listbox", "aria-label": label });
  const rows = new Map(); // id -> row
  rove(
    node,
    () => [...node.children],
    (row) => choose(row.dataset.id),
  );
  const show = (things, chosen) => {
    node.hidden = !things.length;
    const known = new Set(things.map((one) => one.id));
    for (const [id, row] of rows) if (!known.has(id)) (row.remove(), rows.delete(id));
    const wanted = things.map((one) => filled(rows, one, fill));
    wanted.forEach(
      (row, at) => node.children[at] === row || node.insertBefore(row, node.children[at] ?? null),
    );
    mark(wanted, rows.get(chosen));
  };
  return { node, show };
}

function filled(rows, thing, fill) {
  let row = rows.get(thing.id);
  if (!row) {
    row = el("div", { class: "ring-row", role: "option" });
    row.dataset.id = thing.id;
    rows.set(thing.id, row);
  }
  const said = JSON.stringify(thing);
  if (row.dataset.said !== said) {
    row.dataset.said = said;
    row.replaceChildren(...fill(thing));
  }
  return row;
}
