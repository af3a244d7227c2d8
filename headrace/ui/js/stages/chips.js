// Tokens as coloured spans with their ids; the chosen one is described below them.
import { capped } from "../capped.js";
import { el, visible } from "../dom.js";
import { mark, rove } from "../roving.js";

const PORTION = 600;
const TINTS = 5;

/** tokens: [{id, text, bytes}]; first: position of the first; words: what they are. */
export function chips(tokens, first, words) {
  const box = el("div", {
    class: "tokens",
    role: "listbox",
    "aria-label": words,
    "aria-orientation": "horizontal",
  });
  const told = el("p", { class: "said-of", "aria-live": "polite" });
  const all = () => [...box.children];
  const choose = (chip) => {
    mark(all(), chip);
    const token = tokens[Number(chip.dataset.at)];
    told.textContent = describe(token, first + Number(chip.dataset.at));
  };
  rove(box, all, choose);
  const made = capped(
    box,
    tokens,
    PORTION,
    (token, at) => chip(token, first + at, at),
    () => mark(all(), box.querySelector('[aria-selected="true"]')),
  );
  return [...made, told];
}

function chip(token, position, at) {
  const special = token.text === "" || /^<[|/]?.+>$/.test(token.text);
  const name = `tok ${special ? "special" : `tint-${position % TINTS}`}`;
  const node = el(
    "div",
    {
      class: name,
      role: "option",
      "aria-label": `${spelled(token)}, id ${token.id}`,
    },
    el("span", { class: "what", text: spelled(token) }),
    el("span", { class: "id", text: String(token.id) }),
  );
  node.dataset.at = String(at);
  node.dataset.id = String(token.id);
  return node;
}

/** Its text; its bytes where they are a part of a character. */
function spelled({ text, bytes }) {
  return text && !text.includes("\ufffd") ? visible(text) : `0x${bytes}`;
}

function describe(token, position) {
  const pairs = (token.bytes ?? "").replace(/(..)(?=.)/g, "$1 ");
  const parts = [
    `position ${position}`,
    `id ${token.id}`,
    `bytes ${pairs || "none"}`,
    `text ${spelled(token)}`,
  ];
  if (Number.isFinite(token.t_ms)) parts.push(`after ${token.t_ms.toFixed(1)} ms`);
  return parts.join("   ");
}
