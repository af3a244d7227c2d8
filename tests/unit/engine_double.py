"""An engine with scripted behaviour for tests of the process boundary: no scheduler, no runner.

Every turn gives each live choice one token, letters "a".."z" by position, until it has as many as
were asked for. `pause_s` makes a turn long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.engine.recorder import view_of
from headrace.engine.stats import EngineStats, StepTimes
from headrace.messages import Abort, Done, End, Finish, Look, Reason, Submit, TokenOut


class Live:
    """One request."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.counts = [0] * submit.n
        self.ended = [False] * submit.n


class ScriptedEngine:
    """Implements what `engine.server` uses of `Engine`."""

    def __init__(self, *, pause_s: float = 0.0, tokens_a_turn: int = 1) -> None:
        self.pause_s = pause_s
        self.tokens_a_turn = tokens_a_turn
        self.live: dict[tuple[int, int], Live] = {}
        self.outs: dict[int, TokenOut] = {}
        self.messages: list[tuple[int, Submit | Abort | Finish]] = []  # (owner, message)
        self.drops: list[int] = []  # owners
        self.steps = 0
        self.put_off = 0  # pieces that are left for when there is no work
        self.on_idle: Callable[[], None] = lambda: None  # what each of them does
        self.wait: Callable[[], float] = lambda: 0.0  # `spare_s`
        self.closed = False

    def submit(self, owner: int, msg: Submit) -> None:
        self.messages.append((owner, msg))
        self.live[owner, msg.handle] = Live(msg)

    def abort(self, owner: int, msg: Abort) -> None:
        self.messages.append((owner, msg))
        if (owner, msg.handle) in self.live:
            self._done(owner, msg.handle, "abort")

    def finish(self, owner: int, msg: Finish) -> None:
        self.messages.append((owner, msg))
        live = self.live.get((owner, msg.handle))
        if live is not None and not live.ended[msg.choice]:
            live.counts[msg.choice] = msg.n_tokens
            self._end(owner, live, msg.choice, "stop")

    def look(self, owner: int, _msg: Look) -> None:
        self._out(owner).view = view_of(self.stats(), time.monotonic(), 16)

    def drop_owner(self, owner: int) -> None:
        self.drops.append(owner)
        self.live = {key: live for key, live in self.live.items() if key[0] != owner}
        self.outs.pop(owner, None)

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.outs)

    def watch(self, told: Callable[[StepTimes], None]) -> None:
        """It has no steps."""

    def spare_s(self) -> float:
        return self.wait()

    def idle(self) -> bool:
        assert not self.has_work, "idle, but there is work"
        if not self.put_off:
            return False
        self.put_off -= 1
        self.on_idle()
        return True

    def turn(self) -> dict[int, TokenOut]:
        if self.live:
            time.sleep(self.pause_s)
            self.steps += 1
        for (owner, handle), live in list(self.live.items()):
            out = self._out(owner)
            for choice in range(live.submit.n):
                if not live.submit.max_tokens:
                    self._end(owner, live, choice, "length")
                for _ in range(self.tokens_a_turn):
                    if live.ended[choice]:
                        break
                    out.handles.append(handle)
                    out.choices.append(choice)
                    out.tokens.append(97 + live.counts[choice] % 26)
                    live.counts[choice] += 1
                    if live.counts[choice] == live.submit.max_tokens:
                        self._end(owner, live, choice, "length")
        outs, self.outs = self.outs, {}
        return outs

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.live),
            waiting=0,
            kv_blocks=1,
            kv_used=0,
            steps=self.steps,
            preemptions=0,
            recomputed_tokens=0,
            prompt_tokens=0,
            cached_tokens=0,
            generation_tokens=0,
            finished={},
            started=0,
        )

    def close(self) -> None:
        self.closed = True

    def _out(self, owner: int) -> TokenOut:
        return self.outs.setdefault(owner, TokenOut([], [], [], [], []))

    def _end(self, owner: int, live: Live, choice: int, reason: Reason) -> None:
        live.ended[choice] = True
        self._out(owner).ends.append(End(live.submit.handle, choice, reason))
        if all(live.ended):
            self._done(owner, live.submit.handle, reason)

    def _done(self, owner: int, handle: int, reason: Reason) -> None:
        live = self.live.pop((owner, handle))
        for choice, ended in enumerate(live.ended):
            if not ended:
                self._out(owner).ends.append(End(handle, choice, reason))
        done = Done(
            handle,
            prompt_tokens=len(live.submit.prompt),
            output_tokens=sum(live.counts),
            queue_s=0.001,
            prefill_s=0.002,
            decode_s=0.003,
        )
        self._out(owner).dones.append(done)
