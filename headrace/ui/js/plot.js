// Canvases that are sharp, follow their width and the colours of the page.
import { el } from "./dom.js";
import { REPAINT } from "./theme.js";
import { perFrame } from "./frame.js";

const NAMES = ["series-1", "series-2", "series-3", "series-4", "ground", "grid", "label", "ink"];

/**
 * A drawing. draw(context, width, height, colours) is called for each new size or colour, and by
 * `redraw`. words: what it shows, for those who do not see it. pick(part of the width): a click.
 * Returns {node, redraw, describe}.
 */
export function plot({ height, words, draw, pick }) {
  const node = el("canvas", {
    class: pick ? "plot picks" : "plot",
    role: "img",
    "aria-label": words,
  });
  node.style.blockSize = `${height}px`;
  const redraw = perFrame(() => {
    const width = node.clientWidth;
    if (!width || !node.isConnected) return;
    const scale = devicePixelRatio || 1;
    node.width = Math.round(width * scale);
    node.height = Math.round(height * scale);
    const context = node.getContext("2d");
    context.scale(scale, scale);
    context.font = `11px ${getComputedStyle(node).getPropertyValue("--mono")}`;
    draw(context, width, height, colours(node));
  });
  node.addEventListener(REPAINT, redraw);
  new ResizeObserver(redraw).observe(node);
  if (pick) {
    node.addEventListener("click", (event) => pick(event.offsetX / Math.max(1, node.clientWidth)));
  }
  return { node, redraw, describe: (text) => node.setAttribute("aria-label", text) };
}

/** Name -> colour of the page as it is now. */
export function colours(node) {
  const style = getComputedStyle(node);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`)]));
}

/** A line over time, filled below; the newest value is at the right edge. */
export function drawLine(context, width, height, colour, values, most, slots) {
  if (values.length < 2) return;
  const step = width / Math.max(1, slots - 1);
  const x = (at) => width - (values.length - 1 - at) * step;
  const y = (value) => height - 1 - (Math.min(value, most) / most) * (height - 3);
  context.beginPath();
  values.forEach((value, at) => context.lineTo(x(at), y(value)));
  context.strokeStyle = colour["series-1"];
  context.lineWidth = 1.5;
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(x(0), height);
  context.globalAlpha = 0.12;
  context.fillStyle = colour["series-1"];
  context.fill();
  context.globalAlpha = 1;
}
