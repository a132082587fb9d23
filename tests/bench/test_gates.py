"""Every gate passes on the right thing and fails on a planted fault, in float32 on tiny random models."""

import copy
import dataclasses
import json

import pytest
import tiny
import torch
from dflash_drafts import random_dflash

from outpace.bench.checks import (
    CheckSettings,
    cached_targets,
    failed,
    later_slots,
    one_token,
    oracle_labels,
    position_offsets,
    run_checks,
)
from outpace.decode import acceptance as rules
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Proposal
from outpace.models import attention
from outpace.models.blocks import Experts

BLOCK = 4
LAYERS = (1, 2)


@pytest.fixture(scope="module")
def target():
    """Window 7, dense and window layers in turn."""
    return tiny.target("gpt_oss")


@pytest.fixture(scope="module")
def prompts():
    return [tiny.tokens(n, seed=n).tolist() for n in (29, 23, 31)]


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    prompt_length: int
    aux: torch.Tensor
    offset: int
    temperature: float


@dataclasses.dataclass(frozen=True)
class Meta:
    target_layer_ids: tuple[int, ...] = LAYERS
    dtype: str = "bfloat16"


class Texts:
    """What a teacher cache of three texts hands out, one of them at temperature 1 and far away."""

    def __init__(self, target, prompts, dtype="bfloat16", fault=None):
        self.meta, self.samples = Meta(dtype=dtype), []
        for prompt, offset, temperature in zip(prompts, (0, 4096, 131000), (0.0, 0.0, 1.0), strict=True):
            answer = generate(target, [prompt], Request(max_new_tokens=17, offset=offset)).tokens[0]
            if temperature:
                answer = answer[::-1]
            text = torch.tensor([*prompt, *answer])
            with torch.inference_mode():
                aux = target(text[None], aux=LAYERS, offset=offset).aux[:, 0]
            stored = _stored(aux, dtype)
            if fault == "layer order":
                stored = stored.flip(0)
            if fault == "label":
                text[len(prompt) + 5] = (text[len(prompt) + 5] + 1) % tiny.VOCAB
            if fault == "shift":
                stored = stored.roll(1, dims=1)
            self.samples.append(Sample(text, len(prompt), stored, offset, temperature))

    def __len__(self):
        return len(self.samples)

    def sample(self, i):
        return self.samples[i]


def _stored(aux, dtype):
    if dtype == "bfloat16":
        return aux.bfloat16().float()
    scale = aux.abs().amax(-1, keepdim=True) / 448
    return (aux / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_passes_on_what_the_target_generated(target, prompts, dtype):
    gate = cached_targets(target, Texts(target, prompts, dtype), BLOCK, 8)
    assert gate.passed is True
    assert gate.figures["samples"] == 3
    assert gate.figures["labels_checked"] == 2 * 17
    assert 0.1 < gate.figures["aux_worst_of_tolerance"] <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("fault", ["layer order", "shift"])
def test_a_fails_on_wrong_states(target, prompts, fault, dtype):
    gate = cached_targets(target, Texts(target, prompts, dtype, fault), BLOCK, 8)
    assert gate.passed is False
    assert gate.figures["aux_wrong_layers"] == list(LAYERS)


def test_a_fails_on_wrong_labels_even_if_their_own_states_are_stored(target, prompts):
    cache = Texts(target, prompts, fault="label")
    for i, sample in enumerate(cache.samples):
        with torch.inference_mode():
            aux = target(sample.tokens[None], aux=LAYERS, offset=sample.offset).aux[:, 0]
        cache.samples[i] = dataclasses.replace(sample, aux=aux)
    gate = cached_targets(target, cache, BLOCK, 8)
    assert gate.passed is False
    assert gate.figures["label_violations"] >= 2
    assert gate.figures["aux_worst_of_tolerance"] <= 1


def test_a_fails_on_a_verify_that_forgets_the_offset(target, prompts):
    cache = Texts(target, prompts)
    far = cache.samples[1]
    cache.samples = [dataclasses.replace(far, offset=0)]
    # rotary positions are relative, so a wrong offset alone must not matter: this guards the replay
    assert cached_targets(target, cache, BLOCK, 8).passed is True


def test_b_passes_and_names_every_path(target, prompts):
    gate = later_slots(target, prompts, BLOCK)
    assert gate.passed is True, gate.message
    assert set(gate.figures) == {
        "cache, window wrapped",
        "cache, before the window",
        "cache, rows of different lengths",
        "no cache",
    }
    assert all(f["max_difference"] <= 1e-5 * 20 for f in gate.figures.values())


@pytest.mark.parametrize("kind", ["window", "dense"])
def test_b_fails_where_a_cached_path_sees_ahead(target, prompts, monkeypatch, kind):
    honest = attention.attend_view

    def ahead(q, view, window, *rest):
        if bool(window) == (kind == "window"):
            step = dataclasses.replace(view.step, both_ways=True)
            view = dataclasses.replace(view, step=step)
        return honest(q, view, window, *rest)

    monkeypatch.setattr(attention, "attend_view", ahead)
    monkeypatch.setattr(target, "native", False)  # the bug is planted in the modules
    gate = later_slots(target, prompts, BLOCK)
    assert gate.passed is False
    wrong = gate.figures["cache, window wrapped"]["first_wrong_layer"]
    assert wrong == ("0 (window)" if kind == "window" else "1 (dense)")
    assert "first_wrong_layer" not in gate.figures["no cache"]


def test_b_fails_where_the_experts_mix_tokens(target, prompts, monkeypatch):
    honest = Experts.forward

    def mixing(self, x, routing=None):
        return honest(self, x + 0.01 * x.mean(1, keepdim=True), routing)

    monkeypatch.setattr(Experts, "forward", mixing)
    monkeypatch.setattr(target, "native", False)  # the bug is planted in the modules
    gate = later_slots(target, prompts, BLOCK)
    assert gate.passed is False
    assert all("first_wrong_layer" in figures for figures in gate.figures.values())


def test_c_passes_and_counts(target, prompts):
    gate = one_token(target, prompts, BLOCK, 25)
    assert gate.passed is True, gate.message
    assert gate.figures["checked"] == 25
    assert gate.figures["max_difference"] < 1e-4


def test_c_fails_where_a_block_is_rotated_otherwise(target, prompts, monkeypatch):
    honest = type(target).rope

    def shifted(self, positions):
        last_column_counts = positions + (1 if positions.shape[1] == 1 else 0)
        return honest(self, last_column_counts)

    monkeypatch.setattr(type(target), "rope", shifted)
    monkeypatch.setattr(target, "native", False)  # the bug is planted in the modules
    gate = one_token(target, prompts, BLOCK, 25)
    assert gate.passed is False
    assert gate.figures["violations"] > 0


def test_d_passes_in_a_batch_past_the_window(target, prompts):
    gate = oracle_labels(target, prompts, BLOCK, 30)
    assert gate.passed is True, gate.message
    assert gate.figures["rounds"] == (3 + 1) * 8
    assert gate.figures["checked"] == (3 + 1) * 30


def test_d_fails_on_a_rule_off_by_one(target, prompts, monkeypatch):
    honest = rules.exact_match

    def shifted(candidates, parents, predict, counts):
        return honest([row[:1] + row[2:] + row[:1] for row in candidates], parents, predict, counts)

    monkeypatch.setattr(rules, "exact_match", shifted)
    gate = oracle_labels(target, prompts, BLOCK, 30)
    assert gate.passed is False
    assert gate.figures["rounds_not_all_accepted"] > 0


def test_d_fails_on_a_rule_that_believes_everything(target, prompts, monkeypatch):
    honest = rules.exact_match

    def gullible(candidates, parents, predict, counts):
        paths = honest(candidates, parents, predict, counts)
        for value, path in zip(predict, paths, strict=True):
            value[path[-1]] = (value[path[-1]] + 1) % tiny.VOCAB
        return paths

    monkeypatch.setattr(rules, "exact_match", gullible)
    assert oracle_labels(target, prompts, BLOCK, 30).passed is False


class Echo:
    """A draft that is right as long as its rope is: the target itself, reading the text again each round,
    wrong on every third round."""

    block_size, target_layer_ids = BLOCK, ()

    def __init__(self, model):
        self.model = model

    def begin(self, batch, length, offset=0, slack=0):
        return EchoSession(self.model, batch, offset)


class EchoSession:
    def __init__(self, model, batch, offset):
        self.model, self.offset = model, offset
        self.rows = [[] for _ in range(batch)]

    def observe(self, tokens, aux, counts):
        for row, new, count in zip(self.rows, tokens.tolist(), counts, strict=True):
            row += new[:count]

    def select(self, batch_indices):
        self.rows = [self.rows[b] for b in batch_indices]

    def propose(self, last, width, sampler):
        items = []
        for row, anchor in zip(self.rows, last.tolist(), strict=True):
            text = [*row, anchor]
            for _ in range(BLOCK - 1):
                hidden = self.model(torch.tensor([text]), offset=self.offset).hidden[:, -1]
                text.append((int(self.model.logits(hidden).argmax()) + (len(row) % 3 == 0)) % tiny.VOCAB)
            items.append(text[len(row) :])
        return Proposal(torch.tensor(items), [BLOCK] * len(items))


OFFSETS = (0, 65536, 131072)


def test_e_passes_and_moves_the_last_offset_to_where_the_text_fits(target, prompts):
    config = dataclasses.replace(target.config, max_position_embeddings=131072)
    model = copy.copy(target)
    model.config = config
    gate = position_offsets(model, Echo(target), prompts, OFFSETS, 20, 0.03)
    assert gate.passed is True, gate.message
    last = 131072 - 31 - 20
    assert list(gate.figures["tau"]) == ["0", "65536", str(last)]
    assert gate.figures["moved"] == {"131072": last}
    assert 1.2 < gate.figures["tau"]["0"] < BLOCK
    assert f"{last:,}" in gate.message


def test_e_fails_on_a_draft_whose_rope_breaks_at_65536(target, prompts):
    broken = copy.copy(target)
    honest = target.rope
    broken.rope = lambda positions: honest(positions.clamp(max=65536))
    gate = position_offsets(target, Echo(broken), prompts, OFFSETS, 20, 0.03)
    assert gate.passed is False
    assert gate.figures["relative_change"]["131072"] < -0.03


def test_e_fails_on_angles_in_low_precision(target, prompts):
    broken = copy.copy(target)
    honest = target.rope
    broken.rope = lambda positions: honest(positions.to(torch.bfloat16).long())
    assert position_offsets(target, Echo(broken), prompts, OFFSETS, 20, 0.03).passed is False


def test_all_of_them_and_what_cannot_run_says_why(target, prompts):
    items = []
    settings = CheckSettings(block_size=BLOCK, new_tokens=12, positions=5, samples=2)
    gates = run_checks(target, None, None, prompts, settings, on_gate=items.append)
    assert items == gates
    assert [g.passed for g in gates] == [None, True, True, True, None]
    assert failed(gates) == []
    assert "no teacher cache" in gates[0].message
    assert "no draft" in gates[4].message
    json.dumps([dataclasses.asdict(g) for g in gates])
    assert later_slots(target, [[5, 6]], BLOCK).passed is None
    assert one_token(target, [[5, 6]], BLOCK, 3).passed is None


def test_with_a_draft_and_a_cache_all_five_run(target, prompts):
    draft = random_dflash(target, block_size=BLOCK, target_layer_ids=LAYERS)
    settings = CheckSettings(new_tokens=12, positions=5, offsets=(0, 70000))
    gates = run_checks(target, draft, Texts(target, prompts), prompts, settings)
    assert [g.passed for g in gates] == [True] * 5, [g.message for g in gates]
