"""transformers as the source of a teacher cache: the answers and states of our own engine."""

import dataclasses
import importlib.util

import pytest
import tiny
import torch
from test_build import RECIPE, contents, make
from test_cli import run

from outpace.models.load import load_target
from outpace.teacher.source import Questions, Transformers
from outpace.teacher.store import StoreError, read_meta

GREEDY = dataclasses.replace(RECIPE, samples=5, shard_samples=9, greedy_share=1.0, final=True)
THEIRS = dataclasses.replace(GREEDY, source="transformers")


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3_moe"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save_twin(request.param, folder)
    return folder


def test_the_cache_is_that_of_our_own_engine(folder, tmp_path):
    """Greedy texts of several lengths, at positions 0, 4,096 and 131,072; the last layer's states before the
    final norm."""
    target = load_target(folder)
    ours = make(tmp_path / "ours", GREEDY, target)
    theirs = make(tmp_path / "theirs", THEIRS, target, source=Transformers(folder))
    assert len(ours) == len(theirs) == 15 and theirs.meta.recipe["source"] == "transformers"
    assert theirs.meta.target_layer_ids == (0, 2, 3) and target.config.num_layers == 4
    for i in range(15):
        mine, other = ours.sample(i), theirs.sample(i)
        assert torch.equal(mine.tokens, other.tokens) and mine.offset == other.offset
        for a, b in ((mine.aux, other.aux), (mine.final, other.final)):
            distance = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)
            assert distance.max() < 0.01  # of bfloat16, which keeps 8 bits


def test_drawn_answers_are_the_seeds_and_end_at_stops(folder, tmp_path):
    target, source = load_target(folder), Transformers(folder)
    recipe = dataclasses.replace(THEIRS, greedy_share=0.0)
    caches = [make(tmp_path / str(n), recipe, target, source=source) for n in range(2)]
    assert contents(tmp_path / "0") == contents(tmp_path / "1")
    other = dataclasses.replace(recipe, seed=12)
    assert contents(tmp_path / "0") != contents(make(tmp_path / "2", other, target, source=source).folder)
    prompts = [[7, 8, 9], [11, 12, 13, 14, 15]]
    asked = Questions(prompts=prompts, limits=[12, 4], temperature=0.0, stop=frozenset({96}), seed=1)
    whole = source.respond(asked)
    assert [len(ids) for ids in whole] == [12, 4] and caches[0].meta.complete
    sooner = dataclasses.replace(asked, stop=frozenset({whole[0][5], 96}))
    assert source.respond(sooner)[0] == whole[0][: whole[0].index(whole[0][5]) + 1]


def test_two_sources_do_not_share_a_folder(folder, tmp_path):
    target = load_target(folder)
    make(tmp_path / "cache", GREEDY, target, stop_after=1)
    with pytest.raises(StoreError, match=r"was started with source outpace \(now transformers\)"):
        make(tmp_path / "cache", THEIRS, target, source=Transformers(folder))


def test_a_batch_that_transformers_mixes_up_is_refused(folder, tmp_path, monkeypatch):
    states = Transformers.states

    def mixed(self, tokens, layer_ids, offset):
        aux, hidden = states(self, tokens, layer_ids, offset)
        return aux.roll(1, dims=1), hidden

    monkeypatch.setattr(Transformers, "states", mixed)
    with pytest.raises(StoreError, match=r"in a batch of \d: alone it has other states in layer"):
        make(tmp_path / "cache", THEIRS, load_target(folder), source=Transformers(folder))


def test_sources_that_cannot_be(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="source 'sglang': it must be outpace or transformers"):
        dataclasses.replace(RECIPE, source="sglang")
    with pytest.raises(ValueError, match=r"holds no config\.json; name an HF folder"):
        Transformers(tmp_path)
    with pytest.raises(ValueError, match="device map 'gpus'"):
        Transformers(folder, "gpus")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install 'outpace\[baselines\]'"):
        Transformers(folder)


def test_the_command(monkeypatch, capsys, tmp_path):
    sizes = ["samples=3", "prompt_tokens=[4,6]", "response_tokens=[3,5]"]
    words = ["teacher", "build", "--out", tmp_path / "cache", "--source", "transformers"]
    options = [word for pair in sizes for word in ("--set", pair)]
    code, text, err = run(monkeypatch, capsys, *words, *options, "--device-map", "cpu")
    assert code == 0 and "3 samples" in text, err
    assert read_meta(tmp_path / "cache").recipe["source"] == "transformers"
