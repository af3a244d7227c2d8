// The fleet: its workers, who waits, and what tenants may still take.
import { block, el, table } from "../dom.js";
import { count, ms, percent } from "../format.js";
import { multiples } from "../multiples.js";
import { fleet, history, KEPT, moment } from "./watch.js";
import { nameOf } from "./words.js";

const FIGURES = [
  ["workers up", (now) => now.workers.filter((one) => one.state === "up").length, count],
  ["requests at workers", (now) => sum(now.workers, "requests"), count],
  ["without a first token", (now) => sum(now.workers, "waiting"), count],
  ["pending uncached tokens", (now) => sum(now.workers, "pending_tokens"), count],
  ["waiting in the queue", (now) => now.queue.waiting, count],
];

export function startFleetView(box) {
  const plots = multiples(FIGURES, history, KEPT);
  const policy = el("span", { class: "label" });
  const workers = el("div", { id: "workers" });
  const queue = el("div", { id: "queue" });
  const predictions = el("div", { id: "predictions" });
  const tenants = el("div", { id: "tenants" });
  box.append(
    el("h2", {}, "Fleet ", policy),
    plots.node,
    block("Workers", "", workers),
    block("Queue", "requests that wait here until a worker has room", queue),
    block("Predictions", "cached tokens against what engines then found", predictions),
    block("Tenants", "what each may still take, and what it got", tenants),
  );
  moment.watch(plots.show);
  fleet.watch((now) => {
    policy.textContent = `policy ${now.policy}`;
    workers.replaceChildren(workersTable(now.workers), ...namesTable(now.names));
    queue.replaceChildren(...queueTable(now.queue));
    predictions.replaceChildren(...predictionsTable(now.predictions));
    tenants.replaceChildren(...tenantsTable(now));
  });
}

function sum(rows, name) {
  return rows.reduce((total, row) => total + row[name], 0);
}

function workersTable(workers) {
  if (!workers.length) return el("p", { class: "label", text: "No worker." });
  const most = Math.max(1, ...workers.map((one) => one.pending_tokens));
  const rows = workers.map((one) => [
    el("span", { class: "mono", text: one.name }),
    stateOf(one),
    one.breaker === "closed" ? "closed" : el("strong", { class: "problem", text: one.breaker }),
    one.index.toUpperCase(),
    one.max_requests ? `${one.requests} of ${one.max_requests}` : count(one.requests),
    count(one.waiting),
    count(one.decode_tokens),
    one.prefill_tokens_per_s ? count(Math.round(one.prefill_tokens_per_s)) : "–",
    count(one.pending_tokens),
    el("div", { class: "bar", vars: { "--part": one.pending_tokens / most } }),
  ]);
  return table(
    "Workers",
    [
      "worker",
      "state",
      "breaker",
      "index",
      "#in flight",
      "#before a token",
      "#decoding tokens",
      "#prefill tok/s",
      "#pending uncached",
      "~",
    ],
    rows,
  );
}

/** DNS names that workers come from. */
function namesTable(names) {
  if (!names.length) return [];
  const rows = names.map((one) => [
    el("span", { class: "mono", text: one.name }),
    count(one.workers),
    ms(one.age_s * 1e3),
    one.why ? el("strong", { class: "problem", text: one.why }) : "answered",
  ]);
  return [table("Names of workers", ["name", "#workers", "#answered before", "DNS"], rows)];
}

function stateOf(one) {
  const start = one.start && one.start.state !== "up" ? `, process ${one.start.state}` : "";
  if (one.state === "up" && one.warm < 1)
    return `up, slow start: ${percent(one.warm)} of its share`;
  if (one.state === "up") return "up";
  const why = one.state === "down" && one.why ? `: ${one.why}` : "";
  return el("strong", { class: "problem", text: `${one.state}${why}${start}` });
}

function queueTable(queue) {
  const wait = queue.predicted_wait_s
    ? `a place is expected after ${ms(queue.predicted_wait_s * 1e3)}`
    : "";
  const about = el("p", {
    class: "label",
    text: [`${count(queue.waiting)} of at most ${count(queue.most)} wait`, wait]
      .filter(Boolean)
      .join("; "),
  });
  if (!queue.lines.length) return [about];
  const rows = queue.lines.map((line) => [
    line.tier,
    String(line.priority),
    nameOf(line.tenant),
    line.model || "any",
    count(line.waiting),
    ms(line.oldest_s * 1e3),
  ]);
  const titles = ["tier", "#priority", "tenant", "model", "#waiting", "#oldest"];
  return [about, table("Queue by tier and tenant", titles, rows)];
}

function predictionsTable({ states, tokens }) {
  const rows = Object.entries(states).map(([state, counts]) => [
    state.toUpperCase(),
    count(counts.equal),
    count(counts.under),
    count(counts.over),
    counts.silent_misses
      ? el("strong", { class: "problem", text: count(counts.silent_misses) })
      : "0",
  ]);
  const titles = ["index", "#as predicted", "#more found", "#fewer found", "#silent misses"];
  const share = tokens.prompt ? percent(tokens.cached / tokens.prompt) : "–";
  const about = `Since the start: ${count(tokens.prompt)} prompt tokens, engines found ${share}`;
  return [
    el("p", { class: "label", text: `${about}; ${count(tokens.predicted_cached)} were predicted` }),
    table("Predictions by what is known of a worker's cache", titles, rows),
  ];
}

function tenantsTable(now) {
  const rows = now.tenants.map((one) => [
    nameOf(one.name),
    one.tier,
    String(one.priority),
    left(one.requests_per_min),
    left(one.tokens_per_min),
    one.parallel ? `${one.running} of ${one.parallel}` : count(one.running),
    count(one.waiting),
    count(one.served_tokens),
  ]);
  const titles = [
    "tenant",
    "tier",
    "#priority",
    "#requests/min left",
    "#tokens/min left",
    "#running",
    "#waiting",
    "#served tokens",
  ];
  const more = now.known - rows.length;
  return [
    table("Tenants and their limits", titles, rows),
    more > 0 ? el("p", { class: "label", text: `and ${count(more)} that got less` }) : "",
  ];
}

function left(bucket) {
  return bucket ? `${count(bucket.remaining)} of ${count(bucket.limit)}` : "no limit";
}
