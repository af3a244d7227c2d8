"""Anthropic's client against `headrace serve`: python examples/anthropic_client.py [BASE_URL]"""

import sys

from anthropic import Anthropic


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with Anthropic(base_url=base_url, api_key="unused") as client:
        model = client.models.list().data[0].id
        with client.messages.stream(
            model=model,
            system="Answer in one sentence.",
            messages=[{"role": "user", "content": "Why do rivers flow?"}],
            max_tokens=40,
        ) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            usage = stream.get_final_message().usage
        print(f"\n{usage.input_tokens} + {usage.output_tokens} tokens")


if __name__ == "__main__":
    main()
