"""Two questions at once over one WebSocket: python examples/websocket_client.py [BASE_URL]"""

import json
import sys

from websockets.sync.client import connect


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8000"
    questions = {"a": "Why do rivers flow?", "b": "What is a headrace?"}
    answers = dict.fromkeys(questions, "")
    with connect(base_url + "/v1/chat/ws") as socket:
        for name, question in questions.items():
            messages = [{"role": "user", "content": question}]
            socket.send(json.dumps({"request_id": name, "messages": messages, "max_tokens": 40}))
        running = set(questions)
        while running:
            frame = json.loads(socket.recv())
            if frame["type"] == "chunk":
                for choice in frame["data"]["choices"]:
                    answers[frame["request_id"]] += choice["delta"].get("content") or ""
            else:  # done, error or aborted: the last frame of a request
                running.discard(frame["request_id"])
    for name, answer in answers.items():
        print(f"{name}: {answer!r}")


if __name__ == "__main__":
    main()
