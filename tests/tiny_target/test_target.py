"""Training a target: resume to the last digit, a start from other weights, and the parts it is made of."""

import dataclasses
import json

import pytest
import tiny
import torch

from examples.tiny_target.model import TRAINED, balance_loss, shape_of
from examples.tiny_target.publish import publish_target, repeated_ngrams, sureness
from examples.tiny_target.splice import UNTAUGHT, cut_pieces, splice
from examples.tiny_target.training import (
    TargetRecipe,
    bits_per_byte,
    matching,
    split_rows,
    train_target,
)
from outpace.models.load import load_target
from outpace.models.save import dense_tensors, save_target
from outpace.ops.sampling import seeded
from outpace.text.corpus import Document
from outpace.text.tokenizer import train_bpe
from outpace.train.data import rows_of_step, token_stream
from outpace.train.losses import chunked_nll
from outpace.train.trainer import Muon, orthogonalise

RECIPE = TargetRecipe(
    vocab_size=300,
    hidden_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    expert_size=64,
    num_experts=5,
    experts_per_token=2,
    sliding_window=7,
    original_max_position=64,
    rope_factor=16.0,
    steps=6,
    row_tokens=32,
    long_row_tokens=64,
    long_share=0.2,
    step_tokens=128,
    warmup=2,
    quantize_share=0.4,
    bfloat16=False,
    save_every=2,
    eval_every=3,
)
TEXTS = [
    "".join(f"def f_{n}_{i}(x, y):\n    return x * {i} + y - {n}\n\n" for i in range(40)) for n in range(6)
]


@pytest.fixture(scope="module")
def corpus():
    documents = [Document(f"{n}.py", text) for n, text in enumerate(TEXTS)]
    return train_bpe(TEXTS, RECIPE.vocab_size), documents[:5], documents[5:]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_resumed_run_is_the_unbroken_one_to_the_last_digit(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    whole = train_target(RECIPE, tokenizer, train, held_out, tmp_path / "whole")
    train_target(RECIPE, tokenizer, train, held_out, tmp_path / "broken", stop_after=3)
    with (tmp_path / "broken" / "log.jsonl").open("a") as log:  # a step past the checkpoint, as a kill leaves
        log.write('{"step": 3, "loss": 99.0}\n')
    resumed = train_target(RECIPE, tokenizer, train, held_out, tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_resumed_run_says_what_changed_in_its_recipe(corpus, tmp_path, capsys):
    tokenizer, train, held_out = corpus
    train_target(RECIPE, tokenizer, train, held_out, tmp_path, stop_after=2)
    changed = dataclasses.replace(RECIPE, muon_lr=0.5, steps=4)
    train_target(changed, tokenizer, train, held_out, tmp_path)
    value = capsys.readouterr().out
    assert f"from step 2 on: muon_lr 0.5, it was {RECIPE.muon_lr}" in value
    assert "from step 2 on: steps 4, it was 6" in value and value.count("it was") == 2


def test_a_run_that_hears_itself_resumes_to_the_last_digit(corpus, tmp_path):
    """The model's own text depends on nothing but the weights and the step."""
    tokenizer, train, held_out = corpus
    settings = {"unlikelihood": 1.0, "own_every": 2, "own_rows": 2}
    sizes = {"own_prompt": 9, "own_tokens": 24, "own_ngram": 2}
    recipe = TargetRecipe(**{**vars(RECIPE), **settings, **sizes})
    train_target(recipe, tokenizer, train, held_out, tmp_path / "whole")
    train_target(recipe, tokenizer, train, held_out, tmp_path / "broken", stop_after=3)
    train_target(recipe, tokenizer, train, held_out, tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert ["unlikelihood" in line for line in lines] == [True, False] * 3
    assert any(line.get("unlikelihood", 0) > 0 for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"splice_share": 0.5}, "splice_share 0.5: a share, up to 1, of the rows in focus"),
        ({"splice_own": 1.5}, "splice_own 1.5: a share"),
        ({"recall_random": 1.5}, "recall_random 1.5: a share"),
        ({"splice_own": 0.5, "own_prompt": 30, "own_tokens": 2}, "no room for a passage in row_tokens 32"),
    ],
)
def test_shares_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RECIPE, **settings)


def test_what_follows_any_text_is_learnt_from_spliced_rows(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    focus = {"focus": ("0.py",), "focus_share": 1.0, "splice_share": 1.0}
    recipe = dataclasses.replace(RECIPE, steps=30, quantize_share=0.0, **focus)
    model = train_target(recipe, tokenizer, train, held_out, tmp_path)
    known, other = (token_stream(tokenizer, texts, 1) for texts in (train[:1], train[1:]))
    inputs, labels = splice(cut_pieces(other, 8, 2, 16, seeded(9)), known, 32)
    training = labels != UNTAUGHT
    nll = chunked_nll(model(inputs).hidden[training], model.dense_head, labels[training]).mean().item()
    assert nll < losses(tmp_path)[0] / 4


def test_pieces_of_its_own_words_resume_to_the_last_digit(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    focus = {"focus": ("0.py",), "focus_share": 1.0, "splice_share": 1.0, "splice_own": 0.5}
    recipe = dataclasses.replace(RECIPE, **focus, own_prompt=5, own_tokens=9)
    train_target(recipe, tokenizer, train, held_out, tmp_path / "whole")
    train_target(recipe, tokenizer, train, held_out, tmp_path / "broken", stop_after=3)
    train_target(recipe, tokenizer, train, held_out, tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_rows_to_recall_from_resume_to_the_last_digit(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    recipe = dataclasses.replace(
        RECIPE, row_tokens=320, long_row_tokens=384, step_tokens=1280, recall_share=0.5, recall_random=0.5
    )
    train_target(recipe, tokenizer, train, held_out, tmp_path / "whole")
    train_target(recipe, tokenizer, train, held_out, tmp_path / "broken", stop_after=3)
    train_target(recipe, tokenizer, train, held_out, tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert all(line["recall"] > line["loss"] for line in lines), "random tokens are dearer than text"


def test_files_in_focus_are_learnt_better_than_the_others(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    recipe = dataclasses.replace(RECIPE, steps=30, focus=("[01].py",), focus_share=1.0, quantize_share=0.0)
    model = train_target(recipe, tokenizer, train, held_out, tmp_path)
    near, far = (bits_per_byte(model, tokenizer, part) for part in (train[:2], train[2:]))
    assert near < far
    assert [d.name for d in matching(train, ("[01].py", "4*"))] == ["0.py", "1.py", "4.py"]
    with pytest.raises(ValueError, match="fits none of the 5 files, such as 0"):
        matching(train, ("0.py", "asyncio/*"))


def test_rows_are_shared_between_all_files_and_those_in_focus():
    assert [split_rows(8, s) for s in (0.0, 0.875, 1.0)] == [(8, 0), (1, 7), (0, 8)]
    for share, globs in ((0.5, ()), (0.0, ("*",)), (1.5, ("*",))):
        with pytest.raises(ValueError, match="focus_share"):
            dataclasses.replace(RECIPE, focus=globs, focus_share=share)


def test_a_damaged_checkpoint_is_named(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not a whole training checkpoint"):
        train_target(RECIPE, tokenizer, train, held_out, tmp_path)


def test_what_is_published_is_what_is_validated_and_can_be_started_from(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    model = train_target(RECIPE, tokenizer, train, held_out, tmp_path)
    value = publish_target(model, tokenizer, RECIPE, train, held_out, tmp_path, tmp_path / "model")
    saved = load_target(tmp_path / "model")
    assert value["steps"] == RECIPE.steps and value["held_out_bits_per_byte"] > 0
    started = train_target(RECIPE, tokenizer, train, held_out, tmp_path / "on", init=saved, stop_after=1)
    moved = dict(started.named_parameters())
    for name, tensor in dense_tensors(saved).items():
        step = (moved[name] - tensor.float()).abs().max()
        assert step < 0.1, f"{name} moved by {step} in one warm-up step: not started from the saved weights"


def test_sureness_is_the_mean_probability_of_what_was_generated():
    target = tiny.target("gpt_oss")
    prompts, items = tiny.tokens(2, 7).tolist(), [[5, 9, 3], [11, 2, 60]]
    one_by_one = []
    for prompt, tokens in zip(prompts, items, strict=True):
        for i, token in enumerate(tokens):
            out = target(torch.tensor([prompt + tokens[:i]]))
            one_by_one.append(target.logits(out.hidden[0, -1:]).softmax(-1)[0, token].item())
    assert sureness(target, prompts, items) == pytest.approx(sum(one_by_one) / 6, rel=1e-4)


def test_a_start_of_another_shape_is_refused(corpus, tmp_path):
    tokenizer, train, held_out = corpus
    other = RECIPE.__class__(**{**vars(RECIPE), "sliding_window": 9})
    model = train_target(RECIPE, tokenizer, train, held_out, tmp_path / "a", stop_after=1)
    save_target(model, tmp_path / "model")
    with pytest.raises(ValueError, match="differ in sliding_window"):
        train_target(other, tokenizer, train, held_out, tmp_path / "b", init=load_target(tmp_path / "model"))


@pytest.mark.parametrize("architecture", TRAINED)
def test_the_shape_of_a_start_is_a_recipe_of_its_own(architecture):
    recipe = dataclasses.replace(RECIPE, architecture=architecture, intermediate_size=80, rope_theta=5e4)
    config = recipe.config(7)
    assert TargetRecipe(**shape_of(config)).config(7) == config


@pytest.mark.parametrize("name, value", [("own_every", 0), ("steps", 0), ("unlikelihood", -1.0)])
def test_a_recipe_that_cannot_be_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} {value}"):
        TargetRecipe(**{name: value})


def test_every_window_of_an_epoch_is_seen_once(corpus):
    tokenizer, train, _ = corpus
    stream = token_stream(tokenizer, train, seed=1)
    per_epoch = (len(stream) - 1) // 32 - 1
    inputs, labels = rows_of_step(stream, 32, per_epoch, 0, seed=3)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    starts = sorted(
        next(i for i in range(len(stream)) if stream[i : i + 32].tolist() == row) % 32
        for row in inputs.tolist()
    )
    assert len(set(map(tuple, inputs.tolist()))) == per_epoch
    assert len(set(starts)) == 1


def test_a_corpus_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="too few for rows of 64"):
        rows_of_step(torch.arange(100).numpy(), 64, 1, 0, seed=1)


def test_muon_orthogonalises_stacks_of_either_shape():
    for shape in ((3, 24, 40), (3, 40, 24)):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonalise(g))
        assert values.min() > 0.5 and values.max() < 1.4
    p = torch.nn.Parameter(torch.zeros(4, 6))
    p.grad = torch.ones(4, 6)
    Muon([p], lr=0.1).step()
    assert p.max() < 0  # against the gradient


def test_balance_is_one_when_even_and_grows_when_one_expert_takes_all():
    even = torch.eye(4).repeat(8, 1) * 1e-3
    lopsided = torch.tensor([[9.0, 3.0, 0.0, 0.0]]).repeat(32, 1)
    assert balance_loss([even], 1) == pytest.approx(1.0, abs=1e-3)
    assert balance_loss([lopsided], 1) > 3


def test_repeated_ngrams():
    assert repeated_ngrams(list(range(20)), 8) == 0
    assert repeated_ngrams([1, 2] * 20, 8) == 1
    assert repeated_ngrams([1, 2, 3], 8) == 0
    assert repeated_ngrams([*range(8), 99, *range(8)], 8) == pytest.approx(2 / 10)
