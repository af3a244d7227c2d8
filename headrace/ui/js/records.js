// The ring of requests, and the whole record of the chosen one.
import { cell } from "./cell.js";
import { getJson, getSized } from "./server.js";
import { place } from "./route.js";

const REST_MS = 1000; // between looks, while somebody looks
const LIGHT_CHARS = 500_000; // a record this long is fetched at every look, a longer one less often
export const LIMIT = 50;

/** Light records, newest first. */
export const ring = cell([]);
/** HTTP processes that did not answer: their requests are missing there. */
export const unanswered = cell(0);
/** {id, record} of the chosen request, {id, problem} or {}; its id or key, as it was chosen. */
export const chosen = cell({});
/** The eleven stages with their metrics. */
export const stages = cell([]);

let looking = false;
let quick = 0;
let skip = 0; // looks until the chosen record is fetched again

export function startRecords() {
  place.watch(() => look());
  document.addEventListener("visibilitychange", () => document.hidden || look());
  setInterval(() => document.hidden || look(), REST_MS);
  return look();
}

/** Look now: something has begun or ended. */
export async function look() {
  if (looking) {
    quick += 1; // once more when this look is over
    return;
  }
  looking = true;
  try {
    do {
      quick = 0;
      await Promise.all([
        lookAtStages(),
        lookAtRing(),
        lookAtChosen(),
      ]);
    } while (quick && !document.hidden);
  } finally {
    looking = false;
  }
}

// Where a look fails, what was known stays; the bar at the top says that the server is away.
async function lookAtStages() {
  try {
    stages.set(await getJson("ui/api/stages"));
  } catch {}
}

async function lookAtRing() {
  try {
    const { found, unanswered: silent } = await getSized(`ui/api/requests?limit=${LIMIT}`);
    unanswered.set(silent);
    ring.set(found);
  } catch {}
}

async function lookAtChosen() {
  const { id } = place.value;
  if (!id) return chosen.set({});
  const { id: asked, record } = chosen.value;
  const known = asked === id && record;
  if (known && (record.state === "done" || (skip -= 1) > 0)) return;
  try {
    // A newer request with its id does not take the place of one that is looked at.
    const name = encodeURIComponent(known ? record.key : id);
    const { found, chars } = await getSized(`ui/api/requests/${name}`);
    skip = chars / LIGHT_CHARS;
    if (place.value.id === id) chosen.set({ id, record: found });
  } catch (error) {
    const { id: shown, problem } = chosen.value;
    if (place.value.id === id && (shown !== id || problem !== error.message))
      chosen.set({ id, problem: error.message });
  }
}
