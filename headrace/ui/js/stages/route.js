// 1 Route: what came in, and when each stage had it.
import { block, el, facts, table } from "../dom.js";
import { clock, ms } from "../format.js";

const NAMES = {
  arrived: "came in",
  parsed: "body read and checked",
  rendered: "prompt rendered",
  tokenized: "tokens",
  submitted: "at the engine",
  scheduled: "in its first step",
  first_token: "first token",
  last_token: "last token",
  done: "answered",
};

export function figure(record) {
  return record.endpoint.split("/").at(-1) === "completions" && record.endpoint.includes("chat")
    ? "chat"
    : record.endpoint.replace("/v1/", "");
}

export function view(record) {
  const about = facts([
    ["endpoint", record.endpoint],
    ["model", record.model],
    ["request", record.id],
    ["came in", clock(record.created_s)],
    ["state", record.state],
    ["recorded", record.full ? "whole" : "lightly"],
  ]);
  return [
    about,
    block("Time", "each bar is the way from the moment before", times(record.times_ms ?? {})),
  ];
}

function times(at_ms) {
  const known = Object.keys(NAMES)
    .filter((name) => Number.isFinite(at_ms[name]))
    .map((name) => [name, at_ms[name]]);
  const whole = Math.max(1e-9, ...known.map(([, time]) => time));
  const rows = known.map(([name, time], at) => {
    const before = at ? known[at - 1][1] : 0;
    const bar = el("div", {
      class: "bar",
      vars: { "--from": Math.min(1, before / whole), "--part": Math.max(0, time - before) / whole },
    });
    return [NAMES[name], ms(time), at ? `+${ms(Math.max(0, time - before))}` : "", bar];
  });
  const made = table("Times of the request", ["moment", "#after", "#step", "~"], rows);
  return made;
}
