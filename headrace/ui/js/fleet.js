// The whole server: small plots of the last minutes, the KV map, memory, device, its last steps.
import { block, el, facts, table } from "./dom.js";
import { bytes, count, ms, percent } from "./format.js";
import { perFrame } from "./frame.js";
import { kvMap } from "./kv_map.js";
import { KEPT, history, moment, trouble } from "./live.js";
import { drawLine, plot } from "./plot.js";
import { place } from "./route.js";

const MULTIPLES = [
  ["running", (now) => now.running, count],
  ["waiting", (now) => now.waiting, count],
  ["output tok/s", (now) => now.tokens_per_s, count],
  ["prompt tok/s", (now) => now.prefill_tokens_per_s, count],
  ["steps/s", (now) => now.steps_per_s, count],
  ["KV in use", (now) => (now.kv?.blocks ? now.kv.used / now.kv.blocks : 0), percent],
];
const MOST_STEPS = 12;

export function startFleet(box) {
  const multiples = MULTIPLES.map(multiple);
  const memory = el("div");
  const device = el("div");
  const steps = el("div");
  const problem = el("p", { class: "problem" });
  const map = el("div", { class: "block" });
  box.append(
    el(
      "div",
      { class: "fleet" },
      el("h2", { text: "Fleet" }),
      problem,
      el(
        "div",
        { class: "multiples" },
        multiples.map((one) => one.node),
      ),
      el(
        "div",
        { class: "halves" },
        block("KV cache", "", map),
        el("div", { class: "block" }, block("Device", "", device), block("Memory", "", memory)),
      ),
      block("Last steps", "", steps),
    ),
  );
  const show = perFrame(() => {
    const now = moment.value;
    if (place.value.view !== "fleet" || !now) return;
    if (!map.firstChild) map.append(...kvMap());
    for (const one of multiples) one.show(now);
    memory.replaceChildren(ledger(now.ledger ?? []));
    device.replaceChildren(deviceFacts(now.device ?? {}));
    steps.replaceChildren(lastSteps(now.last_steps ?? []));
  });
  moment.watch(show);
  place.watch(show);
  trouble.watch((words) => (problem.textContent = words));
}

function multiple([name, read, write]) {
  const value = el("span", { class: "value", text: "–" });
  const { node, redraw, describe } = plot({
    height: 42,
    words: name,
    draw(context, width, height, colour) {
      const values = history.map((one) => read(one) ?? 0);
      context.fillStyle = colour.grid;
      context.fillRect(0, height - 1, width, 1);
      drawLine(
        context,
        width,
        height,
        colour,
        values,
        write === percent ? 1 : Math.max(1, ...values),
        KEPT,
      );
    },
  });
  const show = (now) => {
    value.textContent = write(read(now));
    describe(`${name}: ${value.textContent}`);
    redraw();
  };
  return {
    node: el(
      "div",
      { class: "multiple" },
      el("div", { class: "row" }, el("h3", { text: name }), value),
      node,
    ),
    show,
  };
}

function ledger(entries) {
  const most = Math.max(1, ...entries.map((one) => one.bytes));
  const rows = entries.map((one) => [
    one.name,
    bytes(one.bytes),
    el("div", { class: "bar", vars: { "--part": one.bytes / most } }),
  ]);
  if (!rows.length) return el("p", { class: "label", text: "This backend keeps no ledger." });
  const made = table("Memory ledger", ["what for", "#bytes", "~"], rows);
  return made;
}

function deviceFacts(device) {
  const {
    name,
    util,
    memory_used_bytes: used,
    memory_bytes: whole,
    power_w: power,
    ...rest
  } = device;
  const others = Object.entries(rest)
    .filter(([, value]) => value !== null && typeof value !== "object")
    .map(([key, value]) => [
      key.replace(/_bytes$/, "").replaceAll("_", " "),
      key.endsWith("_bytes") ? bytes(value) : typeof value === "number" ? count(value) : value,
    ]);
  return facts([
    ["device", name],
    ["busy", Number.isFinite(util) ? percent(util > 1 ? util / 100 : util) : null],
    [
      "memory",
      Number.isFinite(used) ? `${bytes(used)}${whole ? ` of ${bytes(whole)}` : ""}` : null,
    ],
    ["power", Number.isFinite(power) ? `${count(power)} W` : null],
    ...others,
  ]);
}

function lastSteps(steps) {
  if (!steps.length) return el("p", { class: "label", text: "No step yet." });
  const rows = steps
    .slice(-MOST_STEPS)
    .reverse()
    .map((step) => [
      `#${step.step}`,
      ms(step.ms),
      count(step.tokens),
      count(step.prefill_tokens),
      count(step.rows?.length ?? 0),
      count(step.waiting),
      count(step.kv_used),
    ]);
  return table(
    "Last steps",
    ["step", "#time", "#tokens", "#of prompts", "#rows", "#waiting", "#KV blocks"],
    rows,
  );
}
