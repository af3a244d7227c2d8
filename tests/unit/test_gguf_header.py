"""GGUF headers: read right, and refused with a ModelError whatever is wrong with them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.sources.card import read_card
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import read_header
from headrace.text.tokenizer import load_tokenizer


def write_tiny(path: Path) -> None:
    """A small file with every kind of metadata, a byte tokenizer and two tensors."""
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_bool("test.flag", True)
    writer.add_float32("test.float", 0.5)
    writer.add_int64("test.long", -(2**40))
    writer.add_array("test.floats", [0.5, 1.5])
    writer.add_array("test.nested", [[1, 2], [3, 4]])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["a", "b", "ab", "Ġ", "<|im_end|>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1, 1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny(path)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "broken.gguf"


def test_what_the_writer_wrote(tiny: Path) -> None:
    header = read_header(tiny)
    meta = header.metadata
    assert (header.version, header.architecture, header.get("context_length")) == (3, "llama", 128)
    assert (meta["test.flag"], meta["test.float"], meta["test.long"]) == (True, 0.5, -(2**40))
    assert (meta["test.floats"], meta["test.nested"]) == ([0.5, 1.5], [[1, 2], [3, 4]])
    assert list(meta["tokenizer.ggml.tokens"]) == ["a", "b", "ab", "Ġ", "<|im_end|>"]
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.shape, two.shape) == ((2, 3), (4,))
    data = tiny.read_bytes()
    assert np.frombuffer(data, np.float32, 6, one.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(data, np.float16, 4, two.offset).tolist() == [0, 1, 2, 3]


def test_tokenizer_and_card_of_it(tiny: Path) -> None:
    files = ModelFiles("tiny", "gguf", tiny)
    assert load_tokenizer(files).encode("ab a<|im_end|>") == [2, 3, 0, 4]
    assert read_card(files).eos_ids == (4,)


def read_all(path: Path) -> None:
    """Header, card, tokenizer: only ModelError may come out."""
    files = ModelFiles("x", "gguf", path)
    for reader in (read_header, lambda _: read_card(files), lambda _: load_tokenizer(files)):
        try:
            reader(path)
        except ModelError as error:
            assert str(path) in error.message or "GGUF" in error.message  # noqa: PT017


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_truncated(tiny: Path, scratch: Path, data: st.DataObject) -> None:
    whole = tiny.read_bytes()
    scratch.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    read_all(scratch)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_overwritten(tiny: Path, scratch: Path, data: st.DataObject) -> None:
    """Bits, bytes and whole numbers replaced anywhere."""
    broken = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(broken) - 1))
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([0, 1, 9, 8, 2**31, 2**32 - 1]).map(lambda n: struct.pack("<I", n)),
                st.sampled_from([2**28, 2**40, 2**63, 2**64 - 1]).map(
                    lambda n: struct.pack("<Q", n)
                ),
            )
        )
        broken[at : at + len(new)] = new
    scratch.write_bytes(broken)
    read_all(scratch)


@given(data=st.binary(max_size=200))
def test_anything_after_the_magic(scratch: Path, data: bytes) -> None:
    scratch.write_bytes(b"GGUF\x03\x00\x00\x00" + data)
    read_all(scratch)


def metadata_file(path: Path, key: str, kind: int, value: bytes) -> Path:
    """A file with one metadata entry and no tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    name = struct.pack("<Q", len(key)) + key.encode()
    path.write_bytes(head + name + struct.pack("<I", kind) + value)
    return path


def test_strings_are_read_when_they_are_asked_for(scratch: Path) -> None:
    words = [b"a", b"", b"c\xc3\xa9"]
    array = struct.pack("<IQ", 8, 3) + b"".join(struct.pack("<Q", len(w)) + w for w in words)
    metadata_file(scratch, "k", 9, array)
    strings = read_header(scratch).metadata["k"]
    assert (len(strings), list(strings)) == (3, ["a", "", "cé"])
    assert [strings[i] for i in (0, 1, 2, -1, -3)] == ["a", "", "cé", "cé", "a"]
    assert (strings[1:], strings[::-2]) == (["", "cé"], ["cé", "a"])
    for outside in (3, -4):
        with pytest.raises(IndexError):
            strings[outside]
    for cut in (1, 4, 12, 20):
        metadata_file(scratch, "k", 9, array[:-cut])
        with pytest.raises(ModelError, match="not a readable GGUF"):
            read_header(scratch)


def test_arrays_nested_without_end(scratch: Path) -> None:
    value = struct.pack("<IQ", 9, 1) * 5000
    with pytest.raises(ModelError, match="nested too deep"):
        read_header(metadata_file(scratch, "k", 9, value))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (6, struct.pack("<f", float("inf"))),
        (6, struct.pack("<f", float("nan"))),
        (4, struct.pack("<I", 0)),
        (8, struct.pack("<Q", 2) + b"xx"),
        (9, struct.pack("<IQ", 4, 0)),
    ],
)
def test_bad_alignment(scratch: Path, kind: int, value: bytes) -> None:
    with pytest.raises(ModelError, match="alignment"):
        read_header(metadata_file(scratch, "general.alignment", kind, value))


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" * 10, b"GGUF\x01\x00\x00\x00" * 8])
def test_not_gguf(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        read_header(scratch)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot read"):
            read_header(path)
