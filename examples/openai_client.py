"""The official client against `headrace serve`: python examples/openai_client.py [BASE_URL]"""

import sys

from openai import OpenAI


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    with OpenAI(base_url=base_url, api_key="unused") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Why do rivers flow?"}],
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage:
                print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
