"""Workers: what they return and raise, and how many threads torch has meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from headrace.runner.worker import InlineWorker, ThreadWorker, Worker


@pytest.fixture(params=["thread", "inline"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = ThreadWorker(1) if request.param == "thread" else InlineWorker()
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


def test_torch_has_one_thread_while_it_works(worker: Worker) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert worker.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3, "the asking thread keeps its own"
    finally:
        torch.set_num_threads(before)


def test_who_works() -> None:
    assert InlineWorker().submit(threading.get_ident).result() == threading.get_ident()
    own = ThreadWorker(1)
    assert own.submit(threading.get_ident).result() != threading.get_ident()
    own.close()
