"""From `--hook KIND=NAME:TEXT` to hooks. docs/hooks.md says how names are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from headrace.errors import ConfigError
from headrace.hooks.contract import KINDS, Check, Citer, Factory, Filter, Moderation, Scorer

GROUP = "headrace.hooks."  # entry points: headrace.hooks.moderation, ...

# What ships with headrace: (kind, name) -> where it is, imported when it is used
BUILT_IN: Mapping[tuple[str, str], str] = {
    ("moderation", "words"): "headrace.hooks.words.WordModeration",
    ("moderation", "http"): "headrace.hooks.classifier.HttpModeration",
    ("moderation", "model"): "headrace.hooks.model.ModelModeration",
    ("filter", "words"): "headrace.hooks.words.WordFilter",
    ("check", "json"): "headrace.hooks.json_check.JsonCheck",
    ("score", "model"): "headrace.hooks.model.ModelScorer",
    ("cite", "overlap"): "headrace.hooks.overlap.Overlap",
}


class Hooks:
    """The hooks of one HTTP process. Several of a kind are asked in the order of the settings;
    of `score` there is at most one."""

    def __init__(self) -> None:
        self.moderation: list[Moderation] = []
        self.filter: list[Filter] = []
        self.check: list[Check] = []
        self.score: list[Scorer] = []
        self.cite: list[Citer] = []

    def close(self) -> None:
        """The process ends: hooks that have a `close` are told."""
        for hook in (*self.moderation, *self.filter, *self.check, *self.score, *self.cite):
            if (close := getattr(hook, "close", None)) is not None:
                close()


def load_hooks(given: Iterable[str]) -> Hooks:
    """Make them all. Raises ConfigError."""
    hooks = Hooks()
    for text in given:
        kind, name, argument = split(text)
        getattr(hooks, kind).append(_make(text, kind, name, argument))
    if len(hooks.score) > 1:
        raise ConfigError("--hook score: one scorer at most", param="hook")
    return hooks


def split(text: str) -> tuple[str, str, str]:
    """`KIND=NAME:TEXT` in three. Raises ConfigError."""
    kind, _, rest = text.partition("=")
    name, _, argument = rest.partition(":")
    if kind not in KINDS or not name:
        raise ConfigError(
            f"--hook {text}: write KIND=NAME or KIND=NAME:TEXT, KIND one of {', '.join(KINDS)}",
            param="hook",
        )
    return kind, name, argument


def _make(text: str, kind: str, name: str, argument: str) -> Any:
    try:
        return _factory(kind, name)(argument)
    except ConfigError:
        raise
    except Exception as error:  # of code that is not ours
        raise ConfigError(
            f"--hook {text}: {type(error).__name__}: {error}", param="hook"
        ) from error


def _factory(kind: str, name: str) -> Factory:
    path = BUILT_IN.get((kind, name))
    if path is None and "." not in name:
        known = {entry.name: entry for entry in entry_points(group=GROUP + kind)}
        if name not in known:
            ours = ", ".join(sorted({own for of, own in BUILT_IN if of == kind} | set(known)))
            raise ConfigError(
                f"--hook {kind}={name}: no such hook; there are {ours}, and dotted paths",
                param="hook",
            )
        made: Factory = known[name].load()
        return made
    module, _, attribute = (path or name).rpartition(".")
    found: Factory = getattr(import_module(module), attribute)
    return found
