"""Workers: what they return and raise, and on which thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

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
