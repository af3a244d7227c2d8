// What the gateway's short names mean.

const REASONS = {
  prefix: "the best score, and nobody holds more of the prompt",
  "holder is busy": "the best score: whoever holds more is busier than that is worth",
  cold: "nobody holds a share worth going for, so the least load",
  load: "the least load",
  balance: "requests are unevenly spread, so the fewest",
  draw: "drawn by chance",
  turn: "chosen longest ago",
  hash: "where the prompt's beginning hashes to",
  overflow: "where its beginning hashes to is too busy: the next on the ring",
  session: "where its session hashes to",
  score: "the most points",
  kept: "it alone has what was asked for (a kept response, or a stream)",
};

export function reasonOf(name) {
  return REASONS[name] ?? name;
}

/** A tenant; where there are no keys all are one, without a name. */
export function nameOf(tenant) {
  return tenant || "everybody";
}

const KINDS = {
  time: ["a date or a time", "put it behind what stays, or make it coarser"],
  id: ["an id or a number", "put it behind what stays"],
  order: ["the order of the same things", "sort them, so that it is always one order"],
  added: ["something was put in front of what stays", "append it instead"],
  dropped: ["something in front was left out", "drop much at once, and rarely"],
  text: ["other text", "put it behind what stays"],
};

/** What differs, and what helps. */
export function kindOf(name) {
  return KINDS[name] ?? [name, ""];
}

/** What became of a prediction: [words, whether it is a fault]. */
export function verdictOf({ predicted, confirmed, silent_miss: silent }) {
  if (confirmed === null) return ["the worker has not said what it found", false];
  if (silent) return ["a silent miss: the worker found none of it and said nothing else", true];
  if (confirmed < predicted) return [`${predicted - confirmed} fewer than predicted`, false];
  if (confirmed > predicted) return [`${confirmed - predicted} more than predicted`, false];
  return ["as predicted", false];
}
