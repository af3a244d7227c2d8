// Long lists are shown in portions.
import { el } from "./dom.js";
import { count } from "./format.js";

/**
 * The first `most` items in `box`, and a button for the next ones. make(item, index): a node to
 * add; after(): called when more were added.
 */
export function capped(box, items, most, make, after = () => {}) {
  let shown = 0;
  const more = el("button", { type: "button", class: "more" });
  const show = () => {
    const next = items.slice(shown, shown + most).map((item, at) => make(item, shown + at));
    box.append(...next);
    shown += next.length;
    more.hidden = shown >= items.length;
    const left = items.length - shown;
    more.textContent = `Show ${count(Math.min(most, left))} more of ${count(left)}`;
    after();
  };
  more.addEventListener("click", show);
  show();
  return [box, more];
}
