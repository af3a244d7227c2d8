"""What any runner must do with rows that yield a vector: the last hidden states, as asked.

The model of the suite has no classification head on some runners: `tests.golden.test_pooling` has
those that do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.messages import Pool
from tests.backend.runner_contract import OTHER, PROMPT, MakeRunner, Steps, decode, generate

CLOSE = 1e-4  # float32 sums in another order, of numbers around 1
Vector = npt.NDArray[np.float32]


def vectors(steps: Steps) -> list[Vector]:
    """Send the plan; what its pools yield."""
    result = steps.launch().result()
    width = steps.runner.capacity.width
    assert result.failed == []
    found = [np.frombuffer(raw, "<f4") for raw in result.vectors]
    assert all(vector.shape == (width,) for vector in found), "as wide as a hidden state"
    return found


def alone(make: MakeRunner, kind: Pool, prompt: list[int] = PROMPT) -> Vector:
    """The vector of one prompt on a fresh runner, in one chunk."""
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3, 4, 5], known=prompt)
    steps.forward(0, prompt, draw_into=())
    steps.pool(kind)
    (vector,) = vectors(steps)
    steps.runner.close()
    return vector


def close(got: Vector, want: Vector) -> None:
    """Equal but for the order of sums."""
    np.testing.assert_allclose(got, want, rtol=CLOSE, atol=CLOSE * float(np.abs(want).max()))


def sums_are_of_all_tokens(make: MakeRunner) -> None:
    """The sum over a prompt is that of the last hidden states of its beginnings."""
    lasts = [alone(make, "last", PROMPT[:end]) for end in range(1, len(PROMPT) + 1)]
    close(alone(make, "sum"), np.sum(lasts, axis=0))
    assert not np.allclose(lasts[0], lasts[-1]), "hidden states depend on their tokens"


def chunks_add_up(make: MakeRunner) -> None:
    """A sum over chunks is the sum over the whole; the last state is that of the last chunk."""
    want_sum, want_last = alone(make, "sum"), alone(make, "last")
    for chunks in [(1,), (4,), (3, 4), (8,), (1,) * 9]:
        steps = Steps(make())
        steps.join(0, [5, 4, 3, 2, 1, 0])
        steps.join(1, [6, 7, 8, 9, 10, 11])
        total, at = np.zeros_like(want_sum), 0
        for size in (*chunks, len(PROMPT) - sum(chunks)):
            piece = PROMPT[at : at + size]
            at += size
            steps.forward(0, piece, draw_into=())
            steps.pool("sum")
            steps.forward(1, piece, draw_into=())
            if at == len(PROMPT):
                steps.pool("last")
            found = vectors(steps)
            total += found[0]
        steps.runner.close()
        close(total, want_sum)
        close(found[1], want_last)


def vectors_beside_tokens(make: MakeRunner) -> None:
    """Rows that draw, report their prompt or yield vectors, in one step: nobody notices another."""
    want_sum, want_last = alone(make, "sum", OTHER), alone(make, "last")
    tokens = generate(make, count=6)
    steps = Steps(make())
    steps.join(2, [20, 21, 22, 23])
    steps.forward(2, PROMPT)
    drawn = steps.run()
    steps.join(0, [0, 1, 2])
    steps.join(1, [3, 4, 5])
    steps.join(3, [6, 7, 8], known=OTHER)
    steps.forward(2, None)
    steps.forward(0, PROMPT, draw_into=())
    steps.pool("last")
    steps.forward(1, PROMPT)
    steps.score(1)
    steps.forward(3, OTHER, draw_into=())
    steps.pool("sum")
    result = steps.launch().result()
    last, total = (np.frombuffer(raw, "<f4") for raw in result.vectors)
    close(last, want_last)
    close(total, want_sum)
    drawn.append(result.tokens[0])
    assert result.tokens[1] == tokens[0]
    assert len(result.prompt_logprobs[0]) == len(PROMPT) - 1
    steps.leaves = [0, 3]
    steps.forward(2, None)
    steps.forward(1, None)
    after = steps.run()
    assert [*drawn, after[0], *decode(steps, 2, 3)] == tokens
    assert after[1] == tokens[1]
    steps.runner.close()


def vectors_of_cached_prompts(make: MakeRunner) -> None:
    """The last state of a prompt whose blocks another row has computed, without a write."""
    prompt = PROMPT[:8]
    want = alone(make, "last", prompt)
    steps = Steps(make())
    steps.join(0, [0, 1])
    steps.forward(0, prompt)
    steps.run()
    steps.join(1, [0, 1], known=prompt)
    steps.forward(1, prompt[-1:], draw_into=(), start=7, written=False)
    steps.pool("last")
    close(vectors(steps)[0], want)
    steps.runner.close()


def vectors_of_steps_in_flight(make: MakeRunner) -> None:
    """A step's vectors are its own, though the next one was launched before they are read."""
    want, other = alone(make, "sum"), alone(make, "sum", OTHER)
    steps = Steps(make())
    tickets = []
    for row, prompt in enumerate((PROMPT, OTHER, PROMPT)):
        steps.join(row, [3 * row, 3 * row + 1, 3 * row + 2], known=prompt)
        steps.forward(row, prompt, draw_into=())
        steps.pool("sum")
        tickets.append(steps.launch())
        if len(tickets) == 2:
            first = tickets.pop(0).result()
            close(np.frombuffer(first.vectors[0], "<f4"), want if row == 1 else other)
    close(np.frombuffer(tickets[0].result().vectors[0], "<f4"), want)
    steps.runner.close()


POOL_CONTRACT: list[Callable[[MakeRunner], None]] = [
    sums_are_of_all_tokens,
    chunks_add_up,
    vectors_beside_tokens,
    vectors_of_cached_prompts,
    vectors_of_steps_in_flight,
]
