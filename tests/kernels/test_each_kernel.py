"""One call of each kernel with odd sizes: what compute-sanitizer runs on a card, in minutes.

Each case is a case of the kernel's own tests, with the names of the kernels that it launches.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import kernels
from headrace.kernels import launch as launching
from tests.kernels import (
    test_activation,
    test_altup,
    test_attention_decode,
    test_attention_prefill,
    test_compressed,
    test_dense_prefill,
    test_edited,
    test_elementwise,
    test_experts,
    test_flash_chunks,
    test_gate_up_tiles,
    test_gather,
    test_latent,
    test_linear,
    test_logprobs,
    test_pool,
    test_router,
    test_sampling,
    test_state,
)
from tests.kernels.conftest import CUDA

Case = Callable[[torch.device], None]
DTYPE = torch.bfloat16 if CUDA else torch.float16
CASES: dict[str, Case] = {
    "begin_kernel": lambda on: test_elementwise.test_begin(5, 53, DTYPE, on),
    "rms_norm_kernel": lambda on: test_elementwise.test_add_and_norm(3, 53, DTYPE, on),
    "inverse_rms_kernel": lambda on: test_elementwise.test_inverse_rms(3, 53, DTYPE, on),
    "activation_kernel": lambda on: test_activation.test_gated(
        3, 53, "gelu_tanh", ("scale", "bias"), DTYPE, on
    ),
    "sparse_gate_kernel": lambda on: test_activation.test_sparse_gate(3, 53, True, DTYPE, on),
    "gather_rows_kernel": lambda on: test_gather.test_gather(5, 53, DTYPE, on),
    "predict_kernel": lambda on: test_altup.test_predict(3, DTYPE, on),
    "streams_kernel": lambda on: test_altup.test_spread_and_gather(3, DTYPE, on),
    "residual_kernel": lambda on: test_altup.test_residual(3, DTYPE, on),
    "correct_kernel gate_inputs_kernel add_to_others_kernel": (
        lambda on: test_altup.test_correct(3, True, DTYPE, on)
    ),
    "soft_cap_kernel": lambda on: test_activation.test_soft_cap(3, 53, DTYPE, on),
    "layer_norm_kernel": lambda on: test_elementwise.test_layer_norm(3, 53, True, DTYPE, on),
    "norm_add_kernel": lambda on: test_elementwise.test_norm_add(3, 53, DTYPE, on),
    "rotary_write_kernel": lambda on: test_elementwise.test_rotary_write(
        7, 3, 3, 12, ("scale", "bias"), DTYPE, on
    ),
    "linear_kernel": lambda on: test_linear.test_linear(3, 37, 53, test_linear.SPLIT, DTYPE, on),
    "gate_up_kernel": lambda on: test_linear.test_gate_up(40, 33, 48, test_linear.WIDE, DTYPE, on),
    "gate_up_tiles_kernel": lambda on: test_gate_up_tiles.test_tiles(
        17, 40, 72, test_gate_up_tiles.SMALL, True, torch.bfloat16, on
    ),
    "qkv_kernel": lambda on: test_linear.test_qkv(6, 3, 1, 16, 53, test_linear.SPLIT, DTYPE, on),
    "_decode_kernel": lambda on: test_attention_decode.check(
        [1, 17, 75], d=80, dtype=DTYPE, padding=2
    ),
    "_prefill_kernel": lambda on: test_attention_prefill.check(
        [(20, 7), (37, 1)], d=80, dtype=DTYPE
    ),
    "_gather_kernel": lambda on: test_dense_prefill.test_gather(DTYPE, 80, 29),
    "_gather_keys_kernel": lambda on: test_flash_chunks.test_gather_keys(DTYPE, 80),
    "_merge_kernel": lambda on: test_dense_prefill.test_merge(DTYPE, 7, 5, 80),
    "expert_gate_up_kernel expert_down_kernel combine_kernel": lambda on: test_experts.test_layer(
        "odd", DTYPE, on
    ),
    "compress_kernel compressed_gate_up_kernel compressed_down_kernel": (
        lambda on: test_compressed.test_layer(16, 0.8, test_compressed.DTYPES[0], on)
    ),
    "route_kernel dispatch_kernel": lambda on: test_router.test_routing("pairs", 17, on),
    "count_kernel place_kernel": test_router.test_many_items,
    "route_few_kernel": lambda on: test_router.test_few("plain", 4, 2, on),
    "latent_write_kernel": lambda on: test_latent.test_write("odd", DTYPE, on),
    "absorb_kernel value_up_kernel": lambda on: test_latent.test_up_and_down("even", 3, DTYPE, on),
    "latent_decode_kernel": lambda on: test_latent.test_decode("odd", [50, 2], 6, DTYPE, on),
    "latent_prefill_kernel gather_lines_kernel latent_dense_kernel": lambda on: (
        test_latent.test_chunks("odd", [(90, 3)], 4, DTYPE, on)
    ),
    "_poke_kernel": lambda on: test_state.test_poke(on, 1000, 600, 599),
    "_copy_kernel": lambda on: test_state.test_copy_blocks(on, DTYPE, True),
    (
        "bracket_kernel gather_kernel edge_kernel kept_kernel chunk_peaks_kernel few_kernel "
        "draw_kernel"
    ): lambda on: test_sampling.test_masked_tokens_are_never_drawn(),
    "widen_kernel edit_kernel moments_kernel sigma_kernel": (
        lambda on: test_edited.test_long_sequences()
    ),
    (
        "settle_kernel centre_kernel narrow_kernel bounds_kernel collect_kernel typical_kernel "
        "near_kernel"
    ): lambda on: test_edited.test_rows_that_cannot_be_drawn(),
    "pool_kernel": lambda on: test_pool.check(DTYPE, 53, [(3, 37), (0, 1), (40, 3)]),
    "chunk_logprobs_kernel row_logprobs_kernel": (
        lambda on: test_logprobs.check(DTYPE, listed=True, vocab=2 * test_logprobs.CHUNK + 3)
    ),
}


@pytest.mark.sanitize
@pytest.mark.parametrize("names", list(CASES))
def test_call(names: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    plain = launching.launch

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        seen.add(kernel.fn.__name__)
        plain(kernel, *args, **options)

    for module in pkgutil.iter_modules(kernels.__path__):
        part = importlib.import_module(f"headrace.kernels.{module.name}")
        if getattr(part, "launch", None) is plain:
            monkeypatch.setattr(part, "launch", noted)
    CASES[names](device)
    assert set(names.split()) <= seen


def test_no_kernel_is_left_out() -> None:
    launched = set()
    for path in Path(kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
                launched.add(ast.unparse(node.args[0]))
    assert launched - {"kernel"} == {name for names in CASES for name in names.split()}
