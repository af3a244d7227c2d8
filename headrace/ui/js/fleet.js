// The whole server: small plots of the last minutes, the KV map, memory, device, its last steps.
import { block, el, facts, table } from "./dom.js";
import { bytes, count, ms, percent } from "./format.js";
import { perFrame } from "./frame.js";
import { kvMap } from "./kv_map.js";
import { KEPT, history, moment, trouble } from "./live.js";
import { multiples } from "./multiples.js";
import { place } from "./route.js";

const FIGURES = [
  ["running", (now) => now.running, count],
  ["waiting", (now) => now.waiting, count],
  ["output tok/s", (now) => now.tokens_per_s, count],
  ["prompt tok/s", (now) => now.prefill_tokens_per_s, count],
  ["steps/s", (now) => now.steps_per_s, count],
  ["KV in use", (now) => (now.kv?.blocks ? now.kv.used / now.kv.blocks : 0), percent],
];
const MOST_STEPS = 12;

export function startFleet(box) {
  const plots = multiples(FIGURES, history, KEPT);
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
      plots.node,
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
    plots.show(now);
    memory.replaceChildren(ledger(now.ledger ?? []));
    device.replaceChildren(deviceFacts(now.device ?? {}));
    steps.replaceChildren(lastSteps(now.last_steps ?? []));
  });
  moment.watch(show);
  place.watch(show);
  trouble.watch((words) => (problem.textContent = words));
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
