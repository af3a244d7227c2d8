// 10 Sample: the candidates of each draw before and after each stage of sampling.
import { block, el, facts, visible } from "../dom.js";
import { count, draw as written } from "../format.js";
import { missing } from "./missing.js";

const WORDS = {
  logits: "logits",
  rules: "rules",
  penalties: "penalties",
  mask: "grammar mask",
  temperature: "temperature",
  top_n_sigma: "top n sigma",
  top_k: "top k",
  top_p: "top p",
  min_p: "min p",
  typical_p: "typical p",
  softmax: "probabilities",
};
const chosenAt = new Map(); // request -> index of its chosen draw

export function figure(record) {
  return record.draws?.length ? `${record.draws.length} draws` : "";
}

export function view(record) {
  const note = record.draws_note ? [el("p", { class: "label", text: record.draws_note })] : [];
  const { draws } = record;
  if (!draws?.length) return [...missing(record, "its draws"), ...note];
  let at = Math.min(chosenAt.get(record.key) ?? 0, draws.length - 1);
  const box = el("div", {
    class: "sampler",
    tabindex: "0",
    role: "group",
    "aria-label": "Stages of sampling",
  });
  const about = el("div");
  const told = el("output", { class: "num" });
  const slider = el("input", {
    type: "range",
    min: 0,
    max: draws.length - 1,
    step: 1,
    "aria-label": "Draw",
  });
  const choose = (next) => {
    at = Math.max(0, Math.min(draws.length - 1, next));
    chosenAt.set(record.key, at);
    const draw = draws[at];
    slider.value = String(at);
    slider.setAttribute("aria-valuetext", `draw ${at + 1}: ${visible(draw.text)}`);
    told.textContent = `${at + 1} of ${draws.length}`;
    about.replaceChildren(drawn(draw));
    box.replaceChildren(...draw.stages.map((stage) => sieve(stage, draw.token)));
  };
  slider.addEventListener("input", () => choose(Number(slider.value)));
  choose(at);
  const step = (by, words) =>
    el("button", { type: "button", text: words, on: { click: () => choose(at + by) } });
  return [
    block(
      "Draws",
      "what each stage left; the drawn token is marked",
      el("div", { class: "steps-bar" }, told, slider, step(-1, "Previous"), step(1, "Next")),
      about,
      box,
    ),
    ...note,
  ];
}

function drawn(draw) {
  return facts([
    [
      "drawn",
      el("span", {
        "data-drawn": String(draw.token),
        text: `${visible(draw.text) || "(no text)"}`,
      }),
    ],
    ["id", draw.token],
    ["step", `#${draw.step}`],
    ["choice", draw.choice],
    ["how", draw.greedy ? "greedy: the largest" : "by chance"],
    [
      "uniform number",
      draw.greedy || !Number.isFinite(draw.uniform) ? null : draw.uniform.toFixed(6),
    ],
  ]);
}

function sieve(stage, token) {
  const values = stage.top.map((one) => one.value).filter(Number.isFinite);
  const chances = stage.name === "softmax";
  const [least, most] = chances
    ? [0, Math.max(1e-9, ...values)]
    : [Math.min(...values), Math.max(...values)];
  const part = (value) =>
    !Number.isFinite(value) ? 0 : most > least ? (value - least) / (most - least) : 1;
  const items = stage.top.map((one) => {
    const item = el(
      "li",
      { class: one.id === token ? "drawn" : null },
      el("span", {
        class: "what",
        title: `id ${one.id}`,
        text: visible(one.text) || `id ${one.id}`,
      }),
      el("span", { class: "num", text: written(one.value) }),
      el("span", { class: "bar", vars: { "--part": part(one.value) } }),
    );
    item.dataset.id = String(one.id);
    return item;
  });
  const node = el(
    "section",
    { class: "sieve", "aria-label": WORDS[stage.name] ?? stage.name },
    el(
      "h4",
      {},
      WORDS[stage.name] ?? stage.name,
      el("span", {
        class: "num",
        title: "tokens that may still be drawn",
        text: `${count(stage.kept)} left`,
      }),
    ),
    el("ol", {}, items),
  );
  node.dataset.stage = stage.name;
  return node;
}
