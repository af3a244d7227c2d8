// Server-sent events of a fetched response. EventSource cannot send a key.

/** The data of each event, as it comes. */
export async function* events(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading is not interested in why it ended
  }
}

/** Text in pieces to whole events; comments and other fields are left out. */
export class EventParser {
  #rest = "";
  #data = [];

  feed(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const found = [];
    for (const line of lines) {
      if (line === "" && this.#data.length) {
        found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return found;
  }
}
