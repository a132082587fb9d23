"""The format: what is written is read back, and whatever does not belong or is damaged is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from outpace.checkpoint.base import LoadError
from outpace.teacher import store
from outpace.teacher.store import (
    StoreError,
    TeacherCache,
    TeacherMeta,
    decode_aux,
    encode_aux,
    read_meta,
    tokenizer_sha256,
    write_meta,
    write_shard,
)

N, C = 3, 40
LENGTHS = ((4, 9, 6), (5, 7))  # of the samples of two shards


def write(folder, dtype="bfloat16", planned=5, final=False):
    """Two shards of numbers that name their place: aux = sample * 100 + layer * 10 + row, final as a layer
    more; a cache without final states nothing of it, as those did that are older than the setting."""
    shards, texts, i = [], [], 0
    for k, lengths in enumerate(LENGTHS):
        aux, finals = [], []
        for length in lengths:
            row, layer = torch.arange(length)[:, None, None], torch.arange(N + 1)[:, None]
            states = (i * 100 + layer * 10 + row + torch.zeros(C)).float()
            aux.append(states[:, :N])
            finals.append(states[:, N])
            texts.append(torch.arange(length) + i)
            i += 1
        (values, scale), (last, last_scale) = (encode_aux(torch.cat(x), dtype) for x in (aux, finals))
        tensors = {
            "tokens": torch.cat(texts[-len(lengths) :]).int(),
            "aux": values,
            **({"final": last} if final else {}),
            **({"final_scale": last_scale} if final and last_scale is not None else {}),
            "begins": torch.tensor([0, *lengths]).cumsum(0),
            "prompt_lengths": torch.tensor([n // 2 for n in lengths]),
            "offsets": torch.tensor([4096 * k] * len(lengths)),
            "temperatures": torch.tensor([float(n % 2) for n in lengths]),
        }
        shards.append(write_shard(folder, k, tensors | ({} if scale is None else {"aux_scale": scale}), 0.5))
    meta = TeacherMeta(
        format_version=store.FORMAT_VERSION,
        target_fingerprint="a" * 64,
        tokenizer_sha256="b" * 64,
        corpus_sha256="c" * 64,
        template="none: raw text",
        target_layer_ids=(1, 2, 5),
        hidden_size=C,
        dtype=dtype,
        planned_samples=planned,
        recipe={"seed": 1} | ({"final": True} if final else {}),
        shards=tuple(shards),
    )
    write_meta(folder, meta)
    return meta


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_every_sample_reads_its_own_rows(tmp_path, dtype, final):
    meta = write(tmp_path, dtype, final=final)
    cache = TeacherCache.open(tmp_path, target_fingerprint="a" * 64, layer_ids=(1, 2, 5), tokenizer="b" * 64)
    assert cache.meta == meta and len(cache) == meta.samples == 5 and meta.tokens == 31
    assert meta.nbytes == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) == cache.verify()
    lengths = [n for part in LENGTHS for n in part]
    for i in (4, 0, 2, 3, 1):
        sample, n = cache.sample(i), lengths[i]
        assert sample.tokens.tolist() == list(range(i, i + n))
        tokens, prompt_length = cache.text(i)
        assert torch.equal(tokens, sample.tokens) and prompt_length == sample.prompt_length
        assert (sample.prompt_length, sample.temperature) == (n // 2, n % 2)
        assert sample.offset == (0 if i < 3 else 4096)
        expected = i * 100 + torch.arange(N)[:, None] * 10 + torch.arange(n)
        torch.testing.assert_close(
            sample.aux.float(), expected[..., None].expand(N, n, C).float(), rtol=0.04, atol=0
        )
        assert (sample.final is not None) == final == meta.final
        if sample.final is not None:
            assert sample.final.dtype == sample.aux.dtype
            last = (expected[0] + N * 10)[:, None].expand(n, C).float()
            torch.testing.assert_close(sample.final.float(), last, rtol=0.04, atol=0)
    for i in (-1, 5):
        with pytest.raises(IndexError, match=f"sample {i} of a teacher cache of 5"):
            cache.sample(i)
        with pytest.raises(IndexError):
            cache.text(i)


def test_a_cache_describes_itself(tmp_path):
    meta = write(tmp_path, planned=8)
    data = json.loads(json.dumps(TeacherCache.open(tmp_path, unfinished=True).describe()))
    assert (data["samples"], data["planned_samples"], data["tokens"], data["shards"]) == (5, 8, 31, 2)
    assert data["nbytes"] == meta.nbytes and data["relative_error"] == 0.5
    assert data["target_layer_ids"] == [1, 2, 5] and data["recipe"] == {"seed": 1}
    assert data["final"] is False
    write(tmp_path, final=True)
    assert TeacherCache.open(tmp_path).describe()["final"] is True


def test_few_shards_stay_open(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(store, "OPEN_SHARDS", 1)
    cache = TeacherCache.open(tmp_path)
    assert [int(cache.sample(i).tokens[0]) for i in (0, 4, 1, 3)] == [0, 4, 1, 3]
    assert len(cache._open) == 1


def test_fp8_has_a_scale_for_every_row():
    """Rows of very different size keep the same relative error; a shared scale would lose the small."""
    rng = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1e-6, 1.0, 3e4])[:, None]
    aux = torch.randn(5, N, C, generator=rng) * sizes
    aux[0, 0] = 0
    values, scale = encode_aux(aux, "fp8")
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (5, N) and scale.dtype == torch.float32
    back = decode_aux(values, scale)
    assert not back[0, 0].any()
    error = (back - aux).norm(dim=-1) / aux.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < 0.04
    torch.testing.assert_close(back.abs().amax(-1), aux.abs().amax(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"target_fingerprint": "d" * 64}, "belongs to another target"),
        ({"tokenizer": "d" * 64}, "made with another tokenizer"),
        ({"layer_ids": (1, 2, 4)}, r"holds the layers \[1, 2, 5\] in this order, not \[1, 2, 4\]"),
        ({"layer_ids": (2, 1, 5)}, "in this order"),
    ],
)
def test_a_cache_of_something_else(tmp_path, wanted, message):
    write(tmp_path)
    with pytest.raises(StoreError, match=message):
        TeacherCache.open(tmp_path, **wanted)


def test_an_unfinished_build(tmp_path):
    write(tmp_path, planned=8)
    with pytest.raises(StoreError, match="unfinished: 5 of 8 samples"):
        TeacherCache.open(tmp_path)
    assert len(TeacherCache.open(tmp_path, unfinished=True)) == 5


def test_final_states_that_are_wanted_and_not_there(tmp_path):
    write(tmp_path)
    with pytest.raises(StoreError, match=r"holds no final states.* `teacher build --final`"):
        TeacherCache.open(tmp_path, final=True)
    meta = read_meta(tmp_path)
    write_meta(tmp_path, dataclasses.replace(meta, recipe={"final": True}))  # states what its shards lack
    with pytest.raises(StoreError, match=r"shard-00000.* is not a shard of this cache"):
        TeacherCache.open(tmp_path, final=True).sample(0)
    write(tmp_path, final=True)
    assert TeacherCache.open(tmp_path, final=True).sample(0).final is not None


def test_a_missing_and_a_truncated_shard(tmp_path):
    write(tmp_path)
    cache = TeacherCache.open(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-7])
    for act in (cache.verify, lambda: TeacherCache.open(tmp_path)):
        with pytest.raises(StoreError, match=r"shard-00001.* holds [\d,]+ bytes, meta.json records"):
            act()
    with pytest.raises(StoreError, match=r"shard-00001.* bytes"):
        cache.sample(4)
    shard.unlink()
    for act in (cache.verify, lambda: TeacherCache.open(tmp_path)):
        with pytest.raises(StoreError, match=r"shard-00001.* is missing"):
            act()
    with pytest.raises(StoreError, match="shard-00001"):
        cache.sample(4)


@pytest.mark.parametrize("place", [0.4, 0.999])
def test_an_altered_byte_is_detected_before_use(tmp_path, place):
    meta = write(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[int(len(data) * place)] ^= 1
    shard.write_bytes(data)
    for act in (TeacherCache.open(tmp_path).verify, lambda: TeacherCache.open(tmp_path).text(4)):
        with pytest.raises(StoreError, match=r"shard-00001.* was altered"):
            act()
    data[int(len(data) * place)] ^= 1
    shard.write_bytes(data)
    assert TeacherCache.open(tmp_path).verify() == meta.nbytes


def test_meta_json_of_a_newer_version_or_none_at_all(tmp_path):
    with pytest.raises(StoreError, match=r"holds no meta\.json"):
        read_meta(tmp_path)
    meta = write(tmp_path)
    path = tmp_path / "meta.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"format_version": 2, "colour": "blue"}))
    with pytest.raises(StoreError, match="format version 2; this Outpace reads up to 1: upgrade"):
        TeacherCache.open(tmp_path)
    write_meta(tmp_path, dataclasses.replace(meta, shards=meta.shards[:1]))
    assert len(TeacherCache.open(tmp_path, unfinished=True)) == 3


SHARD = {"file": "shard-00000.safetensors", "sha256": "a" * 64, "nbytes": 9, "samples": 2, "tokens": 5}


@pytest.mark.parametrize(
    "changes",
    [
        "{}",
        "[]",
        "not json",
        "[" * 100_000,
        {"colour": "blue"},
        {"hidden_size": None},
        {"format_version": "x"},
        {"format_version": 0},
        {"shards": {"a": 1}},
        {"shards": [3]},
        {"shards": [SHARD]},
        {"target_layer_ids": 3},
        {"target_layer_ids": []},
        {"target_layer_ids": [1, "2", 5]},
        {"target_layer_ids": [1, -2, 5]},
        {"target_fingerprint": 7},
        {"tokenizer_sha256": "../.."},
        {"hidden_size": 2**60},
        {"hidden_size": True},
        {"dtype": "float64"},
        {"dtype": []},
        {"planned_samples": -1},
        {"recipe": "fast"},
        {"recipe": {"final": "yes"}},
        {"recipe": {"prompt_tokens": json.loads("[" * 400 + "8" + "]" * 400)}},
        *(
            {"shards": [SHARD | {"relative_error": 0.1, key: value}]}
            for key, values in {
                "file": ("/etc/passwd", "../shard-00000.safetensors", "shard-00001.safetensors", 3, ""),
                "sha256": ("", "g" * 64, None, 5),
                "nbytes": (-1, "9", 1.5),
                "samples": (0, -3, [2]),
                "tokens": (0, True),
                "relative_error": (-1.0, "x", 1e999),
            }.items()
            for value in values
        ),
    ],
)
def test_a_malformed_meta_json_is_refused_by_name(tmp_path, changes):
    write(tmp_path)
    path = tmp_path / "meta.json"
    text = changes if isinstance(changes, str) else json.dumps(json.loads(path.read_text()) | changes)
    path.write_text(text)
    with pytest.raises(StoreError, match=r"meta\.json.*build (it|the cache) again") as error:
        TeacherCache.open(tmp_path, unfinished=True)
    assert "delete" not in str(error.value)


def forge(folder, **changes):
    """Shard 0 with other tensors, its size and sha256 recorded as they then are."""
    meta = read_meta(folder)
    tensors = load_file(folder / meta.shards[0].file) | changes
    shard = write_shard(folder, 0, {k: t for k, t in tensors.items() if t is not None}, 0.5)
    kept = {"samples": meta.shards[0].samples, "tokens": meta.shards[0].tokens}
    write_meta(folder, dataclasses.replace(meta, shards=(dataclasses.replace(shard, **kept), meta.shards[1])))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", torch.arange(19, dtype=torch.int32) + 90),
        ("tokens", torch.arange(19, dtype=torch.int32) - 3),
        ("tokens", torch.arange(19)),
        ("tokens", torch.arange(18, dtype=torch.int32)),
        ("tokens", torch.zeros(19, 2, dtype=torch.int32)),
        ("begins", torch.tensor([0, 4, 13, 18])),
        ("begins", torch.tensor([0, 13, 4, 19])),
        ("begins", torch.tensor([0, 4, 4, 19])),
        ("begins", torch.tensor([-5, 4, 13, 19])),
        ("begins", torch.tensor([[0, 4, 13, 19]])),
        ("prompt_lengths", torch.tensor([2, 10, 3])),
        ("prompt_lengths", torch.tensor([2, -4, 3])),
        ("prompt_lengths", torch.tensor([2, 4])),
        ("offsets", torch.tensor([0, -1, 0])),
        ("offsets", torch.tensor([0, 2**62, 0])),
        ("offsets", torch.tensor(0)),
        ("temperatures", torch.tensor([0.0, float("nan"), 1.0])),
        ("aux", torch.zeros(19, N, C)),
        ("aux", torch.zeros(19, N + 1, C, dtype=torch.bfloat16)),
        ("aux", torch.zeros(19, C, dtype=torch.bfloat16)),
        ("aux", torch.zeros(4, N, C, dtype=torch.bfloat16)),
        ("aux", None),
        ("begins", None),
        ("final", torch.zeros(19, C + 1, dtype=torch.bfloat16)),
        ("final", None),
    ],
)
def test_a_forged_shard_is_refused_before_use(tmp_path, name, value):
    """Its sha256 is right, its contents are not those of any build."""
    write(tmp_path, final=True)
    forge(tmp_path)
    assert len(TeacherCache.open(tmp_path, vocab_size=97).sample(2).tokens) == 6
    forge(tmp_path, **{name: value})
    cache = TeacherCache.open(tmp_path, vocab_size=97)
    for read in (cache.text, cache.sample, lambda i: cache.verify()):
        with pytest.raises(StoreError, match=rf"shard-00000.*{name}.*run the same `teacher build` again"):
            read(1)
    assert len(cache.sample(4).tokens) == 7  # the other shard is whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", ["shard-00000.safetensors", "meta.json"])
def test_a_full_disk_leaves_no_half_file(tmp_path, name):
    (tmp_path / (name + ".tmp")).symlink_to("/dev/full")
    with pytest.raises(LoadError, match=rf"{name} could not be written, the disk is full.* Make room"):
        write(tmp_path)
    assert not any(path.name.startswith(name) for path in tmp_path.iterdir())


def test_tokenizers_are_distinguished():
    one, two = (Tokenizer(models.WordLevel({"a": 0, word: 1}, unk_token="a")) for word in "bc")
    assert tokenizer_sha256(one) == tokenizer_sha256(Tokenizer.from_str(one.to_str()))
    assert tokenizer_sha256(one) != tokenizer_sha256(two)
