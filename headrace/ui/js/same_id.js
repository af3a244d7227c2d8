// Clients may give several requests one id: the others, each by its key.
import { el } from "./dom.js";
import { clock } from "./format.js";

/** others: [{key, at_s}]; addressOf(key): where one is shown. Returns nodes. */
export function sameId(others, addressOf) {
  if (!others.length) return [];
  const links = others.flatMap((one) => [
    " ",
    el("a", { href: addressOf(one.key), text: clock(one.at_s) }),
  ]);
  return [el("p", { class: "label same-id" }, "Other requests with this id:", ...links)];
}
