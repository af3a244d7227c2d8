// What the gateway says, once a second. Nothing is asked while nobody looks.
import { cell } from "../cell.js";
import { getJson } from "../server.js";
import { place } from "./route.js";

const REST_MS = 1000; // between looks
export const LIMIT = 50;
export const KEPT = 120; // moments in the small plots: two minutes

/** {workers, names, policy, queue, predictions, tenants, known} at every look; null before. */
export const moment = cell(null);
/** The same, told when something is another. */
export const fleet = cell(null);
/** The newest decisions, newest first. */
export const newest = cell([]);
/** Whether only misses that were silent are listed. */
export const silent = cell(false);
/** {id, decision} of the chosen request, {id, problem}, or {}; its id or key, as it was asked. */
export const chosen = cell({});
/** What /gateway/lint says, {problem} where it is off, or null before the first look. */
export const lint = cell(null);
/** "", or why nothing new is known. */
export const trouble = cell("");
/** The last KEPT moments. */
export const history = [];

let looking = false;
let again = false;

export function startWatch() {
  place.watch(look);
  silent.watch(look);
  document.addEventListener("visibilitychange", () => document.hidden || look());
  setInterval(() => document.hidden || look(), REST_MS);
  return look();
}

/** Look now: something was chosen. */
export async function look() {
  if (looking) {
    again = true; // once more when this look is over
    return;
  }
  looking = true;
  try {
    do {
      again = false;
      await lookOnce();
    } while (again && !document.hidden);
  } finally {
    looking = false;
  }
}

async function lookOnce() {
  try {
    const only = silent.value;
    const [workers, queue, predictions, tenants, decisions] = await Promise.all([
      getJson("workers"),
      getJson("queue"),
      getJson("predictions"),
      getJson(`tenants?limit=${LIMIT}`),
      getJson(`decisions?limit=${LIMIT}&silent=${only ? 1 : 0}`),
      lookAtChosen(),
      lookAtLint(),
    ]);
    const now = { ...workers, queue, predictions, ...tenants };
    history.push(now);
    if (history.length > KEPT) history.shift();
    moment.set(now);
    setIfOther(fleet, now);
    if (only === silent.value) setIfOther(newest, decisions.decisions);
    trouble.set("");
  } catch (error) {
    trouble.set(error.status ? error.message : "the gateway does not answer");
  }
}

/** What is shown stays in the document while nothing of it changes. */
function setIfOther(target, value) {
  if (JSON.stringify(target.value) !== JSON.stringify(value)) target.set(value);
}

/** Only while it is shown. */
async function lookAtLint() {
  if (place.value.view !== "lint") return;
  try {
    setIfOther(lint, await getJson(`lint?limit=${LIMIT}`));
  } catch (error) {
    if (error.status !== 404) throw error;
    setIfOther(lint, { problem: error.message });
  }
}

async function lookAtChosen() {
  const { id } = place.value;
  if (!id) return chosen.set({});
  const { id: asked, decision } = chosen.value;
  if (asked === id && decision && decision.status !== null) return;
  try {
    const found = await getJson(`decisions/${encodeURIComponent(id)}`);
    if (place.value.id === id) chosen.set({ id, decision: found });
  } catch (error) {
    if (error.status !== 404) throw error;
    const { id: shown, problem } = chosen.value;
    if (place.value.id === id && (shown !== id || problem !== error.message))
      chosen.set({ id, problem: error.message });
  }
}
