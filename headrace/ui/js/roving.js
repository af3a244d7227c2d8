// One tab stop for a group of things; arrows, Home and End go between them.

/**
 * Keys of a group. box: the element around them; find: () -> its items in order; choose(item):
 * what reaching one means. Items carry aria-selected; the selected one can be reached by Tab.
 */
export function rove(box, find, choose) {
  box.addEventListener("keydown", (event) => {
    const items = find();
    const at = items.indexOf(document.activeElement);
    const to = {
      ArrowRight: at + 1,
      ArrowDown: at + 1,
      ArrowLeft: at - 1,
      ArrowUp: at - 1,
      Home: 0,
      End: items.length - 1,
    }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = items[(to + items.length) % items.length];
    next.focus();
    choose(next);
  });
  box.addEventListener("click", (event) => {
    const item = find().find((one) => one.contains(event.target));
    if (item) choose(item);
  });
}

/** Mark one of the items as the chosen one, and the only one that Tab reaches. */
export function mark(items, chosen) {
  const reached = chosen ?? items[0];
  for (const item of items) {
    item.setAttribute("aria-selected", String(item === chosen));
    item.tabIndex = item === reached ? 0 : -1;
  }
}
