"""What each worker is thought to hold of a prompt, and how far that is to be trusted.

EXACT: its own events say so, and none is missing. DEGRADED: some are; what was sent there counts
too. FALLBACK: it publishes none, or the prompt's tokens are not known here; what was sent there is
all there is. Blocks of prompts on their way are expected: their events come when they are computed,
and from then on events alone count, for a full cache drops blocks again. Where much waits at a
worker, a prompt finds what is left when that is computed: no more than what was sent there last, up
to the size of its cache.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec
import zmq

from headrace.gateway.block_index import BlockIndex
from headrace.gateway.event_feed import Feed, State
from headrace.gateway.prefix_index import Holders, PrefixIndex, root_of, token_chain
from headrace.gateway.prompt import Prompt
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.subscriber import EventSource, Subscription
from headrace.gateway.worker import Worker

log = logging.getLogger("headrace.gateway")

EXPECTED_S = 2.0  # beyond the time in which a prompt should be computed
EVENTS_S = 0.25  # from a prompt's first token, or end, until its events must be here
TURNOVER = 0.25  # of a worker's cache: where more waits there, events of now are not enough
MAX_EXPECTED = 2**17  # blocks
_WILD = ("*", "0.0.0.0", "[::]", "::")


_FALLBACK: tuple[State, ...] = ("fallback",)


class _Told(msgspec.Struct):
    """What a worker's card says of its events."""

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    windows: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()


class _Card(msgspec.Struct):
    kv_events: _Told | None = None
    tokenizer: str = ""
    parent: object = None
    kv_tokens: object = None


class Expected(Holders):
    """Blocks that workers are computing, each until a time."""

    def __init__(self) -> None:
        super().__init__()
        self._until: dict[str, dict[int, float]] = {}
        self._queue: deque[tuple[float, str, Sequence[int]]] = deque()
        self._computed: deque[tuple[float, str, Sequence[int]]] = deque()  # of `come`
        self._count = 0

    def add_worker(self, name: str) -> None:
        """From now on `name` may be expected to hold blocks."""
        self._enter(name)
        self._until[name] = {}

    def remove_worker(self, name: str) -> None:
        """`name` is gone."""
        self.clear(name)
        del self._until[name]
        self._leave(name)

    def clear(self, name: str) -> None:
        """Nothing is expected of `name`."""
        until = self._until[name]
        for chunk in until:
            self._unmark(chunk, name)
        self._count -= len(until)
        until.clear()

    def blocks(self, name: str) -> int:
        """How many are expected of `name`."""
        return len(self._until[name])

    def expect(self, name: str, chain: Sequence[int], until_s: float) -> None:
        """`name` will hold these. Beyond MAX_EXPECTED nothing more is expected."""
        if not chain or self._count + len(chain) > MAX_EXPECTED:
            return
        held = self._until[name]
        for chunk in chain:
            if chunk not in held:
                self._count += 1
                self._mark(chunk, name)
            held[chunk] = max(until_s, held.get(chunk, 0.0))
        self._queue.append((until_s, name, chain))

    def come(self, name: str, chain: Sequence[int], promised_s: float, until_s: float) -> None:
        """What was expected of `name` until `promised_s` is, or will never be; it counts until
        `until_s`, which no later call makes earlier. What others expect stays as it is.
        """
        held = self._until.get(name, {})
        for chunk in chain:
            if until_s < held.get(chunk, 0.0) <= promised_s:
                held[chunk] = until_s
        self._computed.append((until_s, name, chain))

    def sweep(self, now_s: float) -> None:
        """What should have come by now is expected no more."""
        for queue in (self._queue, self._computed):
            while queue and queue[0][0] <= now_s:
                _, name, chain = queue.popleft()
                held = self._until.get(name, {})
                for chunk in chain:
                    if held.get(chunk, now_s + 1) <= now_s:
                        del held[chunk]
                        self._count -= 1
                        self._unmark(chunk, name)

    def holders(self, chunk: int) -> int:
        """Bits of the workers."""
        return self._masks.get(chunk, 0)


class Beliefs:
    """Events of all workers that publish some."""

    def __init__(self, settings: GatewaySettings, history: PrefixIndex) -> None:
        self._listens = settings.kv_events
        self._history = history
        self.blocks = BlockIndex(settings.block_index_bytes)
        self._expected = Expected()
        self._followed: dict[str, Subscription] = {}
        self._no_address: dict[str, EventSource] = {}  # of workers: the log has it
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def add_worker(self, name: str) -> None:
        """A worker of the fleet; its bit is the same in both indexes."""
        self.blocks.add_worker(name)
        self._expected.add_worker(name)

    def remove_worker(self, name: str) -> None:
        """It leaves the fleet."""
        self._unfollow(name)
        self._no_address.pop(name, None)
        self.blocks.remove_worker(name)
        self._expected.remove_worker(name)

    def follow(self, worker: Worker) -> None:
        """Listen to its events, as the operator or its card says where."""
        source = event_source(worker) if self._listens and not worker.gone else None
        old = self._followed.get(worker.name)
        if source == (old.source if old is not None else None):
            return
        self._unfollow(worker.name)
        if source is None:
            return
        if self._context is None:
            self._context = zmq.Context()
        now_s = time.monotonic()
        replays = bool(source.replay_endpoint)
        self.blocks.promise(worker.name, source.windows)
        feed = Feed(self.blocks, worker.name, replays=replays, now_s=now_s)
        try:
            self._followed[worker.name] = Subscription(self._context, source, feed)
        except zmq.ZMQError as error:
            if self._no_address.get(worker.name) != source:  # later checks come here again
                said = worker.name, source.endpoint, error
                log.error("worker %s: no KV events from %s: %s", *said)
            self._no_address[worker.name] = source

    def came_up(self, worker: Worker) -> None:
        """It was away: what it holds is to be confirmed."""
        self._expected.clear(worker.name)
        self.follow(worker)
        if followed := self._followed.get(worker.name):
            followed.doubt()

    def _unfollow(self, name: str) -> None:
        followed = self._followed.pop(name, None)
        if followed is not None:
            followed.close()
            self.blocks.clear(name)

    def tick(self) -> None:
        """About once a second."""
        self._expected.sweep(time.monotonic())
        for followed in list(self._followed.values()):
            followed.tick()

    def close(self) -> None:
        """Every worker was removed."""
        assert not self._followed, "workers are followed"
        if self._context is not None:
            self._context.term()

    # ------------------------------------------------------------ for decisions

    def feed(self, name: str) -> Feed | None:
        """The events of a worker that publishes some."""
        followed = self._followed.get(name)
        return followed.feed if followed is not None else None

    def state(self, name: str) -> State:
        """How much is known of what `name` holds."""
        feed = self.feed(name)
        return feed.state if feed is not None else "fallback"

    def tell(self, name: str) -> dict[str, object] | None:
        """For people; None: it publishes nothing that is listened to."""
        followed = self._followed.get(name)
        if followed is None:
            return None
        feed, source = followed.feed, followed.source
        self._expected.sweep(time.monotonic())
        return {
            "endpoint": source.endpoint,
            "state": feed.state,
            "why": feed.why,
            "blocks": self.blocks.blocks(name),
            "block_tokens": self.blocks.block_size(name),
            "expected_blocks": self._expected.blocks(name),
            "next_batch": feed.next_batch,
            **feed.counts,
        }

    def cached(
        self, prompt: Prompt, workers: Sequence[Worker]
    ) -> tuple[tuple[int, ...], tuple[State, ...]]:
        """Tokens of the prompt that each of `workers` is thought to hold, and the state of that."""
        names = [worker.name for worker in workers]
        held = self._history.match(prompt.chain, names)
        cached = [prompt.tokens_of(n) if n else 0 for n in held]
        if prompt.ids is None or not self._followed:
            return tuple(cached), _FALLBACK * len(names)
        self._expected.sweep(time.monotonic())
        states: list[State] = ["fallback"] * len(names)
        for at, worker in enumerate(workers):
            states[at] = self._state_for(prompt, worker)
        for size in {self.blocks.block_size(name) for name in names} - {0}:
            known = {
                name: at
                for at, name in enumerate(names)
                if states[at] != "fallback" and self.blocks.block_size(name) == size
            }
            if not known:
                continue
            for name, n in zip(known, self._leading(prompt, size, list(known)), strict=True):
                at, tokens = known[name], n * size
                if states[at] != "exact":
                    cached[at] = max(tokens, cached[at])
                elif tokens > cached[at] and self._turns_over(prompt, workers[at]):
                    cached[at] = min(tokens, prompt.tokens_of(held[at] + 1))  # within a chunk
                else:
                    cached[at] = tokens
        for at, name in enumerate(names):
            if states[at] == "exact" and not self.blocks.block_size(name):
                states[at] = "degraded"  # what it computes as its first prompt is not told yet
        return tuple(cached), tuple(states)

    def _state_for(self, prompt: Prompt, worker: Worker) -> State:
        """Of this prompt: a worker that makes other tokens of it cannot be told from ours."""
        card = card_of(worker, prompt.model)
        if card.parent is not None:
            return "fallback"  # an adapter, whose blocks lie under its own name
        if prompt.tokenizer and card.tokenizer and prompt.tokenizer != card.tokenizer:
            return "fallback"
        return self.state(worker.name)

    def _turns_over(self, prompt: Prompt, worker: Worker) -> bool:
        """What waits at the worker drops what its cache holds now and nobody asked for lately."""
        most = TURNOVER * cache_tokens(worker, prompt.model)
        return 0 < most < worker.pending_tokens and self._history.full(worker.name)

    def _leading(self, prompt: Prompt, size: int, names: Sequence[str]) -> tuple[int, ...]:
        return self.blocks.match_with(chain_of(prompt, size), names, self._expected.holders)

    def placed(
        self, prompt: Prompt, worker: Worker, now_s: float, computed_s: float
    ) -> Callable[[], None] | None:
        """The prompt goes there and should be computed in so many seconds. What to call when it is,
        or never will be; None: nothing is expected."""
        self._expected.sweep(now_s)
        size = self.blocks.block_size(worker.name)
        if prompt.ids is None or not size or self.state(worker.name) == "fallback":
            return None
        chain, until_s = chain_of(prompt, size), now_s + computed_s + EXPECTED_S
        self._expected.expect(worker.name, chain, until_s)
        return partial(self._computed, worker.name, chain, until_s)

    def _computed(self, name: str, chain: Sequence[int], promised_s: float) -> None:
        self._expected.come(name, chain, promised_s, time.monotonic() + EVENTS_S)


def chain_of(prompt: Prompt, block_tokens: int) -> list[int]:
    """The prompt's blocks as `BlockIndex` knows them; made once for each size."""
    chain = prompt.token_chains.get(block_tokens)
    if chain is None:
        assert prompt.ids is not None, "its tokens are known"
        root = root_of("", salt=prompt.salt)
        chain = prompt.token_chains[block_tokens] = token_chain(prompt.ids, root, block_tokens)
    return chain


def card_of(worker: Worker, model: str) -> _Card:
    """What the worker's card of a model says that matters here."""
    card = worker.cards.get(model)
    if card is None:
        return _NOTHING
    try:
        return msgspec.convert(card, _Card)
    except msgspec.ValidationError:
        return _NOTHING  # a foreign server may use these names for something else


_NOTHING = _Card()


def cache_tokens(worker: Worker, model: str) -> int:
    """Size of its KV cache, as the operator or its card says; 0 = not known."""
    said = worker.spec.cache_tokens or card_of(worker, model).kv_tokens
    return said if isinstance(said, int) and said > 0 else 0


def event_source(worker: Worker) -> EventSource | None:
    """Where to listen: the fleet file's word, else the worker's own. An address that names no host
    is on the worker's."""
    spec = worker.spec
    told = _Told(spec.kv_events_endpoint, spec.kv_events_replay_endpoint, spec.kv_events_topic)
    cards = (card_of(worker, model).kv_events for model in worker.cards)
    card = next((card for card in cards if card is not None), _Told())
    if not told.endpoint:
        told = card
    if not told.endpoint:
        return None
    host = spec.address[0]
    return EventSource(
        endpoint=_reached(told.endpoint, host),
        replay_endpoint=_reached(told.replay_endpoint, host),
        topic=told.topic,
        windows=card.windows,
    )


def _reached(endpoint: str, host: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    name, _, port = rest.rpartition(":")
    if scheme != "tcp" or name not in _WILD:
        return endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
