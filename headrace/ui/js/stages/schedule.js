// 5 Schedule: which sequences got how many tokens in each step.
import { block, facts } from "../dom.js";
import { ms } from "../format.js";
import { missing } from "./missing.js";
import { timeline } from "./timeline.js";

export function figure(record) {
  if (record.steps?.length) return `${record.steps.length} steps`;
  return Number.isFinite(record.timing?.queue_ms) ? `waited ${ms(record.timing.queue_ms)}` : "";
}

export function view(record) {
  const waited = facts([
    [
      "waited for its first step",
      Number.isFinite(record.timing?.queue_ms) ? ms(record.timing.queue_ms) : null,
    ],
  ]);
  if (!record.steps?.length) return [waited, ...missing(record, "its steps")];
  return [
    waited,
    block(
      "Steps",
      "tokens in each; the chosen one and the next below",
      ...timeline(record.key, record.steps),
    ),
  ];
}
