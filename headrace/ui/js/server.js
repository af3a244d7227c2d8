// The server that this page came from, and the key it may ask for.
import { events } from "./sse.js";
import { cell } from "./cell.js";

const ROOT = new URL("../../../../", import.meta.url); // this is ui/files/VERSION/js/server.js
const KEY = "headrace-key"; // in sessionStorage alone: gone with the tab

/** true while the server wants a key that it has not got. */
export const locked = cell(false);

/** What the server said against a request. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** fetch on this server, with the key. Throws a Refusal unless the answer is a 2xx. */
export async function ask(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const shown = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(new URL(path, ROOT), {
    ...options,
    headers: { ...headers, ...shown },
  });
  if (response.ok) {
    locked.set(false);
    return response;
  }
  if (response.status === 401) locked.set(true);
  throw new Refusal(response.status, await reasonOf(response));
}

/** What a GET answers. Seeds have 64 bits, numbers here 53: large ones stay text. */
export async function getJson(path) {
  return (await getSized(path)).found;
}

/** The same, with its length in characters, and how many processes did not say what they hold. */
export async function getSized(path) {
  const response = await ask(path);
  const text = await response.text();
  const found = JSON.parse(text.replace(/("seed":)(-?\d{16,})/g, '$1"$2"'));
  const unanswered = Number(response.headers.get("x-headrace-unanswered"));
  return { found, chars: text.length, unanswered };
}

/** A POST whose answer is a stream: the response, whose headers are there, and its events. */
export async function postStream(path, body, { headers = {}, signal } = {}) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(body),
    signal,
  });
  return { response, events: events(response) };
}

async function reasonOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
