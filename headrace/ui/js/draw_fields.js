// The fields of a request beside its messages.
import { el } from "./dom.js";

const FIELDS = [
  ["temperature", { min: 0, max: 2, step: "any" }],
  ["max_tokens", { min: 1, step: 1 }],
  ["top_p", { min: 0, max: 1, step: "any" }],
  ["seed", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }],
];

/** {node, read()}. read gives the members of a body; a field left empty is not sent. */
export function drawFields() {
  const inputs = Object.fromEntries(
    FIELDS.map(([name, limits]) => [
      name,
      el("input", {
        type: "number",
        name,
        inputmode: "decimal",
        placeholder: "default",
        ...limits,
      }),
    ]),
  );
  const schema = el("textarea", {
    name: "schema",
    rows: 3,
    spellcheck: "false",
    placeholder: '{"type": "object", ...}',
  });
  const system = el("textarea", { name: "system", rows: 2 });
  const rows = FIELDS.map(([name]) => el("label", {}, name, inputs[name]));
  const node = el(
    "details",
    { class: "draws" },
    el("summary", { text: "Sampling, schema, system" }),
    el(
      "div",
      { class: "draws-grid" },
      rows,
      el("label", { class: "wide" }, "JSON schema of the answer", schema),
      el("label", { class: "wide" }, "System message", system),
    ),
  );
  return {
    node,
    read: () => ({ system: system.value.trim(), fields: read(inputs, schema.value.trim()) }),
  };
}

function read(inputs, schema) {
  const body = {};
  for (const [name, input] of Object.entries(inputs)) {
    if (!input.validity.valid) throw new Error(`${name}: ${input.validationMessage}`);
    if (input.value !== "") body[name] = Number(input.value);
  }
  if (schema) {
    body.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", schema: parsed(schema) },
    };
  }
  return body;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the schema is not JSON: ${error.message}`);
  }
}
