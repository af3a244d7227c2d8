"""Run as a script: one engine process or one HTTP process, over the package's own entry points.

python tests/e2e/processes.py engine FOLDER SETTINGS_JSON
python tests/e2e/processes.py api FOLDER SETTINGS_JSON WORKER SOCKET_FD
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.config import Settings
from headrace.messages import EngineInfo
from headrace.sources.files import ModelFiles

if TYPE_CHECKING:
    from headrace.engine.loop import Engine

FILES = ModelFiles("fake-model", "fake", Path())
MAX_MODEL_LEN = 4096


def run_engine(folder: Path, settings: Settings) -> None:
    """The real engine over the fake runner."""
    from headrace.backends.fake import FakeRunner
    from headrace.engine.loop import Engine
    from headrace.engine.server import serve
    from headrace.kv.cache import KVCache
    from headrace.launch import build_grammars

    def build(say: Callable[[str], None]) -> tuple[Engine, EngineInfo]:
        say("loading the fake model")
        blocks = settings.kv_blocks or 2048
        length = settings.max_model_len or MAX_MODEL_LEN
        runner = FakeRunner(
            blocks,
            settings.block_size,
            settings.max_num_seqs,
            length,
            step_ms=settings.fake_step_ms,
        )
        kv = KVCache(blocks, settings.block_size, settings.prefix_caching)
        info = EngineInfo(
            length,
            settings.max_num_seqs,
            runner.capacity.vocab_size,
            settings.block_size,
            blocks,
            width=runner.capacity.width,
            labels=runner.capacity.labels,
            records=True,
            draws_note=runner.capacity.draws_note,
            kv_tokens=kv.kept_tokens,
        )
        grammars = build_grammars(settings, FILES, info.vocab_size)
        overlap = settings.overlap != "off"
        return Engine(settings, kv, runner, overlap=overlap, grammars=grammars), info

    serve(folder, settings, build)


def run_api(folder: Path, settings: Settings, worker: int, fd: int) -> None:
    """The real HTTP process with the fake model's tokenizer."""
    from headrace.api.server import serve

    serve(folder, settings, FILES, worker, socket.socket(fileno=fd))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(name)s %(message)s")
    role, folder, raw = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    settings = msgspec.json.decode(raw, type=Settings)
    if role == "engine":
        run_engine(folder, settings)
    else:
        run_api(folder, settings, int(sys.argv[4]), int(sys.argv[5]))
