// 8 Attend: how many keys the queries of each step read, and through which blocks.
import { capped } from "../capped.js";
import { block, el, facts, table } from "../dom.js";
import { ms } from "../format.js";
import { missing } from "./missing.js";
import { ownRows } from "./step_rows.js";

const PORTION = 100;

export function figure(record) {
  const own = ownRows(record);
  const last = own.at(-1)?.rows.at(-1);
  return last ? `${last.start + last.count} keys` : "";
}

export function view(record) {
  const own = ownRows(record).flatMap(({ step, rows }) => rows.map((row) => ({ step, row })));
  if (!own.length) return missing(record, "what attention read");
  const size = record.blocks?.block_size ?? 0;
  const most = Math.max(...own.map(({ row }) => row.start + row.count));
  const made = table(
    "What attention read",
    ["step", "#queries at", "#keys read", "#blocks", "#time of the step", "~"],
    [],
  );
  const [, more] = capped(made.tBodies[0], own, PORTION, ({ step, row }) => {
    const keys = row.start + row.count;
    const bar = el("div", {
      class: row.kind === "prefill" ? "bar is-2" : "bar",
      vars: { "--part": keys / most },
    });
    return el(
      "tr",
      {},
      el("td", { text: `#${step.step}` }),
      el("td", {
        class: "num",
        text: row.count === 1 ? String(row.start) : `${row.start}…${keys - 1}`,
      }),
      el("td", { class: "num", text: row.count === 1 ? String(keys) : `${row.start + 1}…${keys}` }),
      el("td", { class: "num", text: size ? String(Math.ceil(keys / size)) : "" }),
      el("td", { class: "num", text: ms(step.ms) }),
      el("td", { class: "wide" }, bar),
    );
  });
  return [
    facts([
      ["block", size ? `${size} tokens` : null],
      ["most keys", most],
    ]),
    block(
      "Each step",
      "a query reads the keys of every position before it and its own",
      made,
      more,
    ),
  ];
}
