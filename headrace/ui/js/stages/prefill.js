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
  const whole = Math.max(1, usage.prompt_tokens ?? 0);
  const part = (from, size, series, title) =>
    el("div", {
      class: `bar ${series}`,
      title,
      vars: { "--from": from / whole, "--part": size / whole },
    });
  const rows = chunks.flatMap(({ step, rows: own }) =>
    own.map((row) => [
      `#${step.step}`,
      `${row.start}…${row.start + row.count - 1}`,
      String(row.count),
      ms(step.ms),
      String(step.rows.length),
      part(row.start, row.count, "is-1", `tokens ${row.start} to ${row.start + row.count - 1}`),
    ]),
  );
  if (usage.cached_tokens)
    rows.unshift([
      "cache",
      `0…${usage.cached_tokens - 1}`,
      String(usage.cached_tokens),
      "",
      "",
      part(0, usage.cached_tokens, "is-3", "from the cache"),
    ]);
  const made = table(
    "Chunks of the prompt",
    [
      ["step", ""],
      ["positions", "num"],
      ["tokens", "num"],
      ["time of the step", "num"],
      ["rows in it", "num"],
      ["", ""],
    ],
    rows,
  );
  for (const cell of made.querySelectorAll("tbody td:last-child")) cell.className = "wide";
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
