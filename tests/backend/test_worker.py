"""Workers: what they return and raise, and on which thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.messages import StepPlan, StepResult
from headrace.runner.runner import CpuTicket
from headrace.runner.worker import InlineWorker, ThreadWorker, Worker


@pytest.fixture(params=["thread", "inline"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = ThreadWorker() if request.param == "thread" else InlineWorker()
    yield made
    made.close()


def test_results_and_errors_come_from_result(worker: Worker) -> None:
    order: list[int] = []

    def fail() -> None:
        order.append(1)
        raise ValueError("as asked")

    def work() -> int:
        order.append(2)
        return 7

    broken, fine = worker.submit(fail), worker.submit(work)
    assert fine.result() == 7
    with pytest.raises(ValueError, match="as asked"):
        broken.result()
    assert order == [1, 2]


def test_a_thread_begins_with_what_it_is_told() -> None:
    order: list[int] = []
    own = ThreadWorker(lambda: order.append(threading.get_ident()))
    assert own.submit(lambda: order.append(threading.get_ident())).result() is None
    own.close()
    assert len(order) == 2
    assert order[0] == order[1] != threading.get_ident()


def test_who_works() -> None:
    assert InlineWorker().submit(threading.get_ident).result() == threading.get_ident()
    own = ThreadWorker()
    assert own.submit(threading.get_ident).result() != threading.get_ident()
    own.close()


def test_a_result_says_how_long_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 5.0

    class Later:
        """Does what it is asked to when somebody waits for it, in 2 ms."""

        def __init__(self, work: Callable[[], Any]) -> None:
            self._work = work

        def result(self) -> Any:
            nonlocal now_s
            now_s += 0.002
            return self._work()

    runner: Any = SimpleNamespace(worker=SimpleNamespace(submit=Later), forward=lambda plan: None)
    runner.draw = lambda plan, computed, masks: StepResult(plan.step, [7], busy_s=0.5)
    monkeypatch.setattr(
        "headrace.runner.runner.time", SimpleNamespace(monotonic=lambda: round(now_s, 9))
    )
    ticket = CpuTicket(runner, StepPlan(3, *([] for _ in range(12))))
    ticket.finish()
    result = ticket.result()
    assert (result.tokens, result.busy_s) == ([7], 0.5)
    assert result.waited_s == pytest.approx(0.004), "for the forward pass, then for the draws"
