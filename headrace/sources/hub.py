"""A model folder from the Hugging Face Hub: `hf:owner/name`.

huggingface_hub downloads into its own cache, resumes, and honours HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE. What it may hand out after an interruption is a folder with some files missing, so
a folder counts as whole only once every file of its commit has been seen in it; that is marked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headrace.errors import DownloadError, ModelError
from headrace.sources.cache import cache_home, write_whole
from headrace.sources.card import read_json

OUTLINE = ("config.json", "generation_config.json", "tokenizer*.json", "chat_template.jinja")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = "pytorch_model*.bin"
_TRUE = {"1", "true", "yes", "on"}


def fetch(
    repo: str,
    say: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
    *,
    weights: bool = True,
) -> Path:
    """The folder of `owner/name`, downloaded on first use; a whole cached one needs no network.

    `weights`: False for what tells of a model without them: its config, tokenizer and template.
    Raises DownloadError if it is not there whole, ModelError if it is no model that we can read.
    """
    options = _options(repo, environ, weights)
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE
    found = _cached(options)
    if found is not None and _whole(repo, found, weights):
        return found
    if offline:
        if found is None or (lost := missing_file(found, weights=weights)):
            what = f"of which {lost} is missing" if found else "of which there is no copy"
            raise DownloadError(f"HF_HUB_OFFLINE is set and hf:{repo} is needed, {what} here")
        return found
    say(f"downloading hf:{repo}" + ("" if weights else " without its weights"))
    folder = _download(repo, options, _mark_name(weights))
    if lost := missing_file(folder, weights=weights):
        raise ModelError(f"hf:{repo} has no {lost}: a folder with safetensors weights is needed")
    return folder


def cached(
    repo: str, environ: Mapping[str, str] = os.environ, *, weights: bool = True
) -> Path | None:
    """The folder of `owner/name` if it is here and whole (but for its weights, if False)."""
    found = _cached(_options(repo, environ, weights))
    return found if found is not None and _whole(repo, found, weights) else None


def _options(repo: str, environ: Mapping[str, str], weights: bool) -> dict[str, Any]:
    patterns = [*OUTLINE, *(WEIGHTS if weights else ())]
    options: dict[str, Any] = {"repo_id": repo, "allow_patterns": patterns}
    if endpoint := environ.get("HF_ENDPOINT"):
        options["endpoint"] = endpoint
    return options


def _whole(repo: str, folder: Path, weights: bool) -> bool:
    marks = {_mark_name(True), _mark_name(weights)}  # who has the weights has the rest
    seen = any(_mark(repo, folder, mark).exists() for mark in marks)
    return seen and missing_file(folder, weights=weights) is None


def missing_file(folder: Path, *, weights: bool = True, pickles: bool = False) -> str | None:
    """The first file without which `folder` is no model: config, tokenizer, every weight shard.

    `weights`: False for random ones: the config alone makes a model that takes and gives ids.
    `pickles`: pytorch_model.bin will do where there is no safetensors file.
    """
    for name in ("config.json", "tokenizer.json") if weights else ("config.json",):
        if not (folder / name).exists():
            return name
    if not weights:
        return None
    kinds = [("model.safetensors.index.json", "*.safetensors")]
    kinds += [("pytorch_model.bin.index.json", PICKLES)] if pickles else []
    for index, files in kinds:
        if (folder / index).exists():
            shards = sorted(set((read_json(folder / index).get("weight_map") or {}).values()))
            return next((shard for shard in shards if not (folder / shard).exists()), None)
        if any(folder.glob(files)):
            return None
    return "model.safetensors"


def _cached(options: Mapping[str, Any]) -> Path | None:
    """The folder in huggingface_hub's cache, whole or not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(**options, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:  # not owner/name
        raise ModelError(f"hf:{options['repo_id']}: {error}") from None


def _download(repo: str, options: Mapping[str, Any], mark: str) -> Path:
    """Fetch what is missing; mark the folder once every wanted file of the commit is in it."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(**options))
        names = HfApi(endpoint=options.get("endpoint")).list_repo_files(repo, revision=folder.name)
    except GatedRepoError:
        raise DownloadError(
            f"hf:{repo} is gated: accept its terms on the Hub and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"the Hub knows no hf:{repo}, or it is private and HF_TOKEN is not set"
        ) from None
    except Exception as error:  # the client's HTTP library, sockets, disks: many trees, one meaning
        reason = str(error).strip().splitlines()
        raise DownloadError(
            f"could not download hf:{repo}: {type(error).__name__}: {reason[0] if reason else ''}. "
            "Starting again resumes; with a full copy in the cache set HF_HUB_OFFLINE=1, or give "
            "the folder's path instead: `headrace serve FOLDER`"
        ) from None
    wanted = [n for n in names if any(fnmatch(n, pattern) for pattern in options["allow_patterns"])]
    if lost := [name for name in wanted if not (folder / name).exists()]:
        raise DownloadError(f"hf:{repo}: {lost[0]} did not arrive; start again to resume")
    write_whole(_mark(repo, folder, mark), b"")
    return folder


def _mark_name(weights: bool) -> str:
    return "whole" if weights else "outline"


def _mark(repo: str, folder: Path, name: str) -> Path:
    """The folder's name is its commit, which never changes."""
    return cache_home() / "hub" / repo.replace("/", "--") / f"{folder.name}.{name}"
