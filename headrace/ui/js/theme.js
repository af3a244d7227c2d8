// Light, dark, or as the system says.
import { cell } from "./cell.js";

const NAME = "headrace-theme";
const WORDS = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const NEXT = { auto: "light", light: "dark", dark: "auto" };

/** Counts changes of colours; canvases are drawn again. */
export const painted = cell(0);

export function startTheme(button) {
  let chosen = localStorage.getItem(NAME);
  if (!Object.hasOwn(WORDS, chosen)) chosen = "auto";
  const show = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = WORDS[chosen];
    painted.set(painted.value + 1);
  };
  button.addEventListener("click", () => {
    chosen = NEXT[chosen];
    localStorage.setItem(NAME, chosen);
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}
