// 9 Decode: one token a step; the gaps between them, and how many others were in the step.
import { block, el, facts } from "../dom.js";
import { ms } from "../format.js";
import { plot } from "../plot.js";
import { chips } from "./chips.js";
import { missing } from "./missing.js";
import { ownRows } from "./step_rows.js";

export function figure(record) {
  const made = record.usage?.completion_tokens;
  return made ? `${made} tok` : "";
}

export function view(record) {
  const { timing, usage, tokens } = record;
  const steps = ownRows(record, "decode").map(({ step }) => step);
  const rows = steps.map((step) => step.rows.length);
  const about = facts([
    ["time", Number.isFinite(timing?.decode_ms) ? ms(timing.decode_ms) : null],
    ["tokens", usage?.completion_tokens],
    ["steps", steps.length || null],
    ["rows in a step", rows.length ? span(rows) : null],
  ]);
  const output = tokens?.output ?? [];
  if (!output.length) return [about, ...missing(record, "output tokens")];
  const first = record.usage?.prompt_tokens ?? 0;
  const choices = [...new Set(output.map((token) => token.choice ?? 0))].sort((a, b) => a - b);
  return [
    about,
    ...choices.flatMap((choice) =>
      one(
        output.filter((token) => (token.choice ?? 0) === choice),
        choice,
        choices.length,
        first,
      ),
    ),
  ];
}

function one(tokens, choice, choices, first) {
  const gaps = tokens.slice(1).map((token, at) => token.t_ms - tokens[at].t_ms);
  const name = choices > 1 ? ` of choice ${choice}` : "";
  const parts = [
    block(
      `Tokens${name}`,
      `${tokens.length}; choose one for its bytes`,
      ...chips(tokens, first, `Output tokens${name}`),
    ),
  ];
  if (gaps.length)
    parts.push(
      block(
        `Gaps between tokens${name}`,
        `${ms(Math.min(...gaps))} to ${ms(Math.max(...gaps))}`,
        gapPlot(gaps),
      ),
    );
  return parts;
}

function gapPlot(gaps) {
  const most = Math.max(1e-6, ...gaps);
  const { node } = plot({
    height: 70,
    words: `Gaps between ${gaps.length + 1} tokens, at most ${ms(most)}`,
    draw(context, width, height, colour) {
      const slot = width / gaps.length;
      context.fillStyle = colour["series-1"];
      gaps.forEach((gap, at) => {
        const tall = Math.max(1, (gap / most) * (height - 4));
        context.fillRect(
          at * slot,
          height - tall,
          Math.max(0.75, Math.min(slot - (slot > 3 ? 1 : 0), 20)),
          tall,
        );
      });
    },
  });
  return el("div", {}, node);
}

function span(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return least === most ? String(least) : `${least}…${most}`;
}
