// 7 KV cache: the blocks of this request: reused, new, copied; and what became of them.
import { block, el, facts, key, table } from "../dom.js";
import { kvMap } from "../kv_map.js";
import { missing } from "./missing.js";

const SERIES = { shared: "is-1", new: "is-3", copied: "is-2" };
const MOST_EVENTS = 200;
const MOST_BLOCKS = 2000;

export function figure(record) {
  return record.blocks ? `${record.blocks.table.length} blocks` : "";
}

export function view(record) {
  const { blocks } = record;
  if (!blocks) return missing(record, "its blocks");
  const size = blocks.block_size;
  const origin = (name) => blocks.table.filter(([, one]) => one === name).length;
  const cells = blocks.table.slice(0, MOST_BLOCKS).map(([number, from], at) =>
    el("span", {
      class: `cell ${SERIES[from] ?? ""}`,
      title: `${from}: positions ${at * size} to ${(at + 1) * size - 1}`,
      text: String(number),
    }),
  );
  for (const [at, cell] of cells.entries()) cell.dataset.block = String(blocks.table[at][0]);
  const about = facts([
    ["blocks", blocks.table.length],
    ["tokens in one", size],
    ["shared", origin("shared")],
    ["new", origin("new")],
    ["copied", origin("copied")],
  ]);
  const map = kvMap(new Set(blocks.table.map(([number]) => number)));
  return [
    about,
    block(
      "Block table",
      "in the order of positions",
      key([
        ["is-1", "shared: found in the cache"],
        ["is-3", "new"],
        ["is-2", "copied before a write"],
      ]),
      el("div", { class: "cells", role: "group", "aria-label": "Block table" }, cells),
    ),
    block("What became of them", "", events(blocks.events ?? [])),
    block("In the whole cache, now", "", ...map),
  ];
}

function events(all) {
  const rows = all.slice(0, MOST_EVENTS).map(({ step, kind, blocks }) => [
    `#${step}`,
    kind,
    el("span", {
      class: "mono",
      text: blocks.slice(0, 64).join(" ") + (blocks.length > 64 ? " …" : ""),
    }),
  ]);
  if (!rows.length) return el("p", { class: "label", text: "Nothing yet." });
  const made = table("Events of the blocks", ["step", "what", "blocks"], rows);
  return all.length > MOST_EVENTS
    ? el("div", {}, made, el("p", { class: "label", text: `and ${all.length - MOST_EVENTS} more` }))
    : made;
}
