"""Training latents and indexes: they come nearer, the backbone stays, a resumed run is the unbroken one."""

import copy
import json

import pytest
import torch
from target_shapes import SHAPE

from examples.tiny_target.model import init_weights
from outpace.kv.topk import TopKConfig
from outpace.models.load import build, fingerprint, load_target
from outpace.retrofit import dsa, mla
from outpace.retrofit.dsa import DsaRecipe, DsaTrainer
from outpace.retrofit.mla import MlaRecipe, MlaTrainer, calibrate, whole_losses
from outpace.retrofit.train import train_retrofit
from outpace.teacher.store import TeacherSample
from outpace.text.corpus import Document
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id, train_bpe
from outpace.train.data import rows_of_step, token_stream

TEXTS = [
    "".join(f"def f_{n}_{i}(x, y):\n    return x * {i} + y - {n}\n\n" for i in range(40)) for n in range(6)
]
KEEP = TopKConfig(top_k=0.4, min_context=0, sinks=1, recent=4)
OFTEN = {"warmup": 1, "validation_texts": 1, "save_every": 3}
DSA = DsaRecipe(steps=40, row_tokens=64, queries=32, sparse_share=0.2, lr=0.003, **OFTEN)
MLA = MlaRecipe(steps=12, row_tokens=48, rows=2, layer_share=0.4, lr=0.01, **OFTEN)


@pytest.fixture(scope="module")
def world():
    return random_target()


def random_target():
    """A target of random weights, its tokenizer and texts."""
    tokenizer = train_bpe(TEXTS, SHAPE.vocab_size)
    model = build(SHAPE.config(token_id(tokenizer, END_OF_TEXT)))
    init_weights(model, 3)
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():  # what writes into the residual stream starts at zero: here it must say something
        for name, p in model.named_parameters():
            if "o_proj" in name or ".down." in name:
                p.copy_(torch.randn(p.shape, generator=rng) * 0.3)
    documents = [Document(f"{n}.py", text) for n, text in enumerate(TEXTS)]
    return model.eval(), tokenizer, documents[:5], documents[5:]


def with_index(world):
    model, tokenizer, train, _ = world
    model = copy.deepcopy(model)
    seen = dsa.attention_inputs(model, torch.tensor(encode(tokenizer, train[0].text)[:200]), [1])[1]
    made = dsa.first_weights(seen.attention, dsa.Phases.of(seen), 3, 4)
    dsa.attach_index(model, {1: made}, KEEP)
    return model


def with_latents(world, rank=8):
    model, tokenizer, train, _ = world
    model = copy.deepcopy(model)
    moments = calibrate(model, [encode(tokenizer, train[0].text)[:200]], [1])
    bases = {i: mla.basis("svd", model.attentions[i], m) for i, m in moments.items()}
    mla.attach(model, bases, {1: rank})
    return model


def trained(kind, world, folder, recipe=None, stop_after=None, **more):
    model, tokenizer, train, held_out = world
    model = with_index(world) if kind == "dsa" else with_latents(world)
    trainer, default = (DsaTrainer, DSA) if kind == "dsa" else (MlaTrainer, MLA)
    trainer = trainer(recipe or default, model, tokenizer, train, **more)
    return model, train_retrofit(trainer, tokenizer, None, held_out, folder, stop_after=stop_after)


@pytest.mark.parametrize("kind", ["dsa", "mla"])
def test_training_helps_and_the_backbone_stays(kind, world, tmp_path):
    model, report = trained(kind, world, tmp_path)
    saved = load_target(tmp_path / "model")
    assert report == json.loads((tmp_path / "model" / f"{kind}.json").read_text())
    assert report["backbone"] == fingerprint(world[0]) == fingerprint(saved, retrofits=False)
    assert fingerprint(saved) == fingerprint(model) and saved.config == model.config
    assert not any(p.requires_grad for p in model.parameters())
    held = report["held_out"]
    assert held["after"]["kl"] < held["untrained"]["kl"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    if kind == "dsa":
        kept = [sum(row["index"] for row in report[name]) for name in ("mass", "mass_untrained")]
        assert kept[0] > kept[1]
    else:
        assert ["layers" in line for line in lines] == [n < 5 for n in range(12)]
        assert ["kl" in line for line in lines] == [n >= 5 for n in range(12)]


@pytest.mark.parametrize("kind", ["dsa", "mla"])
def test_a_resumed_run_is_the_unbroken_one(kind, world, tmp_path):
    whole, report = trained(kind, world, tmp_path / "whole")
    _, none = trained(kind, world, tmp_path / "broken", stop_after=7)
    assert none is None and not (tmp_path / "broken" / "model").exists()
    resumed, again = trained(kind, world, tmp_path / "broken")
    assert fingerprint(resumed) == fingerprint(whole)
    assert again["held_out"] == report["held_out"]


class Cached:
    """A teacher cache of the original's, in memory."""

    def __init__(self, world, final=True, offset=0):
        model, tokenizer, train, _ = world
        self.samples = []
        for document in train:
            tokens = torch.tensor(encode(tokenizer, document.text)[:60])
            with torch.inference_mode():
                states = model(tokens[None]).hidden[0].clone() if final else None
            self.samples.append(TeacherSample(tokens, 10, torch.zeros(0), offset, 0.0, states))

    def __len__(self):
        return len(self.samples)

    def sample(self, index):
        return self.samples[index]


def test_latents_learn_from_a_teacher_cache(world, tmp_path, monkeypatch):
    """The last states of the cache mean a forward of the original."""
    model = with_latents(world)
    sample = Cached(world).sample(0)
    online = whole_losses(model, sample.tokens[None])
    cached = whole_losses(model, sample.tokens[None], sample.final)
    assert all(abs(a.value - b.value) < 1e-6 for a, b in zip(online, cached, strict=True))
    _, report = trained("mla", world, tmp_path / "run", teacher=Cached(world))
    assert report["held_out"]["after"]["kl"] < report["held_out"]["untrained"]["kl"]
    for wrong in (Cached(world, final=False), Cached(world, offset=9)):
        with pytest.raises(ValueError, match="no final states, or texts at other positions"):
            trained("mla", world, tmp_path / "wrong", teacher=wrong)


def test_what_is_remembered_does_not_grow_with_the_backbone(world, tmp_path):
    trained("dsa", world, tmp_path)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    states = [t for state in saved["adam"]["state"].values() for t in state.values()]
    learnt = sum(p.numel() for p in with_index(world).attentions[1].indexer.proj.parameters())
    assert sum(t.numel() for t in saved["parts"].values()) == learnt
    assert sum(t.numel() for t in states if t.dim()) == 2 * learnt


def test_a_backbone_that_changes_is_noticed(world, tmp_path, monkeypatch):
    loss = dsa.DsaTrainer.loss

    def stray(self, step, rows):
        with torch.no_grad():
            self.target.layers[0].input_layernorm.weight.add_(0.1)
        return loss(self, step, rows)

    monkeypatch.setattr(dsa.DsaTrainer, "loss", stray)
    with pytest.raises(ValueError, match="the backbone changed"):
        trained("dsa", world, tmp_path)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"held_out": 3}'])
def test_a_damaged_evaluation_before_training_is_repeated(content, world, tmp_path):
    _, report = trained("mla", world, tmp_path / "whole")
    trained("mla", world, tmp_path / "run", stop_after=2)
    (tmp_path / "run" / "untrained.json").write_text(content)
    assert trained("mla", world, tmp_path / "run")[1]["held_out"] == report["held_out"]


@pytest.mark.parametrize("recipe", [DsaRecipe, MlaRecipe])
@pytest.mark.parametrize(
    "message", [{"steps": 0}, {"validation_texts": 0}, {"row_tokens": 1}, {"warmup": -1}]
)
def test_recipes_that_cannot_be(recipe, message):
    with pytest.raises(ValueError, match=f"{next(iter(message))} {next(iter(message.values()))}"):
        recipe(**message)


def test_shares_above_one():
    with pytest.raises(ValueError, match=r"sparse_share 1.5"):
        DsaRecipe(sparse_share=1.5)
    with pytest.raises(ValueError, match=r"layer_share 1.5"):
        MlaRecipe(layer_share=1.5)


def test_a_target_without_the_retrofit(world):
    model, tokenizer, train, _ = world
    for trainer, recipe, named in ((DsaTrainer, DSA, "no index"), (MlaTrainer, MLA, "no latents")):
        with pytest.raises(ValueError, match=named):
            trainer(recipe, model, tokenizer, train)


def test_every_window_of_an_epoch_is_seen_once(world):
    _, tokenizer, train, _ = world
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
