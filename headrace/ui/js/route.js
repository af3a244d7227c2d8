// What is shown is in the address: #/request/ID/STAGE, #/request/KEY/STAGE or #/fleet.
import { cell } from "./cell.js";

const STAGES = 11;

let before = { view: "request", id: "", stage: 1 };

/** {view, id or key of a request, stage} */
export const place = cell(read());

addEventListener("hashchange", () => place.set(read()));

/** Go somewhere: what is not named stays. */
export function go(change) {
  const next = { ...place.value, view: "request", ...change };
  const hash = next.view === "fleet" ? "#/fleet" : addressOf(next.id, next.stage);
  if (hash !== location.hash) location.hash = hash;
}

/** Where a request is shown. */
export function addressOf(id, stage = place.value.stage) {
  return `#/request/${encodeURIComponent(id)}/${stage}`;
}

/** Another request, without leaving what is looked at. */
export function choose(id) {
  if (place.value.view !== "fleet") return go({ id });
  before = { ...before, id };
  place.set(before);
}

function read() {
  const [, view, id = "", stage = ""] = location.hash.split("/");
  if (view === "fleet") return (before = { ...before, view });
  const number = Number(stage);
  const known = Number.isInteger(number) && number >= 1 && number <= STAGES;
  before = { view: "request", id: decoded(id) || before.id, stage: known ? number : before.stage };
  return before;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
