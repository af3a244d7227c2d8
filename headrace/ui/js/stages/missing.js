// What is said where a record has not got what a stage would show.
import { el } from "../dom.js";

/** Words for a part that is not there: recorded lightly, not there yet, or none. */
export function missing(record, what) {
  if (!record.full) {
    return [
      el(
        "p",
        { class: "empty" },
        `This request was recorded lightly: ${what} was not kept. Requests with the header `,
        el("code", { text: "X-Headrace-Record: full" }),
        " and those of the chat are recorded whole.",
      ),
    ];
  }
  const words =
    record.state === "running"
      ? `Not yet: ${what} comes while the request runs.`
      : `This request had none: ${what}.`;
  return [el("p", { class: "empty", text: words })];
}
