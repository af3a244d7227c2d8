// One request: who could have had it, what each score was made of, and what came of it.
import { block, el, facts, table } from "../dom.js";
import { clock, count, ms } from "../format.js";
import { sameId } from "../same_id.js";
import { addressOf } from "./route.js";
import { chosen } from "./watch.js";
import { nameOf, reasonOf, verdictOf } from "./words.js";

export function startDecisionView(box) {
  const show = () => box.replaceChildren(...view(chosen.value));
  const keep = (value) => {
    box.dataset.of = value.decision?.id ?? value.id ?? "";
    box.dataset.status = value.decision?.status ?? "";
    show();
  };
  chosen.watch(keep);
  keep(chosen.value);
}

function view({ decision, problem, id }) {
  if (problem)
    return [
      el("h2", { text: "Decision" }),
      el("p", { class: "problem", text: `${id}: ${problem}` }),
    ];
  if (!decision)
    return [
      el("h2", { text: "Decision" }),
      el("p", { class: "label", text: "Choose a request from the list." }),
    ];
  return [
    el("h2", {}, "Decision ", el("span", { class: "label mono", text: decision.id })),
    about(decision),
    cachedTokens(decision),
    ...sameId(decision.same_id, addressOf),
    ...decision.attempts.map((attempt, at) => attempted(attempt, at, decision.attempts.length)),
  ];
}

function about(decision) {
  return facts([
    ["came in", clock(decision.at_s)],
    ["tenant", nameOf(decision.tenant)],
    ["model", decision.model || "any"],
    ["prompt, estimated", `${count(decision.prompt_tokens_estimated)} tokens`],
    ["tokens not known here", decision.untokenised],
    ["policy", decision.policy],
    ["status", decision.status ?? "running"],
    ["took", decision.status === null ? null : ms(decision.took_s * 1e3)],
    ["prompt as the worker counts", decision.worker_said?.prompt_tokens],
    ["output tokens", decision.worker_said?.output_tokens],
  ]);
}

function cachedTokens({ cached_tokens: cached }) {
  const [words, fault] = verdictOf(cached);
  return block(
    "Cached tokens",
    "",
    facts([
      ["predicted", cached.predicted],
      ["engine says", cached.confirmed ?? "–"],
      ["known from", cached.index.toUpperCase()],
    ]),
    el("p", { class: fault ? "problem verdict" : "label verdict", text: words }),
  );
}

function attempted(attempt, at, attempts) {
  const title = attempts > 1 ? `Candidates of attempt ${at + 1}` : "Candidates";
  const chosenName = el("span", { class: "mono", text: attempt.worker });
  return block(
    title,
    `decided ${ms(attempt.after_s * 1e3)} after it came in`,
    el("p", {}, chosenName, `: ${reasonOf(attempt.reason)}.`),
    attempt.replicates
      ? el("p", { class: "label", text: "It will hold a second copy of this beginning." })
      : null,
    candidates(attempt),
    leftOut(attempt.left_out),
    ...attempt.old_names.map((one) =>
      el("p", {
        class: "label",
        text: `${one.name} had not been answered by DNS for ${ms(one.age_s * 1e3)}: ${one.why}`,
      }),
    ),
  );
}

function candidates(attempt) {
  const rows = attempt.candidates;
  const names = [...new Set(rows.flatMap((one) => one.terms.map((term) => term.name)))];
  const scores = rows.map((one) => one.score ?? 0);
  const [least, most] = [Math.min(0, ...scores), Math.max(0, ...scores)];
  const made = rows.map((one) => ({
    class: one.name === attempt.worker ? "mine" : null,
    cells: [
      el("span", { class: "mono", text: one.name }),
      one.name === attempt.worker ? "chosen" : "",
      one.index.toUpperCase(),
      count(one.predicted_cached_tokens),
      ...names.map((name) => termCell(one.terms.find((term) => term.name === name))),
      one.score === null ? "not looked at" : figure(one.score),
      el("div", {
        class: "bar",
        vars: { "--part": most > least ? ((one.score ?? least) - least) / (most - least) : 0 },
      }),
    ],
  }));
  const titles = ["worker", "choice", "index", "#held tokens", ...names.map((name) => `#${name}`)];
  return table("Candidates, the lowest score is best", [...titles, "#score", "~"], made);
}

function termCell(term) {
  if (!term) return "–";
  return el(
    "span",
    { class: "term" },
    el("span", { class: "label", text: `${figure(term.value)} × ${figure(term.weight)} = ` }),
    figure(term.adds),
  );
}

function leftOut(rows) {
  if (!rows.length) return null;
  return el("p", {
    class: "label",
    text: `No candidates: ${rows.map((one) => `${one.worker} (${one.why})`).join(", ")}`,
  });
}

function figure(value) {
  if (Number.isInteger(value) || !Number.isFinite(value)) return String(value);
  return Math.abs(value) >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(4)));
}
