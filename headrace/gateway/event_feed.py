"""One worker's events, in order: what is missing is asked for, what cannot be had is admitted.

Sans-IO: `live` and `reply` take what came, `wants` says from which number on the worker has to
send again, `tick` brings the time. Batches are numbered from 0; after a restart, from 0 again.

The blocks in the index are at all times those that were stored and not removed between some batch
and the newest one that was applied. Where that batch is the first, or one that cleared everything,
nothing is missing: EXACT. Else blocks may be missing, and none is there wrongly: DEGRADED. Where
nothing of use was heard: FALLBACK.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Literal

from headrace.gateway.block_index import BlockIndex
from headrace.gateway.kv_wire import Cleared, Event, NoBatch, Other, Removed, decode_batch

log = logging.getLogger("headrace.gateway")

State = Literal["exact", "degraded", "fallback"]
RECENT = 1024  # batches that are known again when they come twice
HELD = 256  # batches that are kept while one before them is awaited
HELD_BYTES = 16 * 2**20
REPLY_S = 2.0  # without a word, an answer is lost
AUDIT_S = 5.0  # of silence, after which the worker is asked whether that was all
TRIES = 3  # answers that may fail, or not close a gap
GAP_S = 1.0  # a gap that nobody can be asked about is given up after this


class Feed:
    """The events of worker `name`, into `index`. replays: it can be asked for old batches."""

    def __init__(self, index: BlockIndex, name: str, *, replays: bool, now_s: float) -> None:
        self._index, self._name, self._replays = index, name, replays
        self._next = 0  # the first batch that is not applied
        self._complete = True  # nothing from before is missing
        self._heard = self._gap = False
        self._anew = False  # ask for everything when the worker answers again
        self._cut = False  # nobody knows whether the next batch follows, or can be asked
        self._sure = not replays  # an answer said that `_next` is what comes next
        self._recent: OrderedDict[int, object] = OrderedDict()  # number -> when it was made
        self._held: dict[int, bytes] = {}  # behind a gap, or while an answer is awaited
        self._held_bytes = 0
        self.wants: int | None = 0 if replays else None
        self._asked: int | None = None  # first number of the answer that is under way
        self._got = 0  # batches of it
        self._skip = False  # the rest of it says nothing
        self._failed = self._tries = 0  # answers in a row that did not come; that closed no gap
        self._since_s = self._quiet_s = self._gap_s = now_s
        self._odd = ""  # a kind of cache that is not known here
        self.counts = {"batches": 0, "gaps": 0, "lost": 0, "restarts": 0, "bad": 0, "again": 0}

    # ------------------------------------------------------------ what it is worth

    @property
    def next_batch(self) -> int:
        """The number of the first batch that was not applied."""
        return self._next

    @property
    def state(self) -> State:
        """How much the index knows of this worker."""
        if self._odd or self._index.odd(self._name) or not self._heard:
            return "fallback"
        return "exact" if not self.why else "degraded"

    @property
    def why(self) -> str:
        """The reason of a state that is not exact."""
        if self._odd:
            return f"its cache is of the kind {self._odd}"
        if odd := self._index.odd(self._name):
            return odd
        if not self._heard:
            return "no event was heard yet"
        if self._gap:
            return f"batch {self._next} of its events is missing"
        if not self._complete:
            return "older blocks are not known"
        return "" if self._sure else "it did not say yet that its events go on where they were"

    # ------------------------------------------------------------ what comes

    def live(self, number: int, payload: bytes, now_s: float) -> None:
        """A batch from the subscription. Call `work` then."""
        self._quiet_s = now_s
        if self._asked is None and self.wants is None and not self._held:
            self._take(number, payload, now_s)
        else:
            self._hold(number, payload)

    def reply(self, number: int, payload: bytes, now_s: float) -> None:
        """A batch of the answer."""
        if self._asked is None:
            return  # it was given up
        self._since_s = self._quiet_s = now_s
        self._got += 1
        if self._skip:
            return
        made, events = self._decode(payload)
        again = self._got == 1 and self._asked < self._next
        if again and number == self._asked and self._recent.get(number) == made:
            return  # the one that was applied last: the worker goes on where it was
        if events and isinstance(events[0], Cleared) and (self._got == 1 or number >= self._next):
            self._recent.clear()
            self._start(number, complete=True)  # whatever was before, this is all
        elif again and number <= self._asked:
            self._restart()
            self._skip = True
            return
        elif again or number > self._next:
            self._lose(number)
        if number == self._next:
            self._apply(number, made, events)

    def reply_end(self, now_s: float) -> None:
        """The answer is whole. Call `work` then."""
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        self._quiet_s = now_s
        self._failed = 0
        self._heard = True
        if not self._got and asked < self._next:
            self._restart()  # it knows nothing of what it said before
            self._skip = asked > 0
        self._sure = not self._skip
        if self._skip:
            self.wants = 0
            return
        for number in [n for n in self._held if n < self._next]:
            self._drop(number)  # they were applied before, or by the answer

    def work(self, now_s: float) -> bool:
        """Apply one batch that was held back. False: there is none, or it has to wait on."""
        if self._asked is not None or self.wants is not None or not self._held:
            return False
        number = min(self._held)
        if number > self._next:
            if self._replays and self._tries < TRIES:
                self._tries += 1
                self._ask()
                return False
            if not self._replays and now_s - self._gap_s <= GAP_S:
                return False  # it may come late
        payload = self._held[number]
        self._drop(number)
        self._take(number, payload, now_s, final=True)
        return bool(self._held)

    def tick(self, now_s: float) -> None:
        """Time passes: answers are given up, silence is looked into. Call `work` then."""
        if self._asked is not None:
            if now_s - self._since_s > REPLY_S:
                self._give_up()
        elif self._replays and self.wants is None and now_s - self._quiet_s > AUDIT_S:
            self._quiet_s = now_s
            if self._anew and not self._complete:
                self._restart()
            self._anew = False
            self._ask()

    def _give_up(self) -> None:
        self._asked = None
        self._failed += 1
        self._sure = self._skip = False
        if self._got or self._failed < TRIES:
            self._ask()
        else:
            self._tries = TRIES  # live batches go on without those that are missing
            self._anew = True

    def asked(self, now_s: float) -> None:
        """The worker was asked for what `wants` says."""
        assert self.wants is not None, "nothing is wanted"
        self._asked, self.wants = self.wants, None
        self._got, self._skip, self._since_s = 0, False, now_s

    def doubt(self) -> None:
        """The line was cut, or the worker was away: is it still the one that it was?"""
        self._sure = False
        for number in list(self._held):  # they may be of another run
            self._drop(number)
        if self._replays:
            self._asked = None  # an answer under way may be from before
            self._ask()
        else:
            self._cut = True
            self._start(self._next, complete=False)

    # ------------------------------------------------------------ inside

    def _ask(self) -> None:
        """The batch applied last comes first in the answer, if it is still the same worker."""
        self.wants = max(0, self._next - 1)

    def _take(self, number: int, payload: bytes, now_s: float, *, final: bool = False) -> None:
        """A batch whose turn it is. final: those before it do not come any more."""
        made, events = self._decode(payload)
        if self._cut:
            self._cut, self._sure = False, True
            self._restart()
            final = True
        if number < self._next:
            if self._recent.get(number) == made:
                self.counts["again"] += 1
                return
            if self._replays:  # late, or of another run: the worker will say, and send it again
                self._sure = False
                self._ask()
                return
            self._restart()
        if number > self._next and not final:
            self._gap = True
            self._gap_s = now_s
            self.counts["gaps"] += 1
            self._hold(number, payload)
            if self._replays:
                self._ask()
            return
        if number > self._next:
            self._lose(number)
        self._apply(number, made, events)

    def _hold(self, number: int, payload: bytes) -> None:
        """The newest give way: they are asked for again once the gap is closed."""
        self._drop(number)
        self._held[number] = payload
        self._held_bytes += len(payload)
        while len(self._held) > HELD or (self._held_bytes > HELD_BYTES and len(self._held) > 1):
            self._drop(max(self._held))

    def _drop(self, number: int) -> None:
        payload = self._held.pop(number, None)
        if payload is not None:
            self._held_bytes -= len(payload)

    def _start(self, number: int, *, complete: bool) -> None:
        """Nothing from before batch `number` counts."""
        self._index.clear(self._name)
        self._next, self._complete, self._gap = number, complete, False

    def _lose(self, number: int) -> None:
        """What lies before batch `number` is lost; blocks may have been removed in it."""
        if self._heard:
            log.warning("worker %s: KV events before %d are lost", self._name, number)
        self.counts["lost"] += 1
        self._start(number, complete=False)

    def _restart(self) -> None:
        """The worker counts from 0 again."""
        log.info("worker %s began its KV events anew", self._name)
        self.counts["restarts"] += 1
        self._recent.clear()
        self._odd = ""
        self._tries = 0
        self._start(0, complete=True)

    def _decode(self, payload: bytes) -> tuple[object, list[Event] | None]:
        try:
            made, events = decode_batch(payload)
            return hash(payload) if made is None else made, events
        except NoBatch as error:
            log.warning("worker %s: a batch of KV events cannot be read: %s", self._name, error)
            return hash(payload), None

    def _apply(self, number: int, made: object, events: list[Event] | None) -> None:
        assert number == self._next, f"batch {number} comes behind {self._next - 1}"
        self._heard = True
        self._gap = False
        self._tries = 0
        self.counts["batches"] += 1
        self._recent[number] = made
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        if events is None:
            self.counts["bad"] += 1
            self._lose(number)
        self._next = number + 1
        for event in events or ():
            self._event(event)

    def _event(self, event: Event) -> None:
        if isinstance(event, Cleared):
            self._index.clear(self._name)
            self._complete = True
        elif isinstance(event, Removed):
            self._index.remove(self._name, event.hashes, event.group)
        elif isinstance(event, Other):
            self._odd = event.kind
        elif not self._index.store(self._name, event) and self._complete:
            log.warning("worker %s: the index of its blocks is full", self._name)
            self._complete = False
