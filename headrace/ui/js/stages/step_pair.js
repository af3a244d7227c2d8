// Step N and step N+1 side by side: who got how many tokens, and what for.
import { el, facts, table } from "../dom.js";
import { ms } from "../format.js";

const MOST_ROWS = 64;

export function stepPair(now, next) {
  return el(
    "div",
    { class: "pair" },
    card(now, "N", "now"),
    next
      ? card(next, "N+1", "")
      : el(
          "section",
          {},
          el("p", { class: "label", text: "This was the last step of the request." }),
        ),
  );
}

function card(step, name, kind) {
  const rows = [...step.rows].sort((a, b) => Number(b.mine) - Number(a.mine));
  const shown = rows.slice(0, MOST_ROWS).map((row) => ({
    class: row.mine ? "mine" : null,
    cells: [
      el("span", { class: "mono", text: row.mine ? "this one" : row.request }),
      row.kind,
      row.count === 1 ? String(row.start) : `${row.start}…${row.start + row.count - 1}`,
      String(row.count),
      String(row.draws ?? 0),
    ],
  }));
  const rest = rows.length - shown.length;
  return el(
    "section",
    { class: kind || null, "aria-label": `Step ${step.step}` },
    el("h3", {}, `Step ${name} `, el("span", { class: "mono", text: `#${step.step}` })),
    facts([
      ["time", ms(step.ms)],
      ["tokens", step.tokens],
      ["of prompts", step.prefill_tokens],
      ["waiting", step.waiting],
      ["KV blocks", step.kv_used],
    ]),
    table(
      `Rows of step ${step.step}`,
      ["request", "kind", "#positions", "#tokens", "#draws"],
      shown,
    ),
    rest > 0 ? el("p", { class: "label", text: `and ${rest} more rows` }) : null,
  );
}
