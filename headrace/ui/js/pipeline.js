// The eleven stages as tabs in three phases, and the panel of the open one.
import { el, facts } from "./dom.js";
import { metric, metricWhole } from "./format.js";
import { perFrame } from "./frame.js";
import { chosen, stages } from "./records.js";
import { mark, rove } from "./roving.js";
import { addressOf, go, place } from "./route.js";
import { sameId } from "./same_id.js";
import { VIEWS } from "./stages/views.js";

const PHASES = {
  ingest: "Ingest: text to tokens",
  compute: "Compute: tokens to logits",
  emit: "Emit: logits to text",
};
const NOTHING =
  "Choose a request from the list, or ask something in the chat: each stage then shows its part.";

export function startPipeline(box) {
  const tabs = el("div", { class: "stages", role: "tablist", "aria-label": "Stages of a request" });
  const panel = el("div", { class: "open", role: "tabpanel", id: "stage-panel", tabindex: "0" });
  const phases = Object.entries(PHASES).map(([name, words]) =>
    el("span", { class: `phase phase-${name}`, text: words }),
  );
  box.append(
    el(
      "div",
      { class: "rail" },
      el("div", { class: "phases", "aria-hidden": "true" }, phases),
      tabs,
    ),
    panel,
  );
  rove(
    tabs,
    () => [...tabs.children],
    (tab) => go({ stage: Number(tab.dataset.stage) }),
  );
  const showTabs = perFrame(() => fillTabs(tabs));
  const showPanel = perFrame(() => fillPanel(panel));
  const showMetric = () => {
    showTabs();
    const stage = current();
    if (!stage || panel.dataset.stage !== String(stage.number)) return showPanel();
    const metrics = panel.querySelector("[data-metric]");
    if (metrics) metrics.textContent = metricWhole(stage.metric, stage.value);
  };
  stages.watch(showMetric);
  chosen.watch(showTabs);
  chosen.watch(() => isBusy(panel) || showPanel());
  place.watch(showTabs);
  place.watch(() => {
    const { stage } = place.value;
    tabs.children[stage - 1]?.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (panel.dataset.stage !== String(stage)) box.closest(".pane").scrollTop = 0;
    showPanel();
  });
}

/** Whether somebody is at something in the panel: it is not taken from under their hands. */
function isBusy(panel) {
  const running =
    chosen.value.record?.state === "running" && panel.dataset.of === chosen.value.record.key;
  return running && panel !== document.activeElement && panel.contains(document.activeElement);
}

function current() {
  return stages.value.find((stage) => stage.number === place.value.stage);
}

function fillTabs(tabs) {
  const { record } = chosen.value;
  if (tabs.children.length !== stages.value.length)
    tabs.replaceChildren(...stages.value.map(newTab));
  for (const [at, stage] of stages.value.entries()) {
    const [, , live, own] = tabs.children[at].children;
    live.textContent = metric(stage.metric, stage.value);
    own.textContent = record ? VIEWS[stage.number].figure(record) : "";
  }
  mark([...tabs.children], tabs.children[place.value.stage - 1]);
}

function newTab(stage) {
  const tab = el(
    "button",
    {
      type: "button",
      class: "stage",
      role: "tab",
      id: `stage-${stage.number}`,
      "aria-controls": "stage-panel",
      title: stage.problem,
    },
    el("span", { class: "n", text: String(stage.number) }),
    el("span", { class: "name", text: stage.name }),
    el("span", { class: "live" }),
    el("span", { class: "own" }),
  );
  tab.dataset.stage = String(stage.number);
  return tab;
}

function fillPanel(panel) {
  const stage = current();
  if (!stage) return;
  const { record, problem } = chosen.value;
  panel.setAttribute("aria-labelledby", `stage-${stage.number}`);
  panel.dataset.of = record?.key ?? "";
  panel.dataset.state = record?.state ?? "";
  panel.dataset.stage = String(stage.number);
  const head = el(
    "div",
    { class: "open-head" },
    el("h2", {}, el("span", { class: "n", text: String(stage.number) }), stage.name),
    el("p", { text: sentence(stage.problem) }),
    el(
      "div",
      { class: "modules" },
      stage.modules.map((one) => el("code", { text: `headrace/${one}` })),
    ),
    stage.metric
      ? facts([
          [
            stage.metric,
            el("span", { "data-metric": true, text: metricWhole(stage.metric, stage.value) }),
          ],
        ])
      : null,
  );
  const body = record
    ? [...remarks(record), ...VIEWS[stage.number].view(record)]
    : [el("p", { class: "empty", text: problem ?? NOTHING })];
  const name = panel.contains(document.activeElement) ? nameOf(document.activeElement) : "";
  panel.replaceChildren(head, ...body);
  if (name) (find(panel, name) ?? panel).focus({ preventScroll: true });
}

/** What tells one thing of a panel from the others, in this panel and in the next of its kind. */
function nameOf(node) {
  return `${node.dataset.at ?? ""} ${node.getAttribute("aria-label") ?? node.textContent}`;
}

function find(panel, name) {
  return [...panel.querySelectorAll("button, input, [tabindex]")].find(
    (one) => nameOf(one) === name,
  );
}

/** Why a request failed, why its record is not all that was asked for, and who has its id too. */
function remarks({ error, note, cut, same_id: others, unanswered }) {
  const failed = error
    ? [el("p", { class: "problem", text: `It ended with an error: ${error}` })]
    : [];
  const silent = unanswered && `HTTP processes that did not say who has this id: ${unanswered}`;
  const said = [note, cut, silent].filter(Boolean).map((text) => el("p", { class: "label", text }));
  return [...failed, ...said, ...sameId(others, addressOf)];
}

function sentence(words) {
  return words ? `${words[0].toUpperCase()}${words.slice(1)}.` : "";
}
