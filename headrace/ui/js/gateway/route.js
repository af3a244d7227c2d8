// What is shown is in the address: #/fleet, #/decision/ID, #/decision/KEY or #/lint.
import { cell } from "../cell.js";

const VIEWS = ["fleet", "decision", "lint"];

let before = { view: "fleet", id: "" };

/** {view, id or key of a request} */
export const place = cell(read());

addEventListener("hashchange", () => place.set(read()));

/** Where it is shown why a request went where it went. */
export function addressOf(id) {
  return `#/decision/${encodeURIComponent(id)}`;
}

/** Show why a request went where it went. */
export function choose(id) {
  location.hash = addressOf(id);
}

function read() {
  const [, view, id = ""] = location.hash.split("/");
  const known = VIEWS.includes(view) ? view : "fleet";
  return (before = { view: known, id: decoded(id) || before.id });
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

export { VIEWS };
