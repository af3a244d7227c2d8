// The newest decisions, to choose one of; all, or the misses that were silent.
import { el } from "../dom.js";
import { clock, count } from "../format.js";
import { rowList } from "../row_list.js";
import { choose, place } from "./route.js";
import { chosen, newest, silent } from "./watch.js";
import { nameOf } from "./words.js";

const MOST_CHARS = 20; // of an id

export function startNewestList(pane) {
  const list = rowList("Newest decisions", parts, choose);
  const none = el("p", { class: "empty" });
  const only = el("input", { type: "checkbox", id: "only-silent" });
  only.addEventListener("change", () => silent.set(only.checked));
  pane.append(
    el(
      "div",
      { class: "pane-head" },
      el("h2", { text: "Decisions" }),
      el("label", { class: "label", for: "only-silent" }, only, " silent misses alone"),
    ),
    none,
    list.node,
  );
  const show = () => {
    none.hidden = newest.value.length > 0;
    none.textContent = silent.value ? "No miss was silent." : "No request yet.";
    // Clients give several requests one id; each has a key of its own.
    list.show(
      newest.value.map((one) => ({ ...one, id: one.key, name: one.id })),
      chosen.value.id === place.value.id ? chosen.value.decision?.key : place.value.id,
    );
  };
  newest.watch(show);
  chosen.watch(show);
  place.watch(show);
  show();
}

/** Ids that the gateway made begin alike. */
function shortened(id) {
  return id.length > MOST_CHARS ? `…${id.slice(-MOST_CHARS)}` : id;
}

function parts(one) {
  const { predicted, confirmed, silent_miss: missed } = one.cached_tokens;
  const again = one.attempts > 1 ? `, ${one.attempts} attempts` : "";
  return [
    el("span", { class: "id mono", title: one.name, text: shortened(one.name) }),
    el("span", {
      class: missed ? "label problem" : "label",
      text: missed ? "silent miss" : (one.status ?? "running"),
    }),
    el("span", { class: "label", text: `${clock(one.at_s)}  ${one.reason}${again}` }),
    el("span", {
      class: "num",
      title: "cached tokens: predicted, and as the engine says",
      text: `${count(predicted)} / ${confirmed === null ? "–" : count(confirmed)}`,
    }),
    el("span", { class: "label", text: one.worker.replace(/^http:\/\//, "") }),
    el("span", { class: "label", text: nameOf(one.tenant) }),
  ];
}
