"""Tensors are views of a private mapping: no copy is made, the file is not written, nor pulled away."""

import gc
import json
import os
import resource
import shutil
import struct
import sys

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.safetensors import DTYPES, open_file
from outpace.checkpoint.save import save_checkpoint, stream_file
from outpace.models.load import load_target, named_tensors
from outpace.models.save import save_target

TENSORS = {"a": torch.arange(6.0), "b": torch.arange(12.0).reshape(3, 4).bfloat16(), "c": torch.ones(0, 5)}


def raw(path, header, data=b"", pad=0):
    """A file with this header, written by hand."""
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_what_is_read_is_what_the_reference_wrote(tmp_path):
    rng = torch.Generator().manual_seed(1)
    held = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        bits = torch.randint(0, 2 if name == "BOOL" else 256, (i + 1, 3, 8), dtype=torch.uint8, generator=rng)
        held[name] = bits.view(dtype)
    save_file(held, tmp_path / "x.safetensors")
    file = open_file(tmp_path / "x.safetensors")
    assert file.slots.keys() == held.keys()
    for name, tensor in held.items():
        value = file.get(name)
        assert value.dtype == tensor.dtype and value.shape == tensor.shape
        assert torch.equal(value.view(torch.uint8), tensor.view(torch.uint8)), name
        assert file.slots[name].dtype == name


def test_nothing_is_copied(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    file = open_file(tmp_path / "x.safetensors")
    first, again = file.get("b"), file.get("b")
    assert first.data_ptr() == again.data_ptr()
    again[0, 0] = 7
    assert first[0, 0] == 7  # one mapping
    assert torch.equal(load_file(tmp_path / "x.safetensors")["b"], TENSORS["b"])  # and a private one


def test_a_view_outlives_its_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(100_000.0)}, path)
    view = open_file(path).get("a")
    path.unlink()
    gc.collect()
    assert torch.equal(view, torch.arange(100_000.0))


def test_a_replaced_file_changes_nothing(tmp_path):
    """A rename leaves the old file to those who have it open."""
    save_target(tiny.target("qwen3"), tmp_path)
    model = load_target(tmp_path)
    before = {name: tensor.clone() for name, tensor in named_tensors(model)}
    save_target(tiny.target("qwen3", seed=1), tmp_path)
    again = load_target(tmp_path)
    for name, tensor in named_tensors(model):
        assert torch.equal(tensor, before[name]), name
    assert not torch.equal(model.norm.weight, again.norm.weight)


def test_a_target_saved_over_itself(tmp_path):
    """Its weights are views of the very files that are being replaced."""
    save_target(tiny.target("gpt_oss"), tmp_path, pack=True)
    model, tokens = load_target(tmp_path), tiny.tokens(1, 9)
    with torch.inference_mode():
        before = model(tokens).hidden
    save_target(model, tmp_path)
    with torch.inference_mode():
        assert torch.equal(model(tokens).hidden, before)
        assert torch.equal(load_target(tmp_path)(tokens).hidden, before)


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    def parts():
        yield "a", torch.ones(30)
        yield "b", torch.ones(30)
        raise RuntimeError("half-way")

    save_checkpoint(tmp_path, {"old": 1}, [("a", torch.zeros(3))])
    with pytest.raises(RuntimeError):
        save_checkpoint(tmp_path, {"new": 1}, parts(), shard_bytes=64)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert open_checkpoint(tmp_path).get("a").tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "U8"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 5])
def test_tensors_that_are_not_aligned(tmp_path, dtype, shift):
    """Files of other writers: the header ends anywhere, and odd-sized tensors come first."""
    size = DTYPES[dtype].itemsize
    values = torch.arange(7).to(DTYPES[dtype])
    data = b"\1" * 3 + values.view(torch.uint8).numpy().tobytes()
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": dtype, "shape": [7], "data_offsets": [3, 3 + 7 * size]},
    }
    value = open_file(raw(tmp_path / "x", header, data, shift)).get("x")
    assert torch.equal(value, values) and value.data_ptr() % size == 0
    assert (value + value)[3] == 6


def test_a_streamed_file_is_the_format(tmp_path):
    specs = [("a", "F32", (2, 3)), ("b", "BF16", (4,)), ("none", "BF16", (0, 2)), ("c", "U8", (5,))]
    values = [torch.arange(6.0), torch.arange(4).bfloat16(), torch.arange(5, dtype=torch.uint8)]
    pieces = [v.view(torch.uint8).numpy().tobytes() for v in values]
    stream_file(tmp_path / "x.safetensors", specs, [pieces[0][:7], pieces[0][7:], *pieces[1:]])
    read = load_file(tmp_path / "x.safetensors")
    assert read["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and read["none"].shape == (0, 2)
    assert torch.equal(read["b"], values[1]) and torch.equal(read["c"], values[2])
    with pytest.raises(AssertionError):
        stream_file(tmp_path / "y.safetensors", specs, pieces[:2])
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files and overcommitted mappings are Linux's")
def test_a_file_larger_than_memory(tmp_path):
    """Mapped and looked at where it matters; a mapping that reserves memory would be refused."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    rows = 2 * page * pages // 2**20
    header = {"big": {"dtype": "U8", "shape": [rows, 2**20], "data_offsets": [0, rows * 2**20]}}
    path = raw(tmp_path / "x.safetensors", header)
    start = path.stat().st_size
    try:
        os.truncate(path, start + rows * 2**20)
    except OSError as error:
        pytest.skip(f"this file system makes no sparse file of {rows} MiB: {error}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensor = open_file(path).get("big")
    tensor[-1, -1] = 3
    assert tensor.shape == (rows, 2**20) and tensor[-1].sum() == 3 and tensor[rows // 2, :9].sum() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system may keep what was written")
def test_pages_are_given_back(tmp_path):
    values = torch.arange(1_000_000, dtype=torch.int32)
    save_file({"a": values, "b": values + 1}, tmp_path / "x.safetensors")
    file = open_file(tmp_path / "x.safetensors")
    a, b = file.get("a"), file.get("b")
    a[5000] = b[5000] = -1
    file.release("a")
    assert a[5000] == 5000 and b[5000] == -1
    assert torch.equal(a[:900_000], values[:900_000])


def test_a_shard_may_be_a_symbolic_link(tmp_path):
    """HF's cache keeps blobs elsewhere and links to them."""
    save_checkpoint(tmp_path / "blobs", {}, TENSORS.items(), shard_bytes=30)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert open_checkpoint(tmp_path / "snapshot").names() == ["a", "b", "c"]


def test_two_sets_of_weights(tmp_path):
    save_checkpoint(tmp_path, {}, TENSORS.items(), shard_bytes=30)
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="two sets of weights"):
        open_checkpoint(tmp_path)
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).names() == ["a", "b", "c"]  # an index of one file


def test_copies_of_a_folder_are_independent(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    shutil.copy(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    x, y = (open_file(tmp_path / f"{n}.safetensors").get("a") for n in "xy")
    x += 1
    assert torch.equal(y, TENSORS["a"])
