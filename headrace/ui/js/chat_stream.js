// One answer of /v1/chat/completions, as it comes.
import { postStream } from "./server.js";

/**
 * Ask and follow; returns why the answer ended. told: {begun(id), text(piece), thought(piece),
 * usage(counts)}. Throws what fetch throws, a Refusal, or an Error with what an event of the
 * stream said.
 */
export async function streamChat(body, told, signal) {
  const whole = {
    ...body,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const headers = { "x-headrace-record": "full" };
  const { response, events } = await postStream("v1/chat/completions", whole, { headers, signal });
  told.begun(response.headers.get("x-request-id") ?? "");
  let reason = "";
  for await (const data of events) {
    if (data === "[DONE]") return reason;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) told.usage(chunk.usage);
    for (const choice of chunk.choices ?? []) {
      const { content, reasoning_content: thought } = choice.delta ?? {};
      if (thought) told.thought(thought);
      if (content) told.text(content);
      reason = choice.finish_reason ?? reason;
    }
  }
  throw new Error("the stream ended before the answer did");
}
