// All steps of a request as bars of tokens; one is chosen, by click or by the slider.
import { el, key } from "../dom.js";
import { ms } from "../format.js";
import { plot } from "../plot.js";
import { shares } from "./step_rows.js";
import { stepPair } from "./step_pair.js";

const PARTS = [
  ["mine_prefill", "series-2"],
  ["mine_decode", "series-1"],
  ["other_prefill", "series-4"],
  ["other_decode", "series-3"],
];
const chosenAt = new Map(); // request -> index of its chosen step; outlives a panel

/** name: the record's key; steps: its own. Returns nodes. */
export function timeline(name, steps) {
  const sums = steps.map(shares);
  const most = Math.max(1, ...steps.map((step) => step.tokens));
  let at = Math.min(chosenAt.get(name) ?? 0, steps.length - 1);
  const pair = el("div");
  const slider = el("input", {
    type: "range",
    min: 0,
    max: steps.length - 1,
    step: 1,
    "aria-label": "Step",
  });
  const told = el("output", { class: "num" });
  const drawn = plot({
    height: 96,
    words: `${steps.length} steps of this request; the largest had ${most} tokens`,
    draw: (context, width, height, colour) =>
      drawSteps(context, width, height, colour, sums, most, at),
    pick: (part) => choose(Math.floor(part * steps.length)),
  });
  const choose = (next) => {
    at = Math.max(0, Math.min(steps.length - 1, next));
    chosenAt.set(name, at);
    slider.value = String(at);
    const { step, tokens, rows, ms: took_ms } = steps[at];
    const words = `step ${step}: ${tokens} tokens, ${rows.length} rows, ${ms(took_ms)}`;
    slider.setAttribute("aria-valuetext", words);
    told.textContent = `${at + 1} of ${steps.length}`;
    pair.replaceChildren(stepPair(steps[at], steps[at + 1]));
    drawn.redraw();
  };
  slider.addEventListener("input", () => choose(Number(slider.value)));
  choose(at);
  const step = (by, words) =>
    el("button", { type: "button", text: words, on: { click: () => choose(at + by) } });
  return [
    key([
      ["is-2", "this request, prompt"],
      ["is-1", "this request, decode"],
      ["is-4", "others, prompts"],
      ["is-3", "others, decode"],
    ]),
    drawn.node,
    el("div", { class: "steps-bar" }, told, slider, step(-1, "Previous"), step(1, "Next")),
    pair,
  ];
}

function drawSteps(context, width, height, colour, sums, most, at) {
  const slot = width / sums.length;
  const gap = slot > 4 ? 1 : 0;
  sums.forEach((sum, index) => {
    let top = height - 4;
    for (const [name, series] of PARTS) {
      const tall = (sum[name] / most) * (height - 12);
      if (!tall) continue;
      top -= Math.max(1, tall);
      context.fillStyle = colour[series];
      context.fillRect(
        index * slot,
        top,
        Math.max(0.75, Math.min(slot - gap, 28)),
        Math.max(1, tall),
      );
    }
  });
  context.fillStyle = colour.grid;
  context.fillRect(0, height - 4, width, 1);
  context.fillStyle = colour["series-1"];
  context.fillRect(at * slot, height - 3, Math.max(2, Math.min(slot - gap, 28)), 3);
}
