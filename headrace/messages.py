"""Every frozen shape that crosses a queue: API <-> engine (msgpack over ZMQ), engine <-> runner.

Names used throughout:
  handle   integer that an API process gives a request; unique among its live requests
  choice   0..n-1 within a request (OpenAI's choice index)
  row      index into the runner's device tables; a running sequence owns one until it leaves
  forward row   index into one StepPlan's columns
  kv group layers whose K and V of a sequence lie in blocks of one table
  block    index of `block_size` token slots of one KV group's layers in the paged KV cache; the
           groups share one pool

Structs travel as arrays: a new field goes to the end, with a default that means "not used".
"""

from __future__ import annotations

from typing import Literal

import msgspec

Reason = Literal["stop", "length", "abort", "error"]

# What becomes of a prompt that asks for a vector: the mean of the last hidden states (after the
# last norm) of all its tokens, that of its last token, or what the classification head says there.
Pooling = Literal["mean", "last", "scores"]
# The same of one chunk of it, as a runner is asked: the mean comes as sums.
Pool = Literal["sum", "last", "scores"]

NO_TOKEN_ALLOWED = "no token is allowed"  # StepResult.failed: rules and masks left none
WATCHED_S = 3.0  # a Look keeps the engine noting its steps for so long
EVERY = -1  # Done.handle: all of this API process's live requests are gone (it was silent too long)


class Rules(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens may be drawn at all, and with what bias. Applied before everything else."""

    bias: list[tuple[int, float]] = []  # (id, added to its logit); distinct ids
    allowed: list[int] = []  # only these; [] = all
    banned: list[int] = []
    bad_words: list[list[int]] = []  # the last id of each is banned after the ids before it
    min_tokens: int = 0  # before as many output tokens, `held` are banned
    held: list[int] = []

    @property
    def size(self) -> int:
        """How many ids it holds."""
        words = sum(map(len, self.bad_words))
        return len(self.bias) + len(self.allowed) + len(self.banned) + words + len(self.held)


class Repetition(msgspec.Struct, frozen=True, array_like=True):
    """Penalties on tokens that were there already."""

    repetition: float = 1.0  # prompt and output: a positive logit is divided, a negative multiplied
    frequency: float = 0.0  # output: subtracted once an occurrence
    presence: float = 0.0  # output: subtracted once
    window: int = 0  # last tokens of the sequence that count; 0 = all


class Dry(msgspec.Struct, frozen=True, array_like=True):
    """A token that would lengthen a repeat of n >= allowed_length tokens loses
    multiplier * base ** (n - allowed_length)."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = 0  # last tokens of the sequence that are searched; 0 = all
    breakers: list[int] = []  # a repeat does not reach across these ids


class Lz(msgspec.Struct, frozen=True, array_like=True):
    """A token loses `strength` times what an LZ77 coder would save by it."""

    strength: float
    window: int = 512  # last tokens that the coder sees


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence draws its tokens. All values are resolved: no "default".

    None in the four last ones: not used, and free of cost. They apply to greedy rows too.
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**64; the client draws one when the caller gave none
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # 0 = off
    logprobs: int = -1  # how many of the most likely tokens to report beside the drawn one; -1 = no
    rules: Rules | None = None
    repetition: Repetition | None = None
    dry: Dry | None = None
    lz: Lz | None = None

    @property
    def needs_history(self) -> bool:
        """A draw looks at the ids before it."""
        words = self.rules is not None and bool(self.rules.bad_words)
        return words or any(x is not None for x in (self.repetition, self.dry, self.lz))


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output must match, from its first token on."""

    kind: Literal["json", "regex", "lark"]  # a JSON schema, a regular expression, a Lark grammar
    text: str


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position: log-softmax of the model's own logits."""

    logprob: float  # of the token that stands there
    rank: int  # 1 = it was the most likely one
    top_ids: list[int]  # most likely first, lowest id first among equals
    top: list[float]


# ---------------------------------------------------------------- API process -> engine


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """One request. Exactly one `Done` answers it, whatever happens."""

    handle: int
    prompt: list[int]  # not empty
    max_tokens: int  # per choice; 0: the prompt is computed, and nothing is drawn
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []  # drawing one of these ends a choice with "stop"
    n: int = 1
    priority: int = 0  # lower = more urgent
    cache_salt: str = ""  # prefix-cache hits only within one salt
    adapter: str = ""  # LoRA adapter; part of the prefix-cache key
    arrived_s: float = 0.0  # time.monotonic() at HTTP arrival (one clock a machine)
    prompt_logprobs: int = -1  # as Sampling.logprobs, for prompt tokens 1, 2, ...; no cache is read
    grammar: Grammar | None = None
    pooling: Pooling | None = None  # one `Vector` answers it, and no token: max_tokens is 0, n is 1
    record: bool = False  # tell what becomes of it, step by step: `TokenOut.recorded`


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


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Somebody watches the engine: one `View` answers it. For WATCHED_S from now steps are kept."""

    states: bool = False  # of each block too


ToEngine = Submit | Abort | Finish | Beat | Look

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
    queue_s: float = 0.0  # submit -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token
    decode_s: float = 0.0  # first token -> last token
    compute_s: float = 0.0  # its share of the device's time; see `engine.shares`
    recompute_s: float = 0.0  # of that, for KV that preemptions had lost
    preempted_s: list[float] = []  # time.monotonic() of each preemption
    longest_tokens: int = 0  # output tokens of the choice that has most

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""
        return len(self.preempted_s)


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """entries[i] is for prompt token first + i. The pieces of a prompt come in order, once."""

    handle: int
    first: int
    entries: list[Logprobs]


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """What a request with `pooling` gets, once, before its Done with "stop"."""

    handle: int
    values: bytes  # float32, little-endian: as many as the model's width, or its labels


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """One step as it ran. Columns, an entry a forward row: decode rows first. Times are
    time.monotonic(), 0 = it has not landed yet."""

    step: int
    launched_s: float
    landed_s: float
    device_s: float  # the device worked on it
    waiting: int  # requests, when it was planned
    kv_used: int  # blocks, when it was planned
    decodes: int  # how many of the rows are decode rows
    requests: list[int]  # numbers of the engine's own, which say nothing of who asked
    starts: list[int]
    counts: list[int]
    draws: list[int]


BlockEvent = Literal["shared", "allocated", "copied", "freed", "evicted", "preempted"]


class BlockNote(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one choice. At `first` in its table; -1 where they stand in no table.

    shared     found in the prefix cache, or those of the choice that it was forked from
    allocated  new
    copied     new, and what a block that others share held was copied into it
    evicted    of those, whose cached prefix was given up for this request
    preempted  taken away; freed: given back
    """

    step: int  # the plan that did it; of "freed" the newest one
    choice: int
    kind: BlockEvent
    first: int
    blocks: list[int]


class StageView(msgspec.Struct, frozen=True, array_like=True):
    """What a stage of sampling left: values [len(ids)] of the likeliest tokens, falling."""

    name: str  # docs/recording.md has them
    kept: int  # tokens that may still be drawn; -1 = not counted
    ids: list[int]
    values: list[float]  # logits; of "softmax" probabilities


class Tap(msgspec.Struct, frozen=True, array_like=True):
    """The values of one draw as the step had them."""

    draw: int  # of the plan
    greedy: bool
    uniform: float  # the number that decided; -1 = greedy, or it did not leave the device
    stages: list[StageView]


class DrawNote(msgspec.Struct, frozen=True, array_like=True):
    """One token of a recorded choice, and how it came about."""

    step: int
    choice: int
    index: int  # of the token in the output of its choice
    token: int
    tap: Tap


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """What one step, or the end, has to tell of a recorded request."""

    number: int  # in `StepView.requests`
    steps: list[StepView] = []
    blocks: list[BlockNote] = []
    draws: list[DrawNote] = []
    cut: bool = False  # no more steps will be told: it took too many


class View(msgspec.Struct, frozen=True, array_like=True):
    """The engine at one moment; answers `Look`. Counters count from its start."""

    time_s: float  # time.monotonic()
    running: int
    waiting: int
    kv_blocks: int
    kv_used: int
    kv_cached: int  # free ones that a prefix can hit
    block_size: int
    steps: int
    generation_tokens: int
    prefill_tokens: int  # prompt tokens that had to be computed
    last_steps: list[StepView] = []  # oldest first
    states: bytes = b""  # by block: 0 free, 1 free and can be hit, 2 held, 3 held by several


class TokenOut(msgspec.Struct, array_like=True):
    """All that one step has for one API process: columns of equal length, then ends, then dones.

    Token i belongs to (handles[i], choices[i]); a choice's tokens are in order. `logprobs` is a
    column too, or [] when no token has any.
    """

    handles: list[int]
    choices: list[int]
    tokens: list[int]
    ends: list[End]
    dones: list[Done]
    logprobs: list[Logprobs | None] = []
    prompt_logprobs: list[PromptLogprobs] = []
    vectors: list[Vector] = []
    recorded: list[tuple[int, msgspec.Raw]] = []  # handle, a `Recorded` that need not be read now
    view: View | None = None


class KernelsInfo(msgspec.Struct, frozen=True, array_like=True):
    """What computes, and why: labels of a metric."""

    backend: str
    kernels: str  # native or torch; on a GPU triton, and with + who else attends for prompts
    isa: str  # the instruction set, such as avx512
    precision: str  # fast or exact, as the setting cpu_precision; a GPU's is exact
    reason: str  # of the choice; where something lacks, what to do about it


class Positions(msgspec.Struct, frozen=True, array_like=True):
    """How the model knows where a token stands; the fields of `models.spec.Rope`."""

    kind: str  # of the rotary embedding, "alibi", or "none"
    theta: float = 0.0
    rotary_dim: int = 0  # numbers of a head that turn
    scaling: dict[str, float] = {}


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """What an API process must know of a loaded engine to refuse what can never run."""

    max_model_len: int  # prompt + output tokens of one sequence
    max_num_seqs: int
    vocab_size: int  # legal ids are 0 <= id < vocab_size
    block_size: int
    kv_blocks: int
    kernels: KernelsInfo | None = None  # None: the backend has no choice of them
    width: int = 0  # of a hidden state; 0 = no request with `pooling` can be served
    labels: int = 0  # of the classification head; 0 = the model has none
    generates: bool = True  # False: it has no output layer, every request must have `pooling`
    records: bool = False  # `Submit.record` is honoured
    draws_note: str = ""  # what its draws cannot show
    positions: Positions | None = None
    ledger: list[tuple[str, int]] = []  # what takes memory, bytes
    device_uuid: str = ""  # of the GPU that computes; "" = none does
    kv_tokens: int = 0  # that the KV cache keeps in every layer; 0 = there is no pool
    kv_windows: tuple[int, ...] = (0,)  # of the groups that KV events tell of, in tokens; 0 = none


class Pulse(msgspec.Struct, frozen=True, array_like=True):
    """The engine process is alive, sent twice a second from a thread of its own."""

    pid: int
    info: EngineInfo | None  # None while loading
    phase: str  # what it is doing, for people
    steps: int  # steps finished so far


# ---------------------------------------------------------------- engine <-> runner


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes device row `row` (first admission, resumption, or a fork of n > 1).

    `history`, where its sampling needs one: its ids so far. It goes on with the ids of the row's
    forward rows and with the tokens drawn into it, each at its position.
    """

    row: int
    sampling: Sampling
    choice: int
    tables: list[list[int]]  # [kv group][index] -> block
    adapter: str = ""
    prompt_tokens: int = 0  # output begins at this position
    history: list[int] = []
    record: bool = False  # its draws are wanted in `StepResult.taps`


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
    POOL = 2  # a vector, as `StepPlan.pools` says
    PROMPT_LOGPROBS = 3  # as SAMPLE, and what `StepPlan.prompts` says of it


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
    copies: list[list[tuple[int, int]]]  # [pool] -> (source block, target block)
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
    # (forward row, how many most likely tokens, id after its last token or -1): the log-probability
    # of each id in its place, given what stands before it. Only rows of output PROMPT_LOGPROBS.
    prompts: list[tuple[int, int, int]] = []
    # (forward row, what of its last hidden states). Only rows of output POOL, each once.
    pools: list[tuple[int, Pool]] = []


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of a plan. tokens[j] answers draw j; -1 where draw j failed.

    logprobs is a column beside tokens, or [] when no draw asks. prompt_logprobs[i] answers
    plan.prompts[i]: ids[1], ids[2], ... of its forward row, then the id after it unless -1.
    vectors[i] answers plan.pools[i]: float32, little-endian, [width], of scores [labels].
    taps: of draws into rows that are recorded, in the order of the draws.
    """

    step: int
    tokens: list[int]
    failed: list[tuple[int, str]] = []  # (draw, why): that request alone ends with an error
    busy_s: float = 0.0  # of the device: between two CUDA events, or of a processor (metering.md)
    logprobs: list[Logprobs | None] = []
    prompt_logprobs: list[list[Logprobs]] = []
    vectors: list[bytes] = []
    taps: list[Tap] = []
    sample_s: float = -1.0  # of busy_s, after the forward pass; -1 = this runner cannot tell
    waited_s: float = 0.0  # `result` waited for the device; 0: it was done before, or nobody knows
