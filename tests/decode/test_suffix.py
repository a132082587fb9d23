"""Suffix lookup: lossless text, independent rows, files, refusals."""

import dataclasses
import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_lossless import NEW, PROMPTS, answers

from outpace.checkpoint.open import LoadError
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.lookup import Suffix, is_suffix, load_suffix, save_suffix
from outpace.drafts.sampler import Greedy
from outpace.loading import open_draft, open_target
from outpace.ops.sampling import Sampling
from outpace.ops.suffixes import Suffixes
from outpace.train.suffix import build_suffix, joined

TEXT = [5, 6, 7, 8, 9, -1, 5, 6, 7, 8, 4, 3, -1, 1, 2, 7, 8, 9, 9, -1]


def draft(text=TEXT, nodes=6):
    return Suffix(Suffixes.of(torch.tensor(text, dtype=torch.int32)), tiny.VOCAB, nodes)


def known_of(family, window):
    """What this target generates after each prompt, here and there another token: right for a while."""
    result = answers(family, window, len(PROMPTS))
    spoilt = [[t if i % 9 else (t + 1) % tiny.VOCAB for i, t in enumerate(row, 1)] for row in result]
    return [t for row, wrong in zip(result, spoilt, strict=True) for t in (*wrong, -1, *row[5:], -1)]


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("nodes", [3, 9])
def test_its_trees_leave_the_text_as_it_is(family, window, nodes):
    model = tiny.target(family, window)
    got = generate(model, PROMPTS, Request(max_new_tokens=NEW), draft(known_of(family, window), nodes))
    assert got.tokens == answers(family, window, len(PROMPTS))
    assert got.trace.tau > 1.2  # else nothing was looked up
    assert max(max(row) for row in got.trace.nodes) == nodes


@pytest.mark.parametrize("nodes", [2, 7])
def test_with_coupled_noise_too(nodes):
    model = tiny.target("gpt_oss")
    request = Request(max_new_tokens=NEW, sampling=Sampling(temperature=0.7), rule="gumbel")

    def seed():
        return torch.Generator().manual_seed(5)

    value = generate(model, PROMPTS, request, rng=seed()).tokens
    text = [t for row in value for t in (*row, -1)]
    got = generate(model, PROMPTS, request, draft(text, nodes), rng=seed())
    assert got.tokens == value and got.trace.tau > 1.2


def test_a_proposal_is_a_tree_by_falling_survival():
    session = draft().begin(1, 99)
    session.observe(torch.tensor([[5, 6, 7, 1]]), None, [3])  # the 1 was not verified
    result = session.propose(torch.tensor([8]), 6, Greedy())
    assert result.tokens[0, :3].tolist() == [8, 9, 4] and result.above[0][:3] == [0, 0, 0]
    survival = result.survival[0].tolist()
    assert survival == sorted(survival, reverse=True) and survival[0] == 1
    narrow = session.propose(torch.tensor([8]), 2, Greedy())
    assert narrow.tokens.tolist() == [[8, 9]] and result.q is None


def test_every_row_is_looked_up_by_itself():
    texts = [[1, 2, 7], [5, 6, 7, 8, 4], [0, 0]]
    session = draft().begin(3, 99)
    padded = torch.tensor([row[:-1] + [9] * (5 - len(row)) for row in texts])
    session.observe(padded, None, [len(row) - 1 for row in texts])
    together = session.propose(torch.tensor([row[-1] for row in texts]), 5, Greedy())
    assert together.counts[2] == 1  # nothing is known of 0 0
    for b, row in enumerate(texts):
        alone = draft().begin(1, 99)
        alone.observe(torch.tensor([row[:-1]]), None, [len(row) - 1])
        value = alone.propose(torch.tensor(row[-1:]), 5, Greedy())
        n = together.counts[b]
        assert value.counts == [n] and together.tokens[b, :n].tolist() == value.tokens[0].tolist()
    session.select([1])
    assert session.propose(torch.tensor([4]), 5, Greedy()).tokens[0, 1] == 3


def test_what_the_text_contained_before_is_proposed_too():
    session = draft().begin(1, 99)
    session.observe(torch.tensor([[40, 41, 42, 43, 1, 40]]), None, [6])
    result = session.propose(torch.tensor([41]), 3, Greedy())
    assert result.tokens.tolist() == [[41, 42, 43]] and result.above[0] == [0, 0, 1]


def test_after_a_rewind_it_proposes_as_a_fresh_session():
    """What was observed beyond the rewind is neither the end of the text nor a place in it."""
    session, fresh = draft().begin(2, 99), draft().begin(2, 99)
    text = torch.tensor([[40, 41, 42, 43, 5, 6], [1, 2, 3, 50, 51, 52]])
    session.observe(text, None, [6, 4])
    session.rewind([4, 3])
    fresh.observe(text, None, [4, 3])
    results = []
    for each in (session, fresh):
        each.observe(torch.tensor([[40], [1]]), None, [1, 1])
        results.append(each.propose(torch.tensor([41, 2]), 6, Greedy()))
    again, wanted = results
    assert again.tokens.tolist() == wanted.tokens.tolist() and wanted.tokens[:, 1].tolist() == [42, 3]
    assert torch.equal(again.survival, wanted.survival)


def test_files_come_back(tmp_path):
    save_suffix(draft().answers, tiny.VOCAB, tmp_path)
    assert is_suffix(tmp_path) and load_file(tmp_path / "model.safetensors")["text"].dtype == torch.int16
    back = load_suffix(tmp_path, tiny.VOCAB, 4)
    assert back.answers.text.tolist() == TEXT and back.block_size == 4
    value = torch.tensor([5, 6, 7], dtype=torch.int32)
    assert back.answers.grow(value, 5) == draft().answers.grow(value, 5)
    save_suffix(draft().answers, 200_000, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["text"].dtype == torch.int32
    assert load_suffix(tmp_path, 200_000).answers.text.tolist() == TEXT


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (lambda t: {"text": t["text"]}, "where text and order belong"),
        (lambda t: t | {"more": t["text"] + 1}, "where text and order belong"),
        (lambda t: t | {"order": t["order"][:-1].clone()}, "two lists of one length"),
        (lambda t: t | {"order": t["order"].float()}, "two lists of one length"),
        (lambda t: {name: part[:0].clone() for name, part in t.items()}, "not empty"),
        (lambda t: t | {"text": t["text"] + 90}, "outside the vocabulary"),
        (lambda t: t | {"text": t["text"] - 2}, "outside the vocabulary"),
        (lambda t: t | {"order": t["order"] * 0}, "every place of the text once"),
        (lambda t: t | {"order": t["order"] + 1}, "every place of the text once"),
    ],
)
def test_spoilt_files_are_refused_by_name(tmp_path, spoilt, message):
    save_suffix(draft().answers, tiny.VOCAB, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(spoilt(load_file(path)), path)
    with pytest.raises(LoadError, match=message) as error:
        load_suffix(tmp_path, tiny.VOCAB)
    assert str(tmp_path) in str(error.value)


def test_answers_of_another_vocabulary_are_refused(tmp_path):
    save_suffix(draft().answers, tiny.VOCAB, tmp_path)
    with pytest.raises(LoadError, match=r"vocab_size 97; this one has 1280: build it .*train suffix"):
        open_draft(str(tmp_path), *open_target("default"))


@pytest.mark.parametrize(
    "asked",
    [{"num_steps": 3}, {"num_draft_tokens": 8, "topk": 2}, {"quantize": "q8_0"}, {"num_draft_tokens": 1}],
)
def test_what_it_cannot_be_decided_is_refused(asked, tmp_path):
    save_suffix(draft().answers, 1280, tmp_path)
    with pytest.raises(ValueError, match=r"without num_steps, topk and weights to quantize|proposes nothing"):
        open_draft(str(tmp_path), *open_target("default"), **asked)


@dataclasses.dataclass
class Meta:
    samples: int = 3


class Cache:
    """Three answers of which the first token of each belongs to the prompt."""

    meta = Meta()

    def __len__(self):
        return 3

    def text(self, i):
        return torch.tensor([90 + i, *range(i, i + 4)]), 1


def test_it_is_made_of_answers_alone(tmp_path):
    model = tiny.target("gpt_oss")
    build_suffix(model, Cache(), tmp_path)
    suffix = load_suffix(tmp_path / "draft", model.config.vocab_size)
    assert suffix.answers.text.tolist() == [0, 1, 2, 3, -1, 1, 2, 3, 4, -1, 2, 3, 4, 5, -1]
    build_suffix(model, Cache(), tmp_path, count=2)
    assert len(load_suffix(tmp_path / "draft", model.config.vocab_size).answers.text) == 10
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text())["answers"] == 2


def test_nothing_to_look_up_is_reported():
    with pytest.raises(ValueError, match="no answers"):
        joined([torch.tensor([], dtype=torch.int64)])
