// What the whole server does, twice a second. Nothing is asked while nobody looks.
import { ask } from "./server.js";
import { cell } from "./cell.js";
import { events } from "./sse.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
export const KEPT = 240; // moments in the small plots: two minutes

/** The newest moment, as /ui/api/live says it; null before the first. */
export const moment = cell(null);
/** "", or why there are no moments. */
export const trouble = cell("");
/** The last KEPT moments. */
export const history = [];

let stop = null;

export function startLive() {
  document.addEventListener("visibilitychange", () => {
    stop?.abort();
    stop = null;
    if (!document.hidden) follow();
  });
  if (!document.hidden) follow();
}

/** Begin again at once: there is a key now. */
export function again() {
  stop?.abort();
  follow();
}

async function follow() {
  const own = (stop = new AbortController());
  let wait_ms = FIRST_WAIT_MS;
  while (!own.signal.aborted) {
    try {
      const response = await ask("ui/api/live", { signal: own.signal });
      for await (const data of events(response)) {
        take(JSON.parse(data));
        wait_ms = FIRST_WAIT_MS;
      }
    } catch (error) {
      if (own.signal.aborted) return;
      trouble.set(error.status ? error.message : "the server does not answer");
      if (error.status === 401) return; // `again` is called when there is a key
    }
    if (own.signal.aborted) return;
    await new Promise((resolve) => setTimeout(resolve, wait_ms * (0.75 + Math.random() / 2)));
    wait_ms = Math.min(LONGEST_WAIT_MS, wait_ms * 2);
  }
}

function take(next) {
  history.push(next);
  if (history.length > KEPT) history.shift();
  trouble.set("");
  moment.set(next);
}
