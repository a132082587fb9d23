"""GGUF files from strangers: cut, bent and inflated. A clear error, or tensors as declared; nothing else."""

import random
import struct
import time
import tracemalloc

import pytest
import tiny

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.gguf_header import read_header
from outpace.checkpoint.open import open_checkpoint
from outpace.formats.convert import write_gguf
from outpace.models.load import load_target
from outpace.text.gguf_tokenizer import gguf_vocabulary
from outpace.text.tokenizer import train_bpe

SECONDS, MEMORY = 5.0, 64 * 2**20


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small Llama with a vocabulary, float32, as bytes; and where its header ends."""
    path = tmp_path_factory.mktemp("gguf") / "it.gguf"
    tokenizer = train_bpe(["a small vocabulary of a few words, and no more than these words " * 40], 280)
    target = tiny.build(tiny.config("llama", window=False, vocab_size=300))
    tiny.randomise(tiny.named_tensors(target))
    write_gguf(target, path, gguf_vocabulary(tokenizer, 300), type="f32")
    data = path.read_bytes()
    first = min(info.start for _, info in open_checkpoint(path).held.values())  # type: ignore[attr-defined]
    return data, first


def attempt(data, path):
    """-> the error, or None where it loaded; within bounds of time and memory."""
    path.write_bytes(data)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        checkpoint = open_checkpoint(path)
        for name, shape, _ in checkpoint.specs():
            assert tuple(checkpoint.get(name).shape) == shape
        load_target(checkpoint)
        return None
    except ValueError as error:  # LoadError is one
        assert str(error) and len(str(error)) < 2_000
        return error
    finally:
        assert time.perf_counter() - began < SECONDS
        assert tracemalloc.get_traced_memory()[1] < MEMORY
        tracemalloc.stop()


def test_the_whole_file_loads(whole, tmp_path):
    assert attempt(whole[0], tmp_path / "it.gguf") is None


@pytest.mark.parametrize("case", range(40))
def test_cut_off(whole, tmp_path, case):
    """At random places of the header, and of the tensors."""
    data, first = whole
    at = random.Random(case).randrange(first if case < 30 else len(data))
    error = attempt(data[:at], tmp_path / "it.gguf")
    assert isinstance(error, LoadError) and "it.gguf" in str(error)


@pytest.mark.parametrize("case", range(80))
def test_bits_flipped_in_the_header(whole, tmp_path, case):
    data, first = whole
    rng = random.Random(case)
    bent = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        bent[rng.randrange(first)] ^= 1 << rng.randrange(8)
    attempt(bytes(bent), tmp_path / "it.gguf")


@pytest.mark.parametrize("case", range(30))
def test_numbers_of_the_header_replaced(whole, tmp_path, case):
    """Eight bytes at a time: counts, lengths and offsets become absurd ones."""
    data, first = whole
    rng = random.Random(1000 + case)
    at = rng.choice([8, 16, *(rng.randrange(24, first - 8) for _ in range(6))])
    value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 10_000_000])
    bent = data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    attempt(bent, tmp_path / "it.gguf")


def header(tensors, fields, body=b""):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + body


def text(value):
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "is no GGUF file|not a checkpoint|no checkpoint"),
        (b"GGUF", "in the middle of its header"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
        (header(10_000_000, 0), "claims 10,000,000 tensors"),
        (header(0, 10_000_000), "10,000,000 metadata fields"),
        (header(0, 1, text(b"k") + struct.pack("<I", 99)), "unknown type 99"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "array of arrays"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 10_000_000)), "claims 10,000,000 items"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 3_000_000)), "in the middle of metadata 'k'"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 10, 4_000_000)), "in the middle of metadata 'k'"),
        (header(0, 2, 2 * (text(b"k") + struct.pack("<II", 4, 1))), "'k' is twice"),
        (header(1, 0, text(b"t") + struct.pack("<I", 5)), "has 5 dimensions"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 77, 0)), "is of type 77"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0)), "the shape"),
        (header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)), "the shape"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0)), "multiples of 32"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 2**20, 0, 0)), "would end at byte"),
        (header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 24)), "not a power of two"),
    ],
)
def test_named_faults(tmp_path, data, message):
    path = tmp_path / "it.gguf"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=message):
        open_checkpoint(path)


F32, F16 = 0, 1


def two_tensors(first=F32, second=F32, at=64, rest=b""):
    """a and b of 16 values each; the tensors' bytes are those of two float32 ones."""
    infos = b"".join(
        text(name) + struct.pack("<IQIQ", 1, 16, code, offset)
        for name, code, offset in ((b"a", first, 0), (b"b", second, at))
    )
    data = header(2, 0, infos)
    return data + bytes(-len(data) % 32) + bytes(128) + rest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at": 32}, "'b' begins at byte 32 of the tensors, not at 64, and overlaps"),
        ({"at": 96}, "'b' begins at byte 96 of the tensors, not at 64, and leaves a gap"),
        ({"at": 65}, "not at 64"),
        ({"first": F16}, "'b' begins at byte 64 of the tensors, not at 32, and leaves a gap"),
        ({"second": F16}, "32 bytes follow the last tensor, 'b'"),
        ({"rest": bytes(32)}, "32 bytes follow the last tensor"),
    ],
)
def test_tensors_fill_the_file(tmp_path, changes, message):
    """A smaller type in the table would read another tensor's bytes."""
    path = tmp_path / "it.gguf"
    path.write_bytes(two_tensors())
    assert list(read_header(path).tensors) == ["a", "b"]
    path.write_bytes(two_tensors(**changes))
    with pytest.raises(LoadError, match=message):
        open_checkpoint(path)


def test_a_header_of_millions_that_is_really_there(tmp_path):
    """As many fields as allowed, all empty, then one too many by its count alone."""
    fields = b"".join(text(str(i).encode()) + struct.pack("<II", 4, 0) for i in range(16_384))
    error = attempt(header(0, 16_384, fields), tmp_path / "it.gguf")
    assert isinstance(error, LoadError) and "architecture" in str(error)


def test_a_published_vocabulary_is_read_in_seconds(tmp_path):
    """gpt-oss's 201,088 tokens and 446,189 merges."""
    tokens = b"".join(text(b"tok%d" % i) for i in range(201_088))
    merges = b"".join(text(b"a%d b%d" % (i, i)) for i in range(446_189))
    body = text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 201_088) + tokens
    body += text(b"tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 446_189) + merges
    path = tmp_path / "it.gguf"
    path.write_bytes(header(0, 2, body))
    began = time.perf_counter()
    with pytest.raises(LoadError, match=r"general\.architecture is 'None'"):
        open_checkpoint(path)
    assert time.perf_counter() - began < 4
