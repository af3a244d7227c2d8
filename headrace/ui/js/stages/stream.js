// 11 Stream: what left with each token, what was held back, and what it all cost.
import { capped } from "../capped.js";
import { block, el, facts, key, table, visible } from "../dom.js";
import { ms } from "../format.js";
import { missing } from "./missing.js";

const PORTION = 100;

export function figure(record) {
  return (
    [...new Set(record.finish_reasons)].filter(Boolean).join(" ") ||
    (record.state === "running" ? "running" : "")
  );
}

export function view(record) {
  const { usage = {}, timing = {}, cost } = record;
  const time = (value) => (Number.isFinite(value) ? ms(value) : null);
  const counts = facts([
    ["prompt", usage.prompt_tokens],
    ["of it cached", usage.cached_tokens],
    ["output", usage.completion_tokens],
    ["of it reasoning", usage.reasoning_tokens],
    ["ended by", (record.finish_reasons ?? []).join(", ")],
  ]);
  const times = facts([
    ["queue", time(timing.queue_ms)],
    ["prefill", time(timing.prefill_ms)],
    ["decode", time(timing.decode_ms)],
    ["share of the device", time(timing.device_ms)],
    ["cost", cost ? `${cost.amount} ${cost.currency}` : "no prices set"],
  ]);
  return [block("Usage and cost", "", counts, times), ...leaving(record)];
}

function leaving(record) {
  const { text } = record;
  if (!text?.length) return missing(record, "its text, piece by piece");
  const made = table("Text that left", ["#token", "#choice", "left", "held back after it"], []);
  const [, more] = capped(made.tBodies[0], text, PORTION, (one) =>
    el(
      "tr",
      {},
      el("td", { class: "num", text: String(one.token_index) }),
      el("td", { class: "num", text: String(one.choice) }),
      el("td", {}, el("span", { class: "text", text: visible(one.emitted ?? "") })),
      el("td", {}, heldOf(one.held)),
    ),
  );
  return [
    block(
      "From token to text",
      "half a character and the start of a stop string wait",
      key([["is-held", "held back"]]),
      made,
      more,
    ),
  ];
}

function heldOf(held) {
  if (!held) return "";
  const words =
    typeof held === "string"
      ? held
      : [held.bytes && `bytes ${held.bytes}`, held.text && visible(held.text)]
          .filter(Boolean)
          .join(" ");
  return words ? el("span", { class: "held mono", text: words }) : "";
}
