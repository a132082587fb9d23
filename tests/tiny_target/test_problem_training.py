"""Training on problems: it learns, resumes to the last digit, and measures as decoding would."""

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from processes import torchrun

from examples.tiny_target.make import ALONE, make
from examples.tiny_target.model import first_model
from examples.tiny_target.problem_rows import Lessons, Mix, batch, packs, sample_pieces
from examples.tiny_target.problem_training import (
    ProblemRecipe,
    Steps,
    _learn,
    _metrics,
    exact_share,
    train_target,
)
from outpace.loading import open_target
from outpace.models.save import dense_tensors
from outpace.tasks.families import FAMILIES
from outpace.text.harmony import HarmonyTokens
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id, train_bpe

MICRO = {
    "vocab_size": 448,
    "hidden_size": 96,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "expert_size": 64,
    "num_experts": 5,
    "sliding_window": 7,
    "original_max_position": 512,
    "steps": 6,
    "step_tokens": 1500,
    "batch_tokens": 1000,
    "warmup": 2,
    "bfloat16": False,
    "save_every": 2,
    "eval_every": 3,
    "eval_problems": 1,
    "test_problems": 1,
}
MIX = Mix(documents=0.0, longest=600, weights={"needles": 0.0})


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(sample_pieces(1, 40), MICRO["vocab_size"], alone=ALONE)


def test_digits_and_brackets_are_tokens_of_their_own(tokenizer):
    for text in ("1234", "[[31, 7]]", '{"key": "x"}', "f(x)"):
        tokens = [tokenizer.decode([i]) for i in encode(tokenizer, text)]
        assert all(token == c for token in tokens for c in ALONE if c in token), tokens


def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(tokenizer, tmp_path):
    recipe = ProblemRecipe(**MICRO, mix=MIX)
    whole = train_target(recipe, tokenizer, tmp_path / "whole")
    train_target(recipe, tokenizer, tmp_path / "parts", stop_after=3)
    parts = train_target(recipe, tokenizer, tmp_path / "parts")
    for name, tensor in dense_tensors(whole).items():
        assert torch.equal(tensor, dense_tensors(parts)[name]), name
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 0.3
    assert set(log[2]["exact_by_family"]) == set(FAMILIES)


def test_a_resumed_run_says_what_changed_in_its_recipe(tokenizer, tmp_path, capsys):
    recipe = ProblemRecipe(**MICRO, mix=MIX)
    train_target(recipe, tokenizer, tmp_path, stop_after=2)
    train_target(dataclasses.replace(recipe, muon_lr=0.5, steps=3), tokenizer, tmp_path)
    value = capsys.readouterr().out
    assert f"from step 2 on: muon_lr 0.5, it was {recipe.muon_lr}" in value
    assert "from step 2 on: steps 3, it was 6" in value and value.count("it was") == 2


def test_two_processes_train_as_one(tokenizer, tmp_path):
    train_target(ProblemRecipe(**MICRO, mix=MIX), tokenizer, tmp_path / "one")
    ended = torchrun(2, Path(__file__).parent / "training_process.py", tmp_path / "two")
    assert ended.returncode == 0, ended.stderr[-2000:]
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    for mine, wanted in zip(two, one, strict=True):
        error = 2e-3 if mine["step"] else 1e-5  # Muon rounds to bfloat16, where the CPU multiplies that
        for name in ("loss", "balance"):
            assert mine[name] == pytest.approx(wanted[name], abs=error), (mine["step"], name)
        assert mine["families"] == pytest.approx(wanted["families"], abs=10 * error)


def test_a_family_is_exact_where_all_own_tokens_are_most_probable(tokenizer):
    tokens = HarmonyTokens(tokenizer)

    class Knowing:
        """Knows the rows by heart; of those that begin their answer with a digit it gets one token wrong."""

        device = torch.device("cpu")

        def __call__(self, inputs):
            after = F.pad(inputs[:, 1:], (0, 1), value=tokens.ids["<|return|>"])
            lengths = (inputs != tokens.end_of_text).sum(1)
            after[range(len(inputs)), lengths - 1] = tokens.ids["<|return|>"]
            lost = inputs == encode(tokenizer, "*")[0]
            return SimpleNamespace(hidden=F.one_hot(torch.where(lost, after + 1, after), 500).float())

        def logits(self, hidden):
            return hidden

    exact = exact_share(Knowing(), tokens, 6, 3000)
    assert exact["addition"] == exact["needles"] == exact["functions"] == 1.0
    assert exact["multiplication"] == 0.0


def test_the_command_makes_a_checkpoint_and_goes_on_from_it(tokenizer, tmp_path):
    recipe = tmp_path / "recipe.toml"
    lines = [f"{key} = {str(value).lower()}" for key, value in MICRO.items()]
    recipe.write_text("\n".join([*lines, "[mix]", "documents = 0.0", "longest = 600"]))
    line = make(recipe, ["steps=2"], None, tmp_path / "first")
    assert "of held-out problems solved" in line
    target, saved = open_target(str(tmp_path / "first" / "model"))
    assert target.config.num_experts == 5 and saved.get_vocab_size() == MICRO["vocab_size"]
    make(recipe, ["steps=1"], str(tmp_path / "first" / "model"), tmp_path / "second")
    provenance = json.loads((tmp_path / "second" / "model" / "provenance.json").read_text())
    assert provenance["started_from"]["steps"] == 2 and provenance["steps"] == 1


def test_rows_end_to_end_teach_what_each_teaches_alone(tokenizer):
    recipe, pad = ProblemRecipe(**MICRO, mix=MIX), token_id(tokenizer, END_OF_TEXT)
    model = first_model(recipe, pad, None)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    drawn = Lessons(HarmonyTokens(tokenizer), MIX).step(random.Random(1), 3000)
    metrics, gradients = [], []
    for some in ([batch([example], pad) for example in drawn], list(packs(drawn, 1600))):
        model.zero_grad()
        metrics.append(_metrics(_learn(model, some, recipe)))
        gradients.append([p.grad for p in model.parameters()])
    assert 1 < len(some) < len(drawn)
    alone, end = metrics
    assert alone["loss"] == pytest.approx(end["loss"], rel=1e-5)
    assert alone["families"] == pytest.approx(end["families"], rel=1e-4)
    assert alone["tokens"] == end["tokens"] == sum(len(e.row.ids) - 1 for e in drawn)
    for a, b in zip(*gradients, strict=True):  # balance is of a batch's own tokens, and so differs
        assert (a - b).norm() < 0.01 * b.norm() + 1e-6


def test_another_process_makes_the_same_steps(tokenizer):
    recipe = ProblemRecipe(**MICRO, mix=MIX)
    steps = Steps(recipe, Lessons(HarmonyTokens(tokenizer), MIX))
    for here, there in zip(steps.start(3, 0), steps.start(3, 1), strict=True):
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)
            assert a.families == b.families and a.packed is not None
