// 3 Tokenize: the prompt's tokens.
import { block } from "../dom.js";
import { chips } from "./chips.js";
import { missing } from "./missing.js";

export function figure(record) {
  return record.usage?.prompt_tokens ? `${record.usage.prompt_tokens} tok` : "";
}

export function view(record) {
  const tokens = record.tokens?.prompt;
  if (!tokens?.length) return missing(record, "the tokens of the prompt");
  return [
    block(
      "Tokens of the prompt",
      `${tokens.length}; each with its id, choose one for its bytes`,
      ...chips(tokens, 0, "Tokens of the prompt"),
    ),
  ];
}
