// 4 Embed: ids become vectors that know their position.
import { capped } from "../capped.js";
import { block, el, facts, table, visible } from "../dom.js";
import { missing } from "./missing.js";

const PORTION = 100;

export function figure(record) {
  const { positions } = record;
  return positions ? `${positions.first}…${positions.last}` : "";
}

export function view(record) {
  const { positions, tokens } = record;
  if (!positions) return missing(record, "positions");
  const scaling =
    typeof positions.scaling === "object" && positions.scaling
      ? JSON.stringify(positions.scaling)
      : positions.scaling;
  const how = facts([
    ["positions", positions.kind],
    ["theta", positions.theta],
    ["scaling", scaling || "none"],
    ["rotated dimensions of a head", positions.rotary_dim],
    ["first", positions.first],
    ["last", positions.last],
  ]);
  const said = record.tokens
    ? [...(tokens.prompt ?? []), ...(tokens.output ?? []).filter((one) => !one.choice)]
    : [];
  const made = table("Positions", ["#position", "#id", "token", "from"], []);
  const prompt = tokens?.prompt?.length ?? 0;
  const rows = capped(made.tBodies[0], said, PORTION, (token, at) =>
    el(
      "tr",
      {},
      el("td", { class: "num", text: String(positions.first + at) }),
      el("td", { class: "num", text: String(token.id) }),
      el("td", { class: "mono", text: visible(token.text) }),
      el("td", { class: "label", text: at < prompt ? "prompt" : "output" }),
    ),
  );
  return [
    block("How positions enter", "", how),
    block("Position of each token", "", made, rows[1]),
  ];
}
