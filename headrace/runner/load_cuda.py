"""From settings and files to a runner on a GPU."""

from __future__ import annotations

import os

import torch

from headrace.backends.cuda.chunk_choice import check_choice
from headrace.backends.cuda.device import find_card, native_bfloat16
from headrace.backends.cuda.ops import COMPUTES
from headrace.config import Settings
from headrace.engine.protocol import Runner
from headrace.errors import ConfigError
from headrace.models.features import refuse_missing
from headrace.models.kv_layout import layout_of
from headrace.runner import ledger
from headrace.runner.build import LoadInfo, check_weights, info_of, read_facts
from headrace.runner.build_cuda import build_runner
from headrace.runner.phase import Report, phase
from headrace.runner.progress import Progress
from headrace.runner.weights import load_model
from headrace.sources.cache import cache_home
from headrace.sources.files import ModelFiles


def load_cuda(
    settings: Settings, files: ModelFiles, report: Report, progress: Progress | None
) -> tuple[Runner, LoadInfo]:
    """See `build.load_runner`."""
    # Compiled kernels stay; Triton's own key names sources, versions, options and card.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_home() / "triton"))
    with phase("find the GPU", report):
        card = find_card()
        target = torch.device("cuda", card.index)
        torch.zeros(1, device=target)  # makes the context
    with phase("read the model's config", report):
        facts = read_facts(settings, files)
        refuse_missing(facts.spec, COMPUTES, "cuda")
        dtype: torch.dtype = getattr(torch, facts.dtype.value)
        if dtype == torch.bfloat16 and not native_bfloat16(card):
            raise ConfigError(f"{card.name} has no bfloat16: use float16", param="dtype")
        check_choice(settings.prefill_attention, dtype, facts.spec.head_dim, target)
    check_weights(settings, facts, report)
    with phase("load weights", report):
        model = load_model(facts.spec, facts.checkpoint, dtype, target, progress)
        torch.cuda.synchronize(target)
    runner, blocks, length, lines = build_runner(
        settings, model, facts.wanted_model_len, card, report
    )
    weights = ledger.weights_line(p for p in model.parameters() if p.is_cuda)
    lines += ledger.host_lines(p for p in model.parameters() if not p.is_cuda)
    size, layout = runner.capacity.block_size, layout_of(facts.spec)
    kv = ledger.kv_line(facts.spec, layout, facts.dtype.value, size, blocks)
    return runner, info_of(runner.capacity, facts, blocks, length, [weights, kv, *lines])
