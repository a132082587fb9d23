"""The format: what is written is read back, and whatever does not belong or is damaged is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
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
    with pytest.raises(StoreError, match=r"shard-00000.* cannot be read as a shard"):
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
        with pytest.raises(StoreError, match=r"shard-00001.* holds [\d,]+ bytes, meta.json says"):
            act()
    with pytest.raises(StoreError, match=r"shard-00001.* cannot be read as a shard"):
        cache.sample(4)
    shard.unlink()
    for act in (cache.verify, lambda: TeacherCache.open(tmp_path)):
        with pytest.raises(StoreError, match=r"shard-00001.* is missing"):
            act()
    with pytest.raises(StoreError, match="shard-00001"):
        cache.sample(4)


@pytest.mark.parametrize("place", [0.4, 0.999])
def test_an_altered_byte_is_detected_by_verify(tmp_path, place):
    meta = write(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[int(len(data) * place)] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-00001.* was altered"):
        TeacherCache.open(tmp_path).verify()
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
    for text in ("{}", "[]", "not json", '{"format_version": "x"}', json.dumps(data | {"colour": "blue"})):
        path.write_text(text)
        with pytest.raises(StoreError, match="is not a teacher cache's meta"):
            TeacherCache.open(tmp_path)
    write_meta(tmp_path, dataclasses.replace(meta, shards=meta.shards[:1]))
    assert len(TeacherCache.open(tmp_path, unfinished=True)) == 3


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
