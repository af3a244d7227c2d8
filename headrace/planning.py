"""What `headrace plan` tells: what of a model fits on a device, how fast it can be at most, and
what a million tokens then cost at least.

    decode step of B sequences    max(bytes / read rate, FLOPs / product rate), one token each
    prompt of n tokens            the same of one step with n tokens
    cost of a million tokens      price of an hour / 3600 * time of a token * 1e6

Bytes and FLOPs: see `models.shape`. `efficiency` scales both rates: 1 gives limits that nothing
passes; what a server reaches of them is measured, not assumed. Nothing of it reads weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.accelerators import Accelerator
from headrace.errors import ConfigError
from headrace.inspection import stored_bytes
from headrace.models.kv_layout import layout_of
from headrace.models.shape import Shape, shape_of
from headrace.models.sizes import WEIGHT_BYTES, kv_groups, kv_layer_bytes, parameters
from headrace.models.spec import ModelSpec, read_spec
from headrace.sources.files import ModelFiles

AS_STORED = "as stored"
# Bytes of an element of the KV cache, and of the scale of each head's line.
KV_BYTES: dict[str, tuple[int, int]] = {
    "float32": (4, 0),
    "bfloat16": (2, 0),
    "float16": (2, 0),
    "int8": (1, 4),
}


class Limit(msgspec.Struct, frozen=True):
    """The least time of one step, and why."""

    seconds: float
    bound: Literal["memory", "compute"]
    flops_per_byte: float


class Decode(msgspec.Struct, frozen=True):
    """Steps of `batch` sequences that each have `context` tokens behind them."""

    context: int
    batch: int
    fits: bool  # the KV cache holds them
    limit: Limit
    tokens_per_s: float
    cost_per_million: float | None  # None: no price was given


class Prefill(msgspec.Struct, frozen=True):
    """One prompt, nothing of it cached."""

    tokens: int
    fits: bool
    limit: Limit
    tokens_per_s: float
    cost_per_million: float | None


class Room(msgspec.Struct, frozen=True):
    """How many sequences of `context` tokens the KV cache holds, if layers with a window keep that
    alone."""

    context: int
    sequences: int


class Plan(msgspec.Struct, frozen=True):
    """Sizes in bytes and tokens, rates a second. `usable_bytes`: the share of the memory that is
    used; activations are not counted: they depend on the largest step, and `serve` prints them."""

    name: str
    device: Accelerator
    efficiency: float
    price_per_hour: float
    weights: str  # a key of WEIGHT_BYTES, or AS_STORED
    weight_bytes: int
    step_weight_bytes: float  # of them, what every step reads
    kv_dtype: str
    kv_bytes_per_token: float
    usable_bytes: int
    kv_bytes: int  # left for the KV cache; negative = the weights alone are too large
    kv_tokens: int  # that the KV cache keeps in every layer
    rooms: list[Room]
    decode: list[Decode]
    prefill: list[Prefill]
    even_batch: int  # sequences of the shortest context from which on products bound; 0 = none


class Planner:
    """Limits of one model on one device.

    weights: a key of WEIGHT_BYTES, AS_STORED, or "" = as stored where weights are here, else
    bfloat16. Raises ConfigError or ModelError.
    """

    def __init__(
        self,
        files: ModelFiles,
        device: Accelerator,
        *,
        weights: str = "",
        kv_dtype: str = "bfloat16",
        utilization: float = 0.9,
        efficiency: float = 1.0,
        price_per_hour: float = 0.0,
    ) -> None:
        self.spec = read_spec(files)
        stored = stored_bytes(files)
        self._weights = weights or (AS_STORED if stored else "bfloat16")
        if self._weights == AS_STORED and not stored:
            raise ConfigError(f"{files.name} has no weights here: say --weights", param="weights")
        self._name, self._device = files.name, device
        self._efficiency, self._price = efficiency, price_per_hour
        self._kv_dtype = kv_dtype
        self._layout = layout_of(self.spec)
        self._layer_bytes = kv_layer_bytes(self.spec, *KV_BYTES[kv_dtype])
        self.shape, self._weight_bytes = _sized(self.spec, self._weights, stored, kv_dtype)
        self._usable = int(device.memory_bytes * utilization)
        self._room = self._usable - self._weight_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache keeps in every layer."""
        return self._sequences(1)

    def _sequences(self, tokens: int) -> int:
        """How many of so many tokens each the KV cache holds."""
        return max(0, self._room) // self._layout.kept_bytes(self._layer_bytes, tokens)

    def limit(self, tokens: int, rows: int, context_tokens: float, pairs: float) -> Limit:
        """Of one step; see `Shape`. An MoE's step reads the experts that its tokens hit if they
        are spread evenly."""
        mixture = self.shape.mixture
        hit = 0.0 if mixture is None else mixture.hit(tokens)
        size, flops = (
            self.shape.step_bytes(context_tokens, hit),
            self.shape.step_flops(tokens, rows, pairs),
        )
        device = self._device
        read_s = size / device.read_bytes_per_s / self._efficiency
        product_s = flops / device.flops_per_s / self._efficiency
        bound: Literal["memory", "compute"] = "memory" if read_s >= product_s else "compute"
        return Limit(max(read_s, product_s), bound, flops / size)

    def decode(self, context: int, batch: int) -> Decode:
        """One token of each of `batch` sequences."""
        seen = batch * self.shape.seen(context)
        limit = self.limit(batch, batch, seen, seen)
        rate = batch / limit.seconds
        fits = batch <= self._sequences(context)
        return Decode(context, batch, fits, limit, rate, self._cost(rate))

    def prefill(self, tokens: int) -> Prefill:
        """A prompt of so many tokens, up to its first output token."""
        limit = self.limit(tokens, 1, 0, self.shape.pairs(tokens))
        rate = tokens / limit.seconds
        fits = self._sequences(tokens) > 0
        return Prefill(tokens, fits, limit, rate, self._cost(rate))

    def plan(self, contexts: Sequence[int], batches: Sequence[int], prompts: Sequence[int]) -> Plan:
        """All of it. A context is what a sequence has behind it on average."""
        return Plan(
            name=self._name,
            device=self._device,
            efficiency=self._efficiency,
            price_per_hour=self._price,
            weights=self._weights,
            weight_bytes=self._weight_bytes,
            step_weight_bytes=self.shape.weight_bytes,
            kv_dtype=self._kv_dtype,
            kv_bytes_per_token=self.shape.kv_token_bytes,
            usable_bytes=self._usable,
            kv_bytes=self._room,
            kv_tokens=self.kv_tokens,
            rooms=[Room(context, self._sequences(context)) for context in contexts],
            decode=[self.decode(context, batch) for context in contexts for batch in batches],
            prefill=[self.prefill(tokens) for tokens in prompts],
            even_batch=self._even_batch(min(contexts)),
        )

    def _cost(self, tokens_per_s: float) -> float | None:
        return self._price / 3600 / tokens_per_s * 1e6 if self._price else None

    def _even_batch(self, context: int) -> int:
        """The least batch whose decode step products bound. FLOPs a byte only rise with it."""
        low, high = 0, 1
        while self.decode(context, high).limit.bound == "memory":
            low, high = high, high * 2
            if high > _MOST_BATCH:
                return 0
        while high - low > 1:
            middle = (low + high) // 2
            if self.decode(context, middle).limit.bound == "memory":
                low = middle
            else:
                high = middle
        return high


_MOST_BATCH = 1 << 16


def _sized(spec: ModelSpec, weights: str, stored: int, kv_dtype: str) -> tuple[Shape, int]:
    """The model's shape with the widths of its elements, and the bytes of its weights in the
    device's memory."""
    shape, counts = shape_of(spec), parameters(spec)
    if weights == AS_STORED:
        layers = vocabulary = stored / counts.total  # of a mixed file the mean
        size = stored
    else:
        layers, vocabulary = WEIGHT_BYTES[weights]
        size = counts.weight_bytes(weights)
    size -= int(counts.apart * layers)
    kv_bytes = sum(group.bytes_per_token for group in kv_groups(spec, *KV_BYTES[kv_dtype]))
    sized = msgspec.structs.replace(
        shape,
        item_bytes=layers,
        head_item_bytes=vocabulary,
        kv_item_bytes=kv_bytes / shape.kv_elements,
    )
    return sized, size
