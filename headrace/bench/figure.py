"""A figure of matplotlib, legible on white and on near-black, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.extras import install

# One grey and mid-bright colours on a transparent ground: legible on white and on near-black.
INK = "#7d8590"
COLOURS = ("#e5534b", "#3b82f6", "#2da44e", "#bf6be0", "#d29922", "#0ea5b7", "#a0724a")
_LOOK = {
    "svg.hashsalt": "headrace",  # the same numbers make the same file
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def check_installed() -> None:
    """Raises ConfigError where matplotlib is missing: for who will draw after long work."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"plots need matplotlib: {install('plot')}", param="plot")


@contextmanager
def drawn(stem: Path, width: float, height: float) -> Iterator[Any]:
    """An empty figure of so many inches, to be filled; written to `stem`.svg and `stem`.png.

    Raises ConfigError when matplotlib is not installed.
    """
    check_installed()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        yield figure
        stem.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(stem.with_suffix(".png"), dpi=150, metadata={"Software": None})
