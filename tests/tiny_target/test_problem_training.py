"""Training on problems: it learns, resumes to the last digit, and judges as decoding would."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from examples.tiny_target.make_solver import ALONE, make
from examples.tiny_target.problem_rows import Mix, sample_pieces
from examples.tiny_target.problem_training import ProblemRecipe, exact_share, train_solver
from outpace.loading import open_target
from outpace.models.save import dense_tensors
from outpace.tasks.families import FAMILIES
from outpace.text.harmony import HarmonyTokens
from outpace.text.tokenizer import encode, train_bpe

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
    "judged_problems": 1,
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
    whole = train_solver(recipe, tokenizer, tmp_path / "whole")
    train_solver(recipe, tokenizer, tmp_path / "parts", stop_after=3)
    parts = train_solver(recipe, tokenizer, tmp_path / "parts")
    for name, tensor in dense_tensors(whole).items():
        assert torch.equal(tensor, dense_tensors(parts)[name]), name
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 0.3
    assert set(log[2]["exact_by_family"]) == set(FAMILIES)


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
