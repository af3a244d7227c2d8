// 2 Prepare: the one prompt that the messages became, and what the engine was asked for.
import { block, el, facts, key, visible } from "../dom.js";
import { count } from "../format.js";
import { missing } from "./missing.js";

const MOST_CHARS = 60000; // of a prompt on the screen

export function figure(record) {
  return record.prompt ? `${count(record.prompt.text.length)} ch` : "";
}

export function view(record) {
  const { prompt, params } = record;
  const asked = Object.entries(params ?? {}).map(([name, value]) => [
    name,
    typeof value === "object" ? JSON.stringify(value) : String(value),
  ]);
  const draws = asked.length ? block("What the engine got", "", facts(asked)) : null;
  if (!prompt) return [...missing(record, "the prompt"), draws].filter(Boolean);
  const marks = key([
    ["is-template", "put there by the chat template"],
    ["is-content", "what was said"],
  ]);
  return [block("Rendered prompt", "", marks, rendered(prompt)), draws].filter(Boolean);
}

function rendered({ text, spans }) {
  const characters = Array.from(text); // spans count characters, as Python does
  const parts = spans.length ? spans : [{ start: 0, end: characters.length, kind: "content" }];
  const box = el("div", {
    class: "prompt",
    role: "group",
    "aria-label": "Rendered prompt",
    dir: "ltr",
  });
  for (const { start, end, kind, role } of parts) {
    if (start >= MOST_CHARS) break;
    const said = characters.slice(start, Math.min(end, MOST_CHARS)).join("");
    const shown = kind === "template" ? visible(said).replaceAll("·", " ") : said;
    box.append(
      el("span", {
        class: kind === "template" ? "template" : "content",
        title: role || null,
        text: shown,
      }),
    );
  }
  if (characters.length <= MOST_CHARS) return box;
  return el(
    "div",
    {},
    box,
    el("p", {
      class: "label",
      text: `The first ${count(MOST_CHARS)} of ${count(characters.length)} characters.`,
    }),
  );
}
