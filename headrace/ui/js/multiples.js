// Small plots of one figure each over the last minutes.
import { el } from "./dom.js";
import { percent } from "./format.js";
import { drawLine, plot } from "./plot.js";

/**
 * A row of them. figures: [[name, read(moment), write(value)], ...]; history: moments, oldest
 * first; kept: how many there are at most. Returns {node, show(newest moment)}.
 */
export function multiples(figures, history, kept) {
  const made = figures.map((figure) => multiple(figure, history, kept));
  return {
    node: el(
      "div",
      { class: "multiples" },
      made.map((one) => one.node),
    ),
    show(now) {
      for (const one of made) one.show(now);
    },
  };
}

function multiple([name, read, write], history, kept) {
  const value = el("span", { class: "value", text: "–" });
  const { node, redraw, describe } = plot({
    height: 42,
    words: name,
    draw(context, width, height, colour) {
      const values = history.map((one) => read(one) ?? 0);
      context.fillStyle = colour.grid;
      context.fillRect(0, height - 1, width, 1);
      const most = write === percent ? 1 : Math.max(1, ...values);
      drawLine(context, width, height, colour, values, most, kept);
    },
  });
  const show = (now) => {
    value.textContent = write(read(now));
    describe(`${name}: ${value.textContent}`);
    redraw();
  };
  return {
    node: el(
      "div",
      { class: "multiple" },
      el("div", { class: "row" }, el("h3", { text: name }), value),
      node,
    ),
    show,
  };
}
