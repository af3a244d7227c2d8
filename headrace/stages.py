"""The eleven stages of a request, as data. The layout test and README's test read it."""

from __future__ import annotations

import msgspec


class Stage(msgspec.Struct, frozen=True):
    """One stage: where its code lives, the problem it solves, and the metric that shows it.

    The model's forward pass is one piece for a clock outside of it: stages 4 and 8 share its time.
    """

    number: int
    name: str
    phase: str  # ingest, compute or emit
    modules: tuple[str, ...]  # files or folders under headrace/; empty = not built yet
    problem: str
    metric: str  # its family in /metrics (of the gateway for stage 1; docs/metrics.md)


STAGES = (
    Stage(
        1,
        "Route",
        "ingest",
        ("gateway",),
        "which server, and may it come in",
        "headrace_gateway_decide_seconds",
    ),
    Stage(
        2,
        "Prepare",
        "ingest",
        ("api/schemas.py", "api/prepare.py", "api/turns.py", "text/template.py", "hooks"),
        "refuse what is wrong, render the chat into one prompt",
        "headrace_render_seconds",
    ),
    Stage(
        3,
        "Tokenize",
        "ingest",
        ("text/tokenizer.py", "text/piece_encoder.py"),
        "text to token ids, without blocking anyone else",
        "headrace_tokenize_seconds",
    ),
    Stage(
        4,
        "Embed",
        "compute",
        ("models/layers.py", "kernels/begin.py"),
        "token ids to vectors that know their position",
        "headrace_step_forward_seconds",
    ),
    Stage(
        5,
        "Schedule",
        "compute",
        ("engine/scheduler.py", "engine/policy.py", "engine/budget.py"),
        "which sequences get how many tokens in this step",
        "headrace_step_plan_seconds",
    ),
    Stage(
        6,
        "Prefill",
        "compute",
        ("runner/runner.py", "runner/forward.py", "kernels/attention_prefill.py"),
        "compute the prompt in chunks, reusing what is cached",
        "headrace_prefill_seconds",
    ),
    Stage(
        7,
        "KV cache",
        "compute",
        ("kv",),
        "keep keys and values in blocks that can be shared and reused",
        "headrace_kv_blocks_used",
    ),
    Stage(
        8,
        "Attend",
        "compute",
        (
            "backends/cpu/attention.py",
            "native",
            "backends/cuda/attention.py",
            "kernels/attention.py",
        ),
        "read the keys and values of one sequence through its block table",
        "headrace_step_forward_seconds",
    ),
    Stage(
        9,
        "Decode",
        "compute",
        ("runner/runner.py", "runner/cuda_runner.py", "kernels/attention_decode.py"),
        "one token a step for every running sequence, in one batch",
        "headrace_time_per_output_token_seconds",
    ),
    Stage(
        10,
        "Sample",
        "emit",
        ("sampling", "kernels/sampling.py", "grammar"),
        "logits to the next token, for each sequence on its own terms",
        "headrace_step_sample_seconds",
    ),
    Stage(
        11,
        "Stream",
        "emit",
        (
            "text/detokenizer.py",
            "text/stops.py",
            "text/calls",
            "text/thinking.py",
            "hooks",
            "api/stream.py",
        ),
        "token ids to text that never breaks a character, to the socket",
        "headrace_emit_seconds",
    ),
)
