"""The seams of the engine: `Runner`, whatever computes a step (the engine itself has no torch), and
`ServingEngine`, what the HTTP side and `headrace.LLM` drive.

Implementations: `backends.fake.FakeRunner` (no torch, checks its own KV), `runner.runner.CpuRunner`
and `runner.cuda_runner.CudaRunner`. `tests/backend/` runs one suite against each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import msgspec

from headrace.engine.stats import EngineStats, StepTimes
from headrace.messages import (
    Abort,
    Finish,
    Grammar,
    KernelsInfo,
    Look,
    StepPlan,
    StepResult,
    Submit,
    TokenOut,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class StepCost(msgspec.Struct, frozen=True):
    """A model of the time of one step on one device, in seconds; measured, not guessed.

    Matrix products take `token_s` a token, paid in whole tiles, but never less than `floor_s`, in
    which the weights are read; the rest takes `base_s`. Attention takes `pair_s` for each pair of a
    prefill token and a token that it sees, and `read_s` for each token that a decode row reads.

    Products and attention of some hundred tokens fill a device unevenly. So where `sizes` were
    measured, ascending, a step of up to sizes[-1] tokens is priced by the first size that holds it:
    size_s without attention of prompts, size_pair_s a pair.
    """

    floor_s: float
    token_s: float
    base_s: float
    pair_s: float
    read_s: float
    tile: int  # tokens, at least 1
    sizes: tuple[int, ...] = ()
    size_s: tuple[float, ...] = ()
    size_pair_s: tuple[float, ...] = ()

    def seconds(self, tokens: int, pairs: float, reads: int) -> float:
        """Time of a step of `tokens` tokens.

        pairs: the sum over prefill rows of count * (start + count / 2); reads: the sum of the
        contexts of decode rows. Never falls when an argument rises, if size_s does not.
        """
        if self.sizes and tokens <= self.sizes[-1]:
            at = bisect_left(self.sizes, tokens)
            return self.size_s[at] + self.size_pair_s[at] * pairs + self.read_s * reads
        padded = -(-tokens // self.tile) * self.tile
        products_s = max(self.floor_s, self.token_s * padded)
        return products_s + self.base_s + self.pair_s * pairs + self.read_s * reads


class StepWork(msgspec.Struct, frozen=True):
    """What the parts of a step cost on one device, in seconds, so that its time can be parted among
    its rows; only their proportions count. The default knows nothing: equal parts.

    Reading the weights of the layers takes `weights_s`, their products `token_s` a token, and a
    step takes the longer of both; the head alike, for positions that get logits. Attention takes
    `read_s` for each token whose KV a row reads, or `pair_s` for each pair of a row's token and a
    token that it sees, if that is longer.
    """

    weights_s: float = 1.0
    token_s: float = 0.0
    head_s: float = 0.0
    head_token_s: float = 0.0
    pair_s: float = 0.0
    read_s: float = 0.0


class Capacity(msgspec.Struct, frozen=True):
    """What a loaded runner offers; facts, not settings."""

    kv_blocks: list[int]  # [pool] blocks: one pool, whatever the groups
    block_size: int
    max_rows: int  # device rows: sequences that can run at once
    max_model_len: int  # tokens of one sequence, prompt and output
    vocab_size: int  # draws are always < vocab_size (padding of the output layer is masked)
    cost: StepCost | None = None  # None: the time of a step is not known beforehand
    kernels: KernelsInfo | None = None  # None: the backend has no choice of them
    work: StepWork = StepWork()
    width: int = 0  # of a hidden state; 0 = it yields none
    labels: int = 0  # of the classification head; 0 = there is none
    generates: bool = True  # False: there is no output layer, and nothing can be drawn
    long_from: int = 0  # prompts of more tokens have other K and V; 0 = all have alike
    each_length: bool = False  # ... and so has every length of those
    # [kv group] newest tokens that its layers read, a query's own among them; 0 = all
    windows: tuple[int, ...] = (0,)
    draws_note: str = ""  # what of its draws `StepResult.taps` does not show
    device_uuid: str = ""  # of the GPU that computes; "" = none does

    def variant(self, prompt_tokens: int) -> str:
        """Requests whose prompts share a prefix have the same K and V for it, if theirs is the
        same variant."""
        if not self.long_from or prompt_tokens <= self.long_from:
            return ""
        return str(prompt_tokens) if self.each_length else "long"


class Masks(NamedTuple):
    """Which tokens some draws of a step may take."""

    draws: list[int]  # distinct
    bits: npt.NDArray[np.int32]  # [draws, ceil(vocab / 32)]: bit t % 32 of word t // 32 = token t


class Ticket(Protocol):
    """A step in flight."""

    def likely(self) -> Sequence[int]:
        """Of each draw: the token that it takes whatever its mask is, if the mask allows it; -1:
        that depends on the mask. [] where nobody knows before the step is done, or it broke.

        Never waits. Needs: `finish` was not called.
        """

    def finish(self, masks: Masks | None = None) -> None:
        """Enqueue the sampler. Call once, after `launch`. The caller may reuse masks.bits then."""

    def result(self) -> StepResult:
        """Wait for the step and return its tokens. Call once, after `finish`.

        Raises whatever broke the whole step; a fault of one draw is in `StepResult.failed`.
        """


class Runner(Protocol):
    """Runs plans in the order of their launches; at most two may be in flight."""

    @property
    def capacity(self) -> Capacity:
        """What it can hold and compute; the same for as long as it lives."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Start the forward pass and return at once where the device allows it.

        Changes: the device tables and KV blocks that the plan names, and nothing else.
        Needs: the plan's blocks are not written by any other live sequence.
        Raises whatever broke the whole step. The engine then ends every sequence that owns a row,
        and the next plan names all their rows in `leaves`, also rows that are already free.
        """

    def counters(self) -> Mapping[str, int]:
        """Name -> how often it happened so far: what this kind of runner alone can count, such as
        steps run from a graph. A count never falls and a name never goes. Asked after every turn.
        """

    def idle(self) -> bool:
        """Do a little of what was put off: at most some 100 ms. False: nothing was left to do.

        Changes: nothing that a later step reads; rows, blocks and tokens stay as they are.
        Needs: `finish` was called on every ticket.
        """

    def close(self) -> None:
        """Free the device. No ticket may be open."""


class Matcher(Protocol):
    """Where one choice stands in its grammar. Implementation: `grammar.matcher.Matcher`."""

    @property
    def ended(self) -> bool:
        """The output is complete and nothing may follow."""

    @property
    def accepts(self) -> bool:
        """The output may end here."""

    def advance(self, token: int) -> None:
        """One more token of the output. Raises HeadraceError if it cannot be followed."""

    def forced(self) -> list[int]:
        """Tokens that are all that can follow now, in order; [] where there is a choice. Then a
        mask allows the first of them alone."""

    def allows(self, token: int) -> bool:
        """A mask allows `token`. Needs: nothing is forced."""

    def check(self) -> None:
        """Raise HeadraceError if it was given up (in a fill, say)."""

    def clone(self) -> Self:
        """Another one that stands where this one stands."""


class Grammars(Protocol):
    """Compiles grammars off the step path. Implementation: `grammar.compile.Compiler`."""

    @property
    def end_ids(self) -> Sequence[int]:
        """Ids that no grammar matches as text: the model ends with them."""

    def compile(self, grammar: Grammar, /) -> Future[Any]:
        """A `Matcher` that stands at the start, to be cloned; or HeadraceError. Never blocks."""

    def fill(self, matchers: Sequence[Any], bits: npt.NDArray[np.int32], /) -> None:
        """bits[i] = what matchers[i] allows next; at least one matcher. bits is C-contiguous."""

    def warm(self) -> None:
        """Do now, in the background, what the first `compile` would wait for."""

    def close(self) -> None:
        """Compile nothing more."""


class ServingEngine(Protocol):
    """Requests in, tokens out, one turn at a time. One thread calls all of it.

    Implementations: `engine.loop.Engine`, and `bench.naive.NaiveEngine`, the yardstick.
    """

    def watch(self, told: Callable[[StepTimes], None], /) -> None:
        """Tell where the time of each step went, if it computes in steps."""

    def submit(self, owner: int, msg: Submit, /) -> None:
        """Queue a request; exactly one Done answers it."""

    def abort(self, owner: int, msg: Abort, /) -> None:
        """End a request. Unknown handles are ignored."""

    def finish(self, owner: int, msg: Finish, /) -> None:
        """End one choice at a stop string."""

    def look(self, owner: int, msg: Look, /) -> None:
        """Answer with a `View` in the next turn."""

    def drop_owner(self, owner: int, /) -> None:
        """End all of an owner's requests; it hears no more."""

    @property
    def has_work(self) -> bool:
        """A turn would do or say something."""

    def warm(self) -> None:
        """Get ready, in the background, for what the first request would wait for."""

    def turn(self) -> dict[int, TokenOut]:
        """Owner -> what it is told. {} when there is nothing to say."""

    def spare_s(self) -> float:
        """Seconds by which the next turn may be put off, to hear who arrives, at no cost to those
        that run. Nobody has to."""

    def idle(self) -> bool:
        """Do a little of what was put off until now; False: nothing was left to do.

        Needs: there is no work. Nobody has to call it.
        """

    def stats(self) -> EngineStats:
        """Gauges and counters at this moment."""

    def close(self) -> None:
        """Free the device. Live requests hear nothing more."""
