// 6 Prefill: the prompt in chunks, less what the cache had.
import { block, el, facts, key, table } from "../dom.js";
import { ms } from "../format.js";
import { missing } from "./missing.js";
import { ownRows } from "./step_rows.js";

export function figure(record) {
  return Number.isFinite(record.timing?.prefill_ms) ? ms(record.timing.prefill_ms) : "";
}

export function view(record) {
  const usage = record.usage ?? {};
  const about = facts([
    ["prompt", `${usage.prompt_tokens ?? 0} tokens`],
    ["from the cache", `${usage.cached_tokens ?? 0} tokens`],
    ["time", Number.isFinite(record.timing?.prefill_ms) ? ms(record.timing.prefill_ms) : null],
  ]);
  const chunks = ownRows(record, "prefill");
  if (!chunks.length) return [about, ...missing(record, "chunks of the prompt")];
  const rows = rowsOf(chunks, usage);
  const made = table(
    "Chunks of the prompt",
    ["step", "#positions", "#tokens", "#time of the step", "#rows in it", "~"],
    rows,
  );
  return [
    about,
    block(
      "Chunks",
      "",
      key([
        ["is-3", "reused"],
        ["is-1", "computed"],
      ]),
      made,
    ),
  ];
}

function rowsOf(chunks, { cached_tokens: cached = 0, prompt_tokens: whole }) {
  const part = (from, size, series) => {
    const vars = { "--from": from / whole, "--part": size / whole };
    return el("div", { class: `bar ${series}`, vars });
  };
  const rows = chunks.flatMap(({ step, rows: own }) =>
    own.map((row) => [
      `#${step.step}`,
      `${row.start}…${row.start + row.count - 1}`,
      String(row.count),
      ms(step.ms),
      String(step.rows.length),
      part(row.start, row.count, "is-1"),
    ]),
  );
  if (!cached) return rows;
  return [["cache", `0…${cached - 1}`, String(cached), "", "", part(0, cached, "is-3")], ...rows];
}
