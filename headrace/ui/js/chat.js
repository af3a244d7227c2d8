// The chat box: what is said here is recorded whole, and opens in the pipeline beside it.
import { say, sayMore } from "./announce.js";
import { streamChat } from "./chat_stream.js";
import { el } from "./dom.js";
import { drawFields } from "./draw_fields.js";
import { gauges } from "./gauges.js";
import { look } from "./records.js";
import { choose } from "./route.js";
import { turn } from "./turn.js";

const HELLO =
  "Ask something. The answer streams here, and every stage of the request opens on the right.";

export class Chat {
  #messages = [];
  #running = null; // the AbortController of the answer that streams
  #log = el("div", {
    class: "talk",
    role: "log",
    "aria-live": "off",
    "aria-label": "Conversation",
    tabindex: "0",
  });
  #input = el("textarea", {
    id: "ask-text",
    rows: 3,
    placeholder: "Message",
    "aria-label": "Message",
  });
  #send = el("button", { type: "submit", class: "main", text: "Send" });
  #stop = el("button", { type: "button", text: "Stop", disabled: true });
  #problem = el("p", { class: "problem", role: "alert" });
  #fields = drawFields();
  #gauges = gauges();

  constructor(pane) {
    const fresh = el("button", {
      type: "button",
      class: "quiet",
      text: "New chat",
      on: { click: () => this.#begin() },
    });
    const hint = el("span", { class: "label hint", text: "Shift+Enter: new line" });
    const form = el(
      "form",
      { class: "ask" },
      this.#gauges.node,
      this.#input,
      this.#problem,
      el("div", { class: "ask-row" }, this.#send, this.#stop, hint),
      this.#fields.node,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    this.#stop.addEventListener("click", () => this.#running?.abort());
    pane.append(
      el("div", { class: "pane-head" }, el("h2", { text: "Chat" }), fresh),
      this.#log,
      form,
    );
    this.#clear();
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#problem.textContent = "";
    this.#log.replaceChildren(el("p", { class: "label", text: HELLO }));
  }

  #begin() {
    this.#clear();
    this.#input.focus();
  }

  async #ask() {
    const content = this.#input.value;
    if (this.#running || !content.trim()) return;
    let asked;
    try {
      asked = this.#fields.read();
    } catch (error) {
      this.#problem.textContent = error.message;
      return;
    }
    this.#problem.textContent = "";
    if (!this.#messages.length) this.#log.replaceChildren();
    this.#messages.push({ role: "user", content });
    const mine = turn("user", this.#log);
    const answer = turn("assistant", this.#log);
    mine.add(content);
    this.#log.append(mine.node, answer.node);
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#input.value = "";
    const before = asked.system ? [{ role: "system", content: asked.system }] : [];
    await this.#follow({ messages: [...before, ...this.#messages], ...asked.fields }, answer);
  }

  async #follow(body, answer) {
    const messages = this.#messages;
    const own = (this.#running = new AbortController());
    this.#busy(true);
    this.#gauges.begin();
    try {
      const ended = await streamChat(body, this.#teller(answer), own.signal);
      answer.note(ended);
      say("The answer is complete.");
    } catch (error) {
      if (own.signal.aborted) answer.note("stopped");
      else answer.fail(error.message);
    } finally {
      if (answer.text()) messages.push({ role: "assistant", content: answer.text() });
      else messages.pop(); // a question without an answer is no part of the next prompt
      this.#running = null;
      this.#busy(false);
      look();
    }
  }

  #teller(answer) {
    const first = () => this.#gauges.first();
    return {
      begun(id) {
        if (id) choose(id);
        look();
      },
      text(piece) {
        first();
        answer.add(piece);
        sayMore(piece);
      },
      thought(piece) {
        first();
        answer.think(piece);
      },
      usage: (counts) => this.#gauges.usage(counts),
    };
  }

  #busy(running) {
    this.#send.disabled = running;
    this.#stop.disabled = !running;
    if (!running && document.activeElement === document.body)
      this.#input.focus({ preventScroll: true });
  }
}
