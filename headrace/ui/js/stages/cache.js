// 7 KV cache: the blocks of this request: reused, new, copied; and what became of them.
import { block, el, facts, key, table } from "../dom.js";
import { kvMap } from "../kv_map.js";
import { missing } from "./missing.js";

const SERIES = { shared: "is-1", new: "is-3", copied: "is-2" };
const MOST_EVENTS = 200;
const MOST_BLOCKS = 2000;

export function figure(record) {
  return record.blocks ? `${distinct(rowsOf(record.blocks))} blocks` : "";
}

export function view(record) {
  const { blocks } = record;
  if (!blocks) return missing(record, "its blocks");
  const all = tablesOf(blocks);
  const rows = rowsOf(blocks);
  const origin = (name) => rows.filter(([, from]) => from === name).length;
  const about = facts([
    ["blocks", distinct(rows)],
    ["tokens in one", blocks.block_size],
    ["shared", origin("shared")],
    ["new", origin("new")],
    ["copied", origin("copied")],
  ]);
  const meaning = key([
    ["is-1", "shared: found in the cache"],
    ["is-3", "new"],
    ["is-2", "copied before a write"],
  ]);
  const tables = all.map((one) => tableOf(one, blocks.block_size, all.length > 1));
  return [
    about,
    block("Block table", "in the order of positions", meaning, ...tables),
    block("What became of them", "", events(blocks.events ?? [], all.length > 1)),
    block("In the whole cache, now", "", ...kvMap(new Set(rows.map(([number]) => number)))),
  ];
}

/** The table of each choice; of one choice alone there may be no list of them. */
function tablesOf(blocks) {
  return blocks.tables?.length > 1 ? blocks.tables : [{ choice: 0, table: blocks.table }];
}

function rowsOf(blocks) {
  return tablesOf(blocks).flatMap(({ table: rows }) => rows);
}

function distinct(rows) {
  return new Set(rows.map(([number]) => number)).size;
}

function tableOf({ choice, table: rows }, size, several) {
  const cells = rows.slice(0, MOST_BLOCKS).map(([number, from], at) => {
    const title = `${from}: positions ${at * size} to ${(at + 1) * size - 1}`;
    const cell = el("span", { class: `cell ${SERIES[from] ?? ""}`, title, text: String(number) });
    cell.dataset.block = String(number);
    return cell;
  });
  const name = several ? `Block table of choice ${choice}` : "Block table";
  const label = several ? el("span", { class: "label", text: `choice ${choice}` }) : null;
  return el("div", { class: "cells", role: "group", "aria-label": name }, label, cells);
}

function events(all, several) {
  const rows = all.slice(0, MOST_EVENTS).map(({ step, kind, choice, blocks }) => [
    `#${step}`,
    several ? `${kind}, choice ${choice}` : kind,
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
