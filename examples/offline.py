"""A batch without a server: python examples/offline.py [MODEL]"""

import sys

from headrace import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else ""
    with LLM(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        for done in llm.generate(["The sky is", "Water boils at"], params):
            print(f"{done.prompt_index}: {done.text!r} ({done.finish_reason})")

        question = [{"role": "user", "content": "Why do rivers flow?"}]
        for piece in llm.stream(question, SamplingParams(temperature=0, max_tokens=40)):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
