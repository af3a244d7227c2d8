// What a screen reader is told while text streams: whole sentences, now and then, never each token.
const REST_MS = 1500; // between two pieces
const MOST_CHARS = 600; // of one piece: nobody listens to more without asking

const region = document.getElementById("announce");
let waiting = "";
let timer = 0;

/** Say more of a text that goes on. */
export function sayMore(text) {
  waiting += text;
  if (waiting.length > 2 * MOST_CHARS) waiting = waiting.slice(0, 2 * MOST_CHARS);
  timer ||= setTimeout(speak, REST_MS, false);
}

/** Say a whole thing, after what waits. */
export function say(text) {
  waiting += (waiting ? " " : "") + text;
  clearTimeout(timer);
  speak(true);
}

function speak(all = false) {
  timer = 0;
  const end = all ? waiting.length : lastBreak(waiting);
  if (!end) {
    if (waiting) timer = setTimeout(speak, REST_MS, true);
    return;
  }
  region.textContent = waiting.slice(0, Math.min(end, MOST_CHARS));
  waiting = waiting.slice(end);
  if (waiting) timer = setTimeout(speak, REST_MS, false);
}

function lastBreak(text) {
  return Math.max(...[". ", "! ", "? ", "\n", ", "].map((sign) => text.lastIndexOf(sign) + 1));
}
