"""A decoder whose layers are transformers' own, with our attention registered in its interface.

All tokens of a step go through them as one sequence: everything but attention works on single
tokens, and attention is `Ops.attend_given`, which knows whose token each is.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from headrace.errors import ModelError
from headrace.models.foreign import theirs
from headrace.models.layers import Decoder, GivenAttention
from headrace.models.ops import Ops
from headrace.models.spec import ModelSpec

try:
    from transformers.initialization import no_init_weights
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights

NAME = "headrace"  # in transformers' table of attention functions
_INTERFACE = "transformers' attention interface, without which it cannot be batched here"
_STEP = "headrace_step"  # an attribute of every module of the layers
# What attention functions are told that changes nothing here.
_HARMLESS = {
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states",
    "position_ids", "return_dict", "use_cache",
}  # fmt: skip


class ForeignDecoder(Decoder):
    """`base`: embedding to last norm; `inner`: what makes logits of that."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # none of a decoder's own parts
        self.spec, self.dtype, self.rotaries = spec, dtype, nn.ModuleDict()
        written = json.loads(spec.foreign)
        with theirs(spec.architecture), no_init_weights():
            config = CONFIG_MAPPING[written["model_type"]].from_dict(written)
            try:
                inner = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=NAME
                )
            except KeyError as error:
                if error.args != (NAME,):
                    raise
                # Looked up in a table of its own.
                raise ModelError(f"{spec.architecture}: no layer uses {_INTERFACE}") from error
            inner.tie_weights()  # left out where weights are not drawn
        inner.eval().requires_grad_(False)
        self._prefix = inner.base_model_prefix
        self.base: nn.Module = getattr(inner, self._prefix)
        self._given, self._step = _Given(), _Step(spec, config)
        setattr(inner, self._prefix, self._given)
        self.inner: nn.Module = inner
        self.norm = nn.Identity()  # type: ignore[assignment]  # `base` ends with it
        self.head = self.classifier = None
        for module in self.base.modules():
            setattr(module, _STEP, self._step)
        kept = {name for name, _ in self.named_parameters()}
        lost = {name for name, _ in self.named_buffers()} & self.state_dict().keys()
        if lost - kept:
            raise ModelError(f"{spec.architecture} stores {', '.join(sorted(lost))}: no parameter")

    def stored_name(self, name: str) -> str:
        """What checkpoints call a parameter. GPT-NeoX's output layer has two names."""
        part, _, rest = name.partition(".")
        if part == "base":
            return f"{self._prefix}.{rest}"
        return rest.replace("embed_out.", "lm_head.")

    def forward(self, ops: Ops) -> Tensor:
        """One step -> [n, hidden], after the last norm."""
        ids, positions = ops.tokens()
        # A step that ran past the last token of a sequence is dropped; it must only not fail.
        positions = positions.clamp(max=self.spec.max_positions - 1)
        self._step.begin(ops)
        with theirs(self.spec.architecture):
            out = self.base(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        self._step.end()
        x: Tensor = out.last_hidden_state[0]
        return ops.narrow(x, x)[0]

    def logits(self, x: Tensor, ops: Ops) -> Tensor:
        """x [n, hidden] of `forward` -> [n, vocab_size], scaled and capped as the model has it."""
        self._given.hidden = x[None]
        ids = torch.zeros(1, x.shape[0], dtype=torch.int64)
        with theirs(self.spec.architecture):
            logits: Tensor = self.inner(input_ids=ids, use_cache=False).logits[0]
        self._given.hidden = None
        return logits[:, : self.spec.vocab_size].float()


class _Given(nn.Module):
    """Stands where the layers were: what they gave is at hand."""

    hidden: Tensor | None = None

    @property
    def decoder(self) -> _Given:
        """Some heads (OPT's) go past the base model."""
        return self

    def forward(self, *args: Any, **more: Any) -> BaseModelOutputWithPast:
        out = BaseModelOutputWithPast(last_hidden_state=self.hidden)
        out.cross_attentions = out.router_logits = None  # some heads hand them on
        return out


class _Step:
    """The step that runs, for attention modules: they are not given one."""

    def __init__(self, spec: ModelSpec, config: Any) -> None:
        self.spec = spec
        self.types = list(getattr(config, "layer_types", None) or [])
        self.ops: Ops | None = None
        self.layers: set[int] = set()  # that have asked for attention

    def begin(self, ops: Ops) -> None:
        self.ops = ops
        self.layers.clear()

    def end(self) -> None:
        """Raises ModelError for layers that went another way than the interface."""
        self.ops = None
        if len(self.layers) != self.spec.layers:
            raise ModelError(
                f"{self.spec.architecture}: {len(self.layers)} of {self.spec.layers} layers use "
                f"{_INTERFACE}"
            )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, T, d], key and value [1, kv_heads, T, d]
    -> [1, T, heads, d]. Raises ModelError for what it is told and cannot do."""
    step: _Step = getattr(module, _STEP)
    spec, layer = step.spec, int(module.layer_idx)  # type: ignore[arg-type]
    assert step.ops is not None, "attention outside of a step"
    told = [name for name, what in more.items() if what is not None and name not in _HARMLESS]
    if attention_mask is not None:
        told.append("attention_mask")
    if step.types and (step.types[layer] == "sliding_attention") != bool(sliding_window):
        told.append("a window that is not the layer's")
    if key.shape[1:] != value.shape[1:] or key.shape[1::2] != (spec.kv_heads, spec.head_dim):
        told.append(f"keys {list(key.shape)} and values {list(value.shape)}")
    if not getattr(module, "is_causal", True) or more.get("is_causal") is False:
        told.append("tokens that see later ones")
    if layer in step.layers:
        told.append("two calls a layer, whose keys would lie in one place")
    if told:
        raise ModelError(f"{spec.architecture}: its attention has {', '.join(told)}")
    given = GivenAttention(
        layer=layer,
        window=sliding_window or 0,
        scale=scaling or 0.0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    step.layers.add(layer)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    y = step.ops.attend_given(given, q, k, v)
    return y.view(1, q.shape[0], q.shape[1], -1), None


AttentionInterface.register(NAME, attend)
