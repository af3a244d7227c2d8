"""Every frozen shape that crosses a queue: API <-> engine (msgpack over ZMQ), engine <-> runner.

Names used throughout:
  handle   integer that an API process gives a request; unique among its live requests
  choice   0..n-1 within a request (OpenAI's choice index)
  row      index into the runner's device tables; a running sequence owns one until it leaves
  forward row   index into one StepPlan's columns
  block    index of `block_size` token slots in the paged KV cache of one KV group

Structs travel as arrays: a new field goes to the end, with a default that means "not used".
"""

from __future__ import annotations

from typing import Literal

import msgspec

Reason = Literal["stop", "length", "abort", "error"]

EVERY = -1  # Done.handle: all of this API process's live requests are gone (it was silent too long)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence draws its tokens. All values are resolved: no None, no "default"."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**64; the client draws one when the caller gave none


# ---------------------------------------------------------------- API process -> engine


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """One request. Exactly one `Done` answers it, whatever happens."""

    handle: int
    prompt: list[int]  # not empty
    max_tokens: int  # >= 1, per choice
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []  # drawing one of these ends a choice with "stop"
    n: int = 1
    priority: int = 0  # lower = more urgent
    cache_salt: str = ""  # prefix-cache hits only within one salt
    adapter: str = ""  # LoRA adapter; part of the prefix-cache key
    arrived_s: float = 0.0  # time.monotonic() at HTTP arrival (one clock a machine)


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The client is gone. Every live choice ends with "abort"; unknown handles are ignored."""

    handle: int


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """Text matched a stop string: the choice ends with "stop" after its first `n_tokens` tokens."""

    handle: int
    choice: int
    n_tokens: int


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """An API process is alive. One a second; see `Settings.api_timeout_s`."""


ToEngine = Submit | Abort | Finish | Beat

# ---------------------------------------------------------------- engine -> API process


class End(msgspec.Struct, frozen=True, array_like=True):
    """A choice ended. `stop_id` is the id that ended it (its token was sent), else -1."""

    handle: int
    choice: int
    reason: Reason
    stop_id: int = -1


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A request ended: the one terminal message. `error` is an `errors` code, "" if none."""

    handle: int
    error: str = ""
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache, at first admission
    output_tokens: int = 0  # over all choices
    preemptions: int = 0
    queue_s: float = 0.0  # submit -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token
    decode_s: float = 0.0  # first token -> last token


class TokenOut(msgspec.Struct, array_like=True):
    """All that one step has for one API process: columns of equal length, then ends, then dones.

    Token i belongs to (handles[i], choices[i]); a choice's tokens are in order.
    """

    handles: list[int]
    choices: list[int]
    tokens: list[int]
    ends: list[End]
    dones: list[Done]


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """What an API process must know of a loaded engine to refuse what can never run."""

    max_model_len: int  # prompt + output tokens of one sequence
    max_num_seqs: int
    vocab_size: int  # legal ids are 0 <= id < vocab_size
    block_size: int
    kv_blocks: int


class Pulse(msgspec.Struct, frozen=True, array_like=True):
    """The engine process is alive, sent twice a second from a thread of its own."""

    pid: int
    info: EngineInfo | None  # None while loading
    phase: str  # what it is doing, for people
    steps: int  # steps finished so far


# ---------------------------------------------------------------- engine <-> runner


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes device row `row` (first admission, resumption, or a fork of n > 1)."""

    row: int
    sampling: Sampling
    choice: int
    tables: list[list[int]]  # [kv group][index] -> block
    adapter: str = ""


class Grow(msgspec.Struct, frozen=True, array_like=True):
    """table[group][first : first + len(blocks)] = blocks, for the table of `row`.

    Appends new blocks, and replaces a shared block after a copy-on-write.
    """

    row: int
    group: int
    first: int
    blocks: list[int]


class Output:
    """What a forward row must yield (column `StepPlan.outputs`)."""

    NONE = 0  # KV only
    SAMPLE = 1  # logits of its last position, for the draws that name it
    POOL = 2  # reserved: hidden states, for embeddings
    PROMPT_LOGPROBS = 3  # reserved


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step, complete: every rank gets the same plan and does the same.

    Order of effects: leaves, joins, grows, copies, forward, draws.

    Forward row i computes tokens at positions [starts[i], starts[i] + counts[i]) of the sequence in
    device row rows[i]. Decode rows come first. ids[i] holds those tokens; None means that
    counts[i] == 1 and the token is the one last drawn into device row rows[i], which may still be
    on the device only.

    Draw j samples from the logits of forward row draw_from[j]'s last position into device row
    draw_into[j], with that row's Sampling and choice. The drawn token's position in its sequence is
    starts + counts of the forward row: the RNG counter. n > 1 draws n times from one forward row.

    A plan holds no clock, no address and nothing that is decided while it runs: ranks that start
    from equal tables stay equal.
    """

    step: int
    leaves: list[int]  # device rows freed since the last plan
    joins: list[Join]
    grows: list[Grow]
    copies: list[list[tuple[int, int]]]  # [kv group] -> (source block, target block)
    rows: list[int]
    starts: list[int]
    counts: list[int]
    ids: list[list[int] | None]
    outputs: list[int]
    unwritten: list[int]  # forward rows whose KV write is off: fully cached prompts
    draw_from: list[int]
    draw_into: list[int]
    # Reserved for speculation, k drafts and k + 1 draws from one forward row: the offset in its
    # forward row of the position that draw j samples from. [] = the last position, for all draws.
    draw_at: list[int] = []


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of a plan. tokens[j] answers draw j; -1 where draw j failed.

    What other kinds of `Output` yield will be further columns.
    """

    step: int
    tokens: list[int]
    failed: list[tuple[int, str]] = []  # (draw, why): that request alone ends with an error
    busy_s: float = 0.0  # time the device worked on this step
