// One turn of the conversation. Pieces that come between two pictures are added at once.
import { el } from "./dom.js";
import { perFrame } from "./frame.js";

const NODE_CHARS = 4096; // of a part of a text: adding costs the last part alone

/** {node, add(text), think(text), note(text), fail(text), text()}; log: what scrolls. */
export function turn(who, log) {
  const said = el("div", { class: "said", dir: "auto" });
  const thought = el("div", { class: "said thought", dir: "auto" });
  const note = el("div", { class: "note" });
  const problem = el("div", { class: "problem", role: "alert" });
  const node = el(
    "article",
    { class: `turn ${who}`, "aria-label": who },
    el("div", { class: "who", text: who }),
    thought,
    said,
    note,
    problem,
  );
  const waiting = new Map([
    [said, ""],
    [thought, ""],
  ]);
  let whole = "";
  const show = () => {
    const near = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    for (const [target, text] of waiting) {
      if (text) append(target, text);
      waiting.set(target, "");
    }
    if (near) log.scrollTop = log.scrollHeight;
  };
  const flush = perFrame(show);
  const tell = (target, text) => {
    show(); // how it ended is not told before all of it is there
    target.textContent = text;
  };
  return {
    node,
    add(text) {
      whole += text;
      waiting.set(said, waiting.get(said) + text);
      flush();
    },
    think(text) {
      waiting.set(thought, waiting.get(thought) + text);
      flush();
    },
    note: (text) => tell(note, text),
    fail: (text) => tell(problem, text),
    text: () => whole,
  };
}

function append(target, text) {
  const last = target.lastChild;
  if (last && last.length + text.length <= NODE_CHARS) last.appendData(text);
  else target.append(document.createTextNode(text));
}
