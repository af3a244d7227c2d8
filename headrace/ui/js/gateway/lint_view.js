// Prompts that could share more of their beginning: where they part, why, and what that costs.
import { block, el, facts, table, visible } from "../dom.js";
import { clock, count, percent } from "../format.js";
import { lint } from "./watch.js";
import { kindOf, nameOf } from "./words.js";

export function startLintView(box) {
  const about = el("p", {
    class: "label",
    text:
      "Prompts that part early and go on alike: had what differs stood behind what stays, " +
      "the engine would have found the rest in its cache.",
  });
  const tenants = el("div", { class: "fleet-parts" });
  box.append(el("h2", { text: "Prefix lint" }), about, tenants);
  lint.watch((said) => {
    box.dataset.looked = String(sum(said, "looked"));
    const focused = document.activeElement?.dataset.key;
    tenants.replaceChildren(...view(said));
    if (focused) linkOf(tenants, focused)?.focus();
  });
}

/** The link to the newest request of a finding, also when that is another one. */
function linkOf(box, key) {
  return [...box.querySelectorAll("a")].find((one) => one.dataset.key === key);
}

function sum(said, name) {
  return (said.tenants ?? []).reduce((total, one) => total + one[name], 0);
}

function view(said) {
  if (said.problem) return [el("p", { class: "problem", text: said.problem })];
  if (!said.tenants.length) return [el("p", { class: "label", text: "No prompt yet." })];
  return said.tenants.map((one) => tenantOf(one, said.excerpts));
}

function tenantOf(one, excerpts) {
  const share = one.prompt_tokens ? one.lost_tokens / one.prompt_tokens : 0;
  const node = block(
    nameOf(one.name),
    "",
    facts([
      ["prompts looked at", `${count(one.looked)} of ${count(one.requests)}`],
      ["their tokens", count(one.prompt_tokens)],
      ["lost by order", one.lost_tokens ? `${count(one.lost_tokens)}, ${percent(share)}` : "0"],
    ]),
    one.findings.length
      ? findings(one.findings, excerpts, one.name)
      : el("p", { class: "label", text: "Nothing found." }),
  );
  node.dataset.tenant = one.name;
  return node;
}

function findings(rows, excerpts, tenant) {
  const most = Math.max(...rows.map((one) => one.lost_tokens));
  const made = rows.map((one) => {
    const [what, advice] = kindOf(one.kind);
    return [
      el(
        "span",
        {},
        el("span", { class: "mono", text: one.path }),
        `, character ${count(one.characters)}`,
      ),
      el("span", {}, what, el("br"), el("span", { class: "label", text: advice })),
      ...(excerpts ? [excerptOf(one)] : []),
      one.model || "any",
      el("a", {
        href: `#/decision/${encodeURIComponent(one.request)}`,
        "data-key": JSON.stringify([tenant, one.model, one.place, one.kind]),
        text: clock(one.last_s),
        "aria-label": `newest request, ${clock(one.last_s)}`,
      }),
      count(one.seen),
      count(one.shared_tokens),
      count(one.lost_tokens),
      el("div", { class: "bar", vars: { "--part": one.lost_tokens / most } }),
    ];
  });
  const titles = [
    "where they part",
    "what differs",
    ...(excerpts ? ["there, and in another prompt"] : []),
    "model",
    "newest",
    "#prompts",
    "#tokens before",
    "#tokens lost",
    "~",
  ];
  return table("Findings, what costs most first", titles, made);
}

function excerptOf(one) {
  return el(
    "span",
    { class: "text" },
    el("span", { text: visible(one.excerpt) }),
    el("br"),
    el("span", { class: "label", text: visible(one.other) }),
  );
}
