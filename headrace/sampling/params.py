"""Sampling parameters of a batch, as columns."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from headrace.messages import Sampling
from headrace.sampling.rng import Uint64s

GREEDY_BELOW = 1e-5  # softmax(z / T) is one-hot long before, and z / T would overflow


@dataclasses.dataclass(frozen=True)
class Columns:
    """One entry a draw (or a device row). Host memory: stages look before they touch logits."""

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]  # 0 = off
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    typical_p: npt.NDArray[np.float64]
    top_n_sigma: npt.NDArray[np.float64]  # 0 = off
    seed: Uint64s
    choice: Uint64s
    position: Uint64s  # of the token to draw, in its sequence

    @classmethod
    def empty(cls, n: int) -> Columns:
        """n greedy rows."""
        return cls(
            np.zeros(n),
            np.zeros(n, np.int64),
            np.ones(n),
            np.zeros(n),
            np.ones(n),
            np.zeros(n),
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint64),
        )

    @classmethod
    def of(cls, rows: list[tuple[Sampling, int, int]]) -> Columns:
        """From (sampling, choice, position) for each row."""
        columns = cls.empty(len(rows))
        for i, (sampling, choice, position) in enumerate(rows):
            columns.set(i, sampling, choice)
            columns.position[i] = position
        return columns

    def set(self, i: int, sampling: Sampling, choice: int) -> None:
        """Overwrite row i, all but its position."""
        self.temperature[i] = sampling.temperature
        self.top_k[i] = sampling.top_k
        self.top_p[i] = sampling.top_p
        self.min_p[i] = sampling.min_p
        self.typical_p[i] = sampling.typical_p
        self.top_n_sigma[i] = sampling.top_n_sigma
        self.seed[i] = sampling.seed
        self.choice[i] = choice

    def take(self, rows: npt.NDArray[np.int64] | list[int]) -> Columns:
        """The columns of some rows."""
        return Columns(*(column[rows] for column in vars(self).values()))

    @property
    def greedy(self) -> npt.NDArray[np.bool_]:
        """Rows that take the most likely token, lowest id first among equals."""
        return self.temperature < GREEDY_BELOW
