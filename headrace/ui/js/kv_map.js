// Every block of the KV cache as a cell: free, cached, used, shared. Those of a request are marked.
import { el, key } from "./dom.js";
import { count } from "./format.js";
import { colours } from "./plot.js";
import { getJson } from "./server.js";
import { REPAINT } from "./theme.js";

const REST_MS = 1000;
const MOST_BLOCKS = 1 << 18; // drawn; a larger cache shows its first ones
const NAMES = ["free", "cached", "used", "shared"];
const SERIES = ["ground", "series-4", "series-3", "series-1"];

/** Nodes of a map that keeps itself up to date while it can be seen. mine: block numbers. */
export function kvMap(mine = new Set()) {
  const canvas = el("canvas", {
    class: "kv-map",
    role: "img",
    "aria-label": "KV cache, block by block",
  });
  const told = el("span", { class: "label" });
  const legend = key([
    ["is-0", "free"],
    ["is-4", "cached, can be reused"],
    ["is-3", "used"],
    ["is-1", "shared by several"],
    ...(mine.size ? [["is-mine", "of this request"]] : []),
  ]);
  let states = null;
  const show = () => states && paint(canvas, states, mine);
  const refresh = async () => {
    if (document.hidden || !canvas.checkVisibility()) return;
    try {
      const { state } = await getJson("ui/api/kv");
      states = Uint8Array.from(atob(state), (character) => character.charCodeAt(0));
      told.textContent = describe(canvas, states);
      show();
    } catch {
      // The bar at the top says when the server is away; the last map stays.
    }
  };
  const timer = setInterval(() => {
    if (canvas.isConnected) refresh();
    else clearInterval(timer);
  }, REST_MS);
  canvas.addEventListener(REPAINT, show);
  requestAnimationFrame(refresh);
  return [el("div", { class: "row" }, legend), canvas, told];
}

function describe(canvas, states) {
  const sums = [0, 0, 0, 0];
  for (const state of states) sums[state] += 1;
  const words = NAMES.map((name, at) => `${count(sums[at])} ${name}`).join(", ");
  canvas.setAttribute("aria-label", `KV cache: ${words} of ${states.length} blocks`);
  return words;
}

/** One pixel a block; the browser makes them larger without smoothing. */
function paint(canvas, states, mine) {
  const shown = Math.min(states.length, MOST_BLOCKS);
  const columns = Math.max(1, Math.ceil(Math.sqrt(shown * 8)));
  const rows = Math.max(1, Math.ceil(shown / columns));
  const colour = colours(canvas);
  const ink = [...SERIES.map((name) => colour[name]), colour.ink].map(channels);
  const image = new ImageData(columns, rows);
  for (let at = 0; at < shown; at += 1) {
    image.data.set(ink[mine.has(at) ? 4 : states[at]], at * 4);
  }
  canvas.width = columns;
  canvas.height = rows;
  canvas.style.aspectRatio = `${columns} / ${rows}`;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** "rgb(1, 2, 3)" -> [1, 2, 3, 255] */
function channels(colour) {
  const [red = 0, green = 0, blue = 0] = (colour.match(/[\d.]+/g) ?? []).map(Number);
  return [red, green, blue, 255];
}
