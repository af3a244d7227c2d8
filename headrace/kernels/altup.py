"""What Gemma 3n has between its products: streams that a layer predicts and corrects (AltUp,
https://arxiv.org/abs/2301.13310), a learned residual (LAuReL, https://arxiv.org/abs/2411.07501),
vectors of each token and layer. Sums in float32, rounded once where something is written.

Shapes: T tokens, S streams, H = hidden; streams [T, S, H]. A row lies in the registers of one
program. The plain reference of each is the method of `models.altup.AltUpBlock` in its docstring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.activation import activate
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, power_of_two


@triton.jit
def _modalities(x, h, norm, router, eps, H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr):
    """x float32 [BH] -> [SP]: how far each of S modalities is there; 0 from S on."""
    inside = h < H
    gain = tl.load(norm + h, mask=inside, other=0.0).to(tl.float32)
    z = x * (tl.rsqrt(tl.sum(x * x, axis=0) / H + eps) / H) * gain
    s = tl.arange(0, SP)
    found = tl.zeros([SP], dtype=tl.float32)
    for i in tl.static_range(S):
        row = tl.load(router + i * H + h, mask=inside, other=0.0).to(tl.float32)
        routed = tl.sum(z * row, axis=0)
        found = tl.where(s == i, 2.0 * tl.sigmoid(2.0 * routed) - 1.0, found)  # tanh
    return found


@triton.jit(do_not_specialize=["eps"])
def predict_kernel(
    streams,
    norm,
    router,
    predictions,
    out,
    active,
    eps,
    H: tl.constexpr,
    BH: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    ACTIVE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    j = tl.arange(0, SP)
    inside = h < H
    pdl.wait(PDL)
    base = token * S * H + h
    x = tl.load(streams + base + ACTIVE * H, mask=inside, other=0.0).to(tl.float32)
    there = _modalities(x, h, norm, router, eps, H, S, SP)
    square = (j < S)[:, None] & (j < S)[None, :]
    for i in tl.static_range(S):
        at = (i * S + j[:, None]) * S + j[None, :]
        of_i = tl.load(predictions + at, mask=square, other=0.0).to(tl.float32)
        weights = tl.sum(of_i * there[None, :], axis=1)  # of each stream in the i-th
        y = tl.load(streams + base + i * H, mask=inside, other=0.0).to(tl.float32)
        for n in tl.static_range(S):
            other = tl.load(streams + base + n * H, mask=inside, other=0.0).to(tl.float32)
            y += tl.sum(tl.where(j == n, weights, 0.0), axis=0) * other
        tl.store(out + base + i * H, y.to(out.dtype.element_ty), mask=inside)
        if i == ACTIVE:
            tl.store(active + token * H + h, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def correct_kernel(
    streams,
    x,
    norm,
    router,
    corrections,
    scale,
    out,
    first,
    eps,
    H: tl.constexpr,
    BH: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    ACTIVE: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    j = tl.arange(0, SP)
    inside = h < H
    pdl.wait(PDL)
    base = token * S * H + h
    y = tl.load(x + token * H + h, mask=inside, other=0.0).to(tl.float32)
    there = _modalities(y, h, norm, router, eps, H, S, SP)
    news = y - tl.load(streams + base + ACTIVE * H, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(S):
        row = tl.load(corrections + i * S + j, mask=j < S, other=0.0).to(tl.float32)
        old = tl.load(streams + base + i * H, mask=inside, other=0.0).to(tl.float32)
        new = (old + (tl.sum(row * there, axis=0) + 1.0) * news).to(out.dtype.element_ty)
        tl.store(out + base + i * H, new, mask=inside)
        if i == ACTIVE:
            kept = new.to(tl.float32)
            if SCALED:
                kept *= tl.load(scale + h, mask=inside, other=0.0).to(tl.float32)
            tl.store(first + token * H + h, kept.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def residual_kernel(
    normed, y, gain, out, eps, factor, H: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Grid (tokens,)."""
    pdl.release(PDL)
    at = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BH)
    inside = h < H
    weight = tl.load(gain + h, mask=inside, other=0.0).to(tl.float32)
    pdl.wait(PDL)
    z = tl.load(y + at + h, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(normed + at + h, mask=inside, other=0.0).to(tl.float32)
    z *= tl.rsqrt(tl.sum(z * z, axis=0) / H + eps) * weight
    tl.store(out + at + h, ((x + z) * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride"])
def gate_inputs_kernel(
    gate,
    inputs,
    stride,
    out,
    W: tl.constexpr,
    BW: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BW)
    inside = w < W
    pdl.wait(PDL)
    y = tl.load(gate + token * W + w, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(inputs + token * stride + w, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * W + w, (activate(y, ACT) * own).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def add_to_others_kernel(
    streams,
    y,
    gain,
    eps,
    H: tl.constexpr,
    BH: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    inside = h < H
    weight = tl.load(gain + h, mask=inside, other=0.0).to(tl.float32)
    pdl.wait(PDL)
    z = tl.load(y + token * H + h, mask=inside, other=0.0).to(tl.float32)
    z *= tl.rsqrt(tl.sum(z * z, axis=0) / H + eps) * weight
    for i in tl.static_range(1, S):
        at = streams + (token * S + i) * H + h
        old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (old + z).to(streams.dtype.element_ty), mask=inside)


def predict(
    streams: Tensor,
    norm: tuple[Tensor, float],
    router: Tensor,
    predictions: Tensor,
    active: int,
    *,
    with_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `AltUpBlock.predicted`: streams -> new ones, and a copy [T, H] of the active one.

    norm = (weight [H], eps); router [S, H]; predictions [S * S, S].
    """
    tokens, count, hidden = streams.shape
    _check(streams, norm[0], router)
    check_output(predictions, (count * count, count))
    out, x = torch.empty_like(streams), streams.new_empty(tokens, hidden)
    if tokens:
        launch(predict_kernel, (tokens,),
            streams, norm[0], router, predictions, out, x, norm[1],
            S=count, SP=power_of_two(count), ACTIVE=active, **_rows(hidden, with_pdl),
        )  # fmt: skip
    return out, x


def correct(
    streams: Tensor,
    x: Tensor,
    norm: tuple[Tensor, float],
    router: Tensor,
    corrections: Tensor,
    scale: Tensor | None,
    active: int,
    *,
    with_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """The first half of `AltUpBlock.corrected`: streams and x [T, H], what the layer made of the
    active one -> new streams, and the active one of them times scale [H], [T, H].

    norm = (weight [H], eps); router [S, H]; corrections [S, S].
    """
    tokens, count, hidden = streams.shape
    _check(streams, norm[0], router)
    check_output(x, (tokens, hidden))
    check_output(corrections, (count, count))
    out, first = torch.empty_like(streams), torch.empty_like(x)
    if tokens:
        launch(correct_kernel, (tokens,),
            streams, x, norm[0], router, corrections, x if scale is None else scale, out, first,
            norm[1], S=count, SP=power_of_two(count), ACTIVE=active, SCALED=scale is not None,
            **_rows(hidden, with_pdl),
        )  # fmt: skip
    return out, first


def residual(
    normed: Tensor, y: Tensor, norm: tuple[Tensor, float], factor: float, *, with_pdl: bool = False
) -> Tensor:
    """normed, y [T, H], norm = (weight [H], eps) -> (normed + RMSNorm(y)) * factor, in y."""
    tokens, hidden = y.shape
    check_output(normed, (tokens, hidden))
    if tokens:
        launch(residual_kernel, (tokens,),
            normed, y, norm[0], y, norm[1], factor, **_rows(hidden, with_pdl),
        )  # fmt: skip
    return y


def gate_inputs(gate: Tensor, inputs: Tensor, act: str, *, with_pdl: bool = False) -> Tensor:
    """act(gate) * inputs [T, W], in place of gate; rows of inputs may lie apart."""
    tokens, width = gate.shape
    check_output(gate, inputs.shape)
    assert inputs.stride(1) == 1, "a row's numbers lie one after another"
    if tokens:
        block = power_of_two(width)
        launch(gate_inputs_kernel, (tokens,), gate, inputs, inputs.stride(0), gate,
            W=width, BW=block, ACT=act, num_warps=max(1, min(8, block // 128)),
            **pdl.options(with_pdl),
        )  # fmt: skip
    return gate


def add_to_others(
    streams: Tensor, y: Tensor, norm: tuple[Tensor, float], *, with_pdl: bool = False
) -> Tensor:
    """streams + RMSNorm(y [T, H]) but for the first of them, in place; norm = (weight [H], eps)."""
    tokens, count, hidden = streams.shape
    check_output(y, (tokens, hidden))
    if tokens:
        launch(add_to_others_kernel, (tokens,), streams, y, norm[0], norm[1],
            S=count, **_rows(hidden, with_pdl),
        )  # fmt: skip
    return streams


def _check(streams: Tensor, gain: Tensor, router: Tensor) -> None:
    assert streams.is_contiguous(), "the streams of a token lie one after another"
    check_output(gain, streams.shape[2:])
    check_output(router, streams.shape[1:])


def _rows(hidden: int, with_pdl: bool) -> dict[str, int | bool]:
    """Of a launch whose programs hold a row each."""
    block = power_of_two(hidden)
    warps = min(16, max(1, block // 256))
    return {"H": hidden, "BH": block, "num_warps": warps, **pdl.options(with_pdl)}
