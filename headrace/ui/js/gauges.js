// The figures of a streaming answer: time to the first token, speed, cached tokens.
import { el } from "./dom.js";
import { count, ms } from "./format.js";

/** {node, begin(), first(), usage(counts)}; times are this page's own. */
export function gauges() {
  const shown = Object.fromEntries(
    ["TTFT", "speed", "cached", "tokens"].map((name) => [name, el("dd", { text: "–" })]),
  );
  const node = el(
    "dl",
    { class: "gauges", "aria-label": "Figures of the answer" },
    Object.entries(shown).map(([name, value]) => el("div", {}, el("dt", { text: name }), value)),
  );
  let begun_ms = 0;
  let first_ms = 0;
  return {
    node,
    begin() {
      begun_ms = performance.now();
      first_ms = 0;
      for (const value of Object.values(shown)) value.textContent = "–";
    },
    first() {
      if (first_ms) return;
      first_ms = performance.now();
      shown.TTFT.textContent = ms(first_ms - begun_ms);
    },
    usage(counts) {
      const cached = counts.prompt_tokens_details?.cached_tokens ?? 0;
      shown.cached.textContent = `${cached} of ${counts.prompt_tokens}`;
      shown.tokens.textContent = String(counts.completion_tokens);
      const took_s = (performance.now() - first_ms) / 1e3;
      if (first_ms && counts.completion_tokens > 1 && took_s > 0) {
        shown.speed.textContent = `${count((counts.completion_tokens - 1) / took_s)} tok/s`;
      }
    },
  };
}
