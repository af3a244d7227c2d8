// Elements. Whatever is shown goes in as text: no function here takes markup.

const SIGNS = new Map([
  [9, "→"],
  [10, "↵"],
  [13, "␍"],
  [32, "·"],
  [127, "␡"],
]);

/** An element. props: class, text, on: {event: handler}, vars: CSS variables, else attributes. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on")
      for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name === "vars")
      for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

/** Terms and values: `facts([["id", "req-1"], ...])`; values that are missing are left out. */
export function facts(pairs, name = "facts") {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: name },
    known.map(([term, value]) =>
      el(
        "div",
        {},
        el("dt", { text: term }),
        el("dd", {}, value instanceof Node ? value : String(value)),
      ),
    ),
  );
}

/** A part of a stage's panel: a heading, a remark beside it, what it holds. */
export function block(title, remark, ...children) {
  const head = el("h3", {}, title, remark ? el("span", { class: "label", text: remark }) : null);
  return el("section", { class: "block" }, head, ...children);
}

/**
 * A table. columns: "title", "#title" for figures, "~" for bars. rows: arrays of texts or nodes, or
 * {cells, class}.
 */
export function table(caption, columns, rows) {
  const kinds = columns.map((title) => ({ "#": "num", "~": "wide" })[title[0]] ?? null);
  const head = columns.map((title, at) =>
    el("th", { scope: "col", class: kinds[at], text: kinds[at] ? title.slice(1) : title }),
  );
  const body = rows.map((row) => {
    const { cells, class: name } = Array.isArray(row) ? { cells: row } : row;
    const made = cells.map((cell, at) =>
      el("td", { class: kinds[at] }, cell instanceof Node ? cell : String(cell ?? "")),
    );
    return el("tr", { class: name }, made);
  });
  return el(
    "table",
    {},
    el("caption", { class: "unseen", text: caption }),
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, body),
  );
}

/** What the colours mean: [[class, words], ...]. */
export function key(entries) {
  return el(
    "span",
    { class: "key" },
    entries.map(([name, words]) => el("span", { class: name, text: words })),
  );
}

/** A text in which blanks and characters that only steer others can be seen. */
export function visible(text) {
  let out = "";
  for (const character of text) {
    const code = character.codePointAt(0);
    if (code === 10) out += "↵\n";
    else if (SIGNS.has(code)) out += SIGNS.get(code);
    else if (isSteering(code)) out += `‹${code.toString(16).toUpperCase().padStart(4, "0")}›`;
    else out += character;
  }
  return out;
}

function isSteering(code) {
  return (
    code < 32 ||
    (code >= 0x80 && code < 0xa0) ||
    code === 0xad ||
    code === 0x61c ||
    code === 0xfeff ||
    (code >= 0x200b && code <= 0x200f) ||
    (code >= 0x2028 && code <= 0x202e) ||
    (code >= 0x2060 && code <= 0x206f)
  );
}
