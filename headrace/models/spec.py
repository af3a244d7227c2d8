"""What a checkpoint's config says, in our names. No torch.

Each family's module reads its own configs (`headrace.models.hf` and `.gguf` hold what they share).
A feature that changes the numbers and that headrace does not compute raises ModelError naming it:
a dropped feature gives fluent text at first and rubbish later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.errors import ModelError
from headrace.messages import Positions
from headrace.models import config_types, registry
from headrace.sources.card import known_ids, read_json
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import Header, read_header
from headrace.sources.labels import labels_of

CLAMP, CLAMP_SLOPE = 7.0, 1.702  # of the activation "clamped" (gpt-oss)
Act = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped"]  # see `layers.gated`, `layers.plain`


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding: pair i of a head turns by position * frequency i. `kind`:

    default   theta ** (-2i / dims)
    linear    the same, divided by `factor`
    llama3    divided by `factor` below `low_freq`, unchanged above `high_freq`, blended between
    yarn      the same idea, between `slow` and `fast` turns over `original_positions`
    dynamic   theta grows with the sequence beyond `original_positions` (NTK)
    longrope  divided by `long` where the sequence is longer than `original_positions`, by `short`
              where it is not
    factors   divided by a stored tensor [dims / 2] (GGUF `rope_freqs.weight`)

    `positions.Rotary` has the formulas, and says what the length of a sequence is.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "factors", "dynamic", "yarn", "longrope"] = (
        "default"
    )
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    original_positions: int = 8192
    dims: int = 0  # of a head are turned, the others stay as they are; 0 = all of them
    magnitude: float = 1.0  # cos and sin are multiplied by it (yarn's and longrope's)
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True  # yarn: the bounds are whole pairs
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """The frequencies of one position depend on how long its sequence is."""
        return self.kind in ("dynamic", "longrope")


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, where layers of a model may differ."""

    attention: Literal["heads", "latent"] = "heads"
    mlp: Literal["dense", "experts"] = "dense"
    window: int = 0  # newest tokens that a query sees, its own among them; 0 = all of them
    rope: Literal["global", "local", "none"] = "global"  # ModelSpec.rope, .local_rope or none
    scale: float = 0.0  # of scores; 0 = head_dim ** -0.5
    ffn: int = 0  # inner width of the MLP; 0 = ModelSpec.ffn
    kv_from: int = -1  # the layer whose K and V are read; -1 = its own
    sparsity: float = 0.0  # share of the MLP's gate that is dropped; 0 = all of it goes on


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The routed feed-forward of layers whose `mlp` is experts."""

    count: int
    chosen: int  # of a token
    ffn: int  # inner width of one expert
    shared_ffn: int = 0  # of the expert that every token passes; 0 = there is none
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"  # chosen: softmax of the chosen
    normed: bool = True  # the weights of the chosen are divided by their sum
    scaling: float = 1.0  # of the weights, after that
    corrected: bool = False  # a stored bias is added to the scores for choosing, not for weighing
    groups: int = 1  # experts in groups; only the best `chosen_groups` are looked at
    chosen_groups: int = 1
    group_score: Literal["best", "two"] = "best"  # of a group: its best, or its best two added
    biases: bool = False  # on the router and in the experts

    def __post_init__(self) -> None:
        if self.shared_ffn % self.ffn:
            raise ModelError(
                f"a shared expert {self.shared_ffn} wide is not made of experts {self.ffn} wide"
            )
        if self.chosen > self.count:
            raise ModelError(f"num_experts_per_tok = {self.chosen} of {self.count} experts")
        size = self.count // self.groups
        open_to_choice = size * self.chosen_groups if self.groups > 1 else self.count
        scored = size > 1 or self.group_score == "best" or self.groups == 1
        fits = size * self.groups == self.count and self.chosen_groups <= self.groups
        if not fits or not scored or self.chosen > open_to_choice:
            raise ModelError(
                f"n_group = {self.groups}, topk_group = {self.chosen_groups}: {self.chosen} of "
                f"{self.count} experts cannot be chosen so"
            )

    @property
    def shared(self) -> int:
        """Experts of the routed ones' width that are the shared one."""
        return self.shared_ffn // self.ffn

    @property
    def total(self) -> int:
        """Experts there are."""
        return self.count + self.shared


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Attention through a latent vector (MLA): the cache holds kv_rank + rope_dim numbers a token.

    https://arxiv.org/abs/2405.04434, section 2.1.
    """

    kv_rank: int
    q_rank: int  # 0 = q is one matrix
    plain_dim: int  # of a q or k head, not turned
    rope_dim: int  # of a q head, and of the one k that all heads share
    value_dim: int


class AltUp(msgspec.Struct, frozen=True, kw_only=True):
    """The streams of Gemma 3n and what goes with them; see `models.altup`."""

    streams: int
    active: int  # the one that layers compute
    scaled: bool  # it is scaled before a layer's own vectors come in
    laurel_rank: int
    layer_width: int  # of the vector that each token has for each layer
    layer_rows: int  # tokens that have such vectors; the others take those of token 0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one model. Sizes are counts of elements, heads, layers or tokens."""

    architecture: str  # as the checkpoint says: LlamaForCausalLM, llama, ...
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_rows: int  # rows of the embedding and of the output layer
    vocab_size: int  # ids that the tokenizer knows; <= vocab_rows
    rope: Rope
    norm_eps: float
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    max_positions: int
    dtype: str = ""  # what the config claims the weights to be; "" = it does not say
    kinds: tuple[LayerSpec, ...] = ()  # of each layer; () = all are LayerSpec()
    local_rope: Rope | None = None
    # rms_wide: weight and product in float32, rounded once (Gemma)
    norm: Literal["rms", "rms_wide", "layer"] = "rms"
    norm_bias: bool = False
    post_norms: bool = False  # what attention and MLP give is normed before it is added
    qk_norm: bool = False  # RMS norm of each head of q and k, before rotary embedding
    v_norm: bool = False  # the same of v, without a weight
    qkv_clip: float = 0.0  # q, k and v within plus and minus this; 0 = as they are
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0 = as they are
    sinks: bool = False  # a stored score a head takes its share of the softmax and gives nothing
    alibi: float = 0.0  # exponent of the steepest slope, see `rope.alibi_slopes`; 0 = none
    out_bias: bool = False
    gated: bool = True  # the MLP is down(act(gate) * up), else down(act(up))
    act: Act = "silu"
    mlp_bias: bool = False
    embed_scale: float = 1.0
    learned_positions: int = 0  # rows of a second embedding, by position; 0 = there is none
    logit_softcap: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    altup: AltUp | None = None
    foreign: str = ""  # config.json of a model whose layers are transformers'; see models.foreign
    labels: int = 0  # of the classification head, which stands where the output layer would

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_rows"):
            if getattr(self, key) < 1:
                raise ModelError(f"{self.architecture}: {key} = {getattr(self, key)}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} heads do not divide into {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim}: an even number is needed")
        if not 0 < self.vocab_size <= self.vocab_rows:
            raise ModelError(
                f"the tokenizer has {self.vocab_size} ids, the embedding {self.vocab_rows} rows"
            )
        if self.kinds and len(self.kinds) != self.layers:
            raise ModelError(f"{self.layers} layers, and kinds of {len(self.kinds)}")

    @property
    def keys_are_values(self) -> bool:
        """The cache holds one line a token and layer, which is key and value."""
        return self.latent is not None

    def layer(self, index: int) -> LayerSpec:
        """What layer `index` is."""
        return self.kinds[index] if self.kinds else LayerSpec()

    @property
    def by_length(self) -> Rope | None:
        """The rotary embedding that goes by the length of a sequence, if there is one."""
        ropes = (self.rope, self.local_rope)
        return next((rope for rope in ropes if rope is not None and rope.by_length), None)

    @property
    def long_from(self) -> int:
        """Prompts of more tokens have other keys than shorter ones; 0 = all have alike."""
        return self.by_length.original_positions if self.by_length else 0

    @property
    def each_length(self) -> bool:
        """Every length of those has its own keys."""
        return self.by_length is not None and self.by_length.kind == "dynamic"

    def every_layer(self) -> tuple[LayerSpec, ...]:
        """What each layer is."""
        return self.kinds or (LayerSpec(),) * self.layers

    @property
    def known_positions(self) -> Positions:
        """How it knows where a token stands, for people."""
        if self.alibi:
            return Positions("alibi", scaling={"steepest_slope": self.alibi})
        if self.learned_positions:
            return Positions("learned", scaling={"positions": self.learned_positions})
        rope, scaling = self.rope, {}
        if rope.kind != "default":
            names = ("factor", "low_freq", "high_freq", "original_positions", "magnitude")
            plain = Rope()
            scaling = {n: getattr(rope, n) for n in names if getattr(rope, n) != getattr(plain, n)}
        return Positions(rope.kind, rope.theta, rope.dims or self.head_dim, scaling)

    @property
    def generates(self) -> bool:
        """It has an output layer."""
        return not self.labels


def read_spec(files: ModelFiles) -> ModelSpec:
    """The spec of a model on disk. Raises ModelError if it cannot be read or run."""
    if files.kind == "gguf":
        return from_gguf(read_header(files.path))
    if files.kind != "hf":
        raise ModelError(f"{files.name}: a model of kind {files.kind!r} has no weights")
    config = read_json(files.path / "config.json", required=True)
    return from_hf(config, known_ids(files.path / "tokenizer.json"))


def from_hf(config: Mapping[str, Any], known_ids: int = 0) -> ModelSpec:
    """The spec in a config.json. `known_ids`: ids the tokenizer has, 0 = take the config's word.

    Raises ModelError naming an unknown architecture, a missing key or an unsupported feature.
    """
    config_types.check({"architectures": config.get("architectures")})
    name = (config.get("architectures") or ["(none)"])[0]
    if not registry.foreign(name):
        config_types.check(config)
    spec = registry.module_of(name).from_hf(config)
    labels = len(labels_of(config))
    return msgspec.structs.replace(
        spec,
        architecture=name,
        vocab_size=min(known_ids or spec.vocab_size, spec.vocab_size),
        labels=labels,
        tied=spec.tied or labels > 0,
    )


def from_gguf(header: Header) -> ModelSpec:
    """The spec in a GGUF header. Raises ModelError as `from_hf` does."""
    return registry.module_of(header.architecture).from_gguf(header)
