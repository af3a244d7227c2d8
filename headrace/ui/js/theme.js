// Light, dark, or as the system says.

const NAME = "headrace-theme";
const WORDS = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const NEXT = { auto: "light", light: "dark", dark: "auto" };

/** The event by which a canvas hears that the colours are others. */
export const REPAINT = "repaint";

export function startTheme(button) {
  let chosen = localStorage.getItem(NAME);
  if (!Object.hasOwn(WORDS, chosen)) chosen = "auto";
  const show = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = WORDS[chosen];
    for (const canvas of document.querySelectorAll("canvas"))
      canvas.dispatchEvent(new Event(REPAINT));
  };
  button.addEventListener("click", () => {
    chosen = NEXT[chosen];
    localStorage.setItem(NAME, chosen);
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}
