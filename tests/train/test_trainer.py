"""The training loop: what decides where a run goes on, and what stops it."""

import json
from dataclasses import dataclass

import pytest
import tiny
import torch
from taught import TrainedSetup
from torch import nn

from outpace.checkpoint.publish import one_writer
from outpace.ops.ranks import Mean
from outpace.train.drafts import DraftRecipe, DraftTrainer, train_draft
from outpace.train.trainer import Muon, StepLoss


@dataclass(frozen=True, kw_only=True)
class Recipe(DraftRecipe):
    steps: int = 9
    save_every: int = 3
    eval_every: int = 4
    lr: float = 0.01


class ToyTrainer(DraftTrainer[nn.Linear]):
    title, by_adam = "toy", ()
    config = Recipe()

    def __init__(self, seed, loss):
        torch.manual_seed(seed)
        self.draft, self.loss_function = nn.Linear(5, 3), loss

    def loss(self, step, samples, rows):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
        f = self.loss_function
        value = self.draft(x).square().mean() if f is None else f(self.draft, x, step)
        return StepLoss([Mean(value, torch.tensor(1.0))], 7, {})

    def validate(self, batches):
        return {}

    def bind(self):
        raise AssertionError

    def save(self, folder):
        torch.save(self.draft.state_dict(), folder / "weights.pt")


@pytest.fixture(scope="module", autouse=True)
def world():
    target = tiny.target("llama")
    WORLD.update(target=target, cache=TrainedSetup(target, [tiny.tokens(20)], (0, 2)))


WORLD: dict = {}


def train(folder, stop_after=None, seed=0, loss=None, **changes):
    """-> whether the draft is published, and its weight."""

    def kind(*given):
        return ToyTrainer(seed, loss)

    draft = train_draft(
        kind, Recipe(**changes), **WORLD, tokenizer=None, held_out=[], folder=folder, stop_after=stop_after
    )
    return (folder / "draft" / "weights.pt").exists(), draft.weight.detach().clone()


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def untimed(records):
    return [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_s")} for r in records]


@pytest.mark.parametrize("damage", ["short", "missing", "torn", "empty", "longer"])
def test_the_checkpoint_alone_decides_where_a_run_goes_on(tmp_path, damage):
    """The log is written anew from the checkpoint, whatever became of it."""
    done, whole = train(tmp_path / "whole")
    assert done
    folder = tmp_path / "run"
    assert train(folder, stop_after=6)[0] is False
    log = folder / "log.jsonl"
    text = log.read_text()
    match damage:
        case "short":
            log.write_text("".join(text.splitlines(keepends=True)[:2]))
        case "missing":
            log.unlink()
        case "torn":
            log.write_text(text[:-9])
        case "empty":
            log.write_text("")
        case "longer":
            log.write_text(text + text)
    done, weight = train(folder)
    assert done and torch.equal(weight, whole)
    assert untimed(lines(folder)) == untimed(lines(tmp_path / "whole"))
    assert train(folder)[0] is True  # a finished run stays finished
    log.unlink()
    assert train(folder)[0] is True and len(lines(folder)) == 9


def test_a_second_process_is_refused(tmp_path):
    with one_writer(tmp_path / "run"), pytest.raises(ValueError, match="is being written by process"):
        train(tmp_path / "run")


def test_the_folder_is_locked_until_the_draft_is_published(tmp_path, monkeypatch):
    """A second process that starts after the last step must not end without a draft."""
    save, refused = ToyTrainer.save, []

    def saving(self, folder):
        with pytest.raises(ValueError, match="is being written by process") as error:
            train(tmp_path / "run")
        refused.append(error)
        save(self, folder)

    monkeypatch.setattr(ToyTrainer, "save", saving)
    assert train(tmp_path / "run")[0] and len(refused) == 1


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(tmp_path):
    def loss(draft, x, step):
        return draft(x).square().mean() * (float("nan") if step == 7 else 1.0)

    with pytest.raises(
        ValueError, match=r"step 7: the loss \(nan\) .* the last good checkpoint is that of step 6"
    ):
        train(tmp_path / "run", loss=loss)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 6 and saved["draft"]["weight"].isfinite().all()
    assert len(lines(tmp_path / "run")) == 7
    assert train(tmp_path / "run")[0] is True  # from step 6


def test_a_gradient_that_is_not_finite_stops_it_before_the_weights_are_spoilt(tmp_path):
    def loss(draft, x, step):  # sqrt at 0: a finite loss, an infinite slope
        return (draft.weight - draft.weight.detach()).abs().sqrt().sum() if step == 4 else draft(x).sum() * 0

    with pytest.raises(ValueError, match=r"step 4: the grad_norm \((nan|inf)\)"):
        train(tmp_path / "run", loss=loss)


def test_a_rate_that_is_far_too_high_saves_no_broken_weights(tmp_path):
    with pytest.raises(ValueError, match=r"step \d: .* is not finite\. Training has diverged"):
        train(tmp_path / "run", lr=1e30)
    path = tmp_path / "run" / "checkpoint.pt"
    assert not path.exists() or torch.load(path, weights_only=True)["draft"]["weight"].isfinite().all()


LINE = '{"step": %d, "loss": 1.0, "seconds": 0.1}\n'
SAVED = {"step": 3, "recipe": {}, "log": "".join(LINE % i for i in range(3))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a checkpoint", "is not a whole training checkpoint"),
        ({"draft": {}}, r"is not a whole training checkpoint \(KeyError"),
        (SAVED | {"step": "three"}, "is not a whole training checkpoint"),
        (SAVED | {"step": 2}, "its log does not end at its step"),
        (SAVED | {"log": "{}\n" * 3}, r"is not a whole training checkpoint \(KeyError"),
        (SAVED | {"log": "[[[" * 3}, "is not a whole training checkpoint"),
        (SAVED | {"log": 7}, "is not a whole training checkpoint"),
        (SAVED | {"recipe": 7}, "is not a whole training checkpoint"),
        (SAVED, "have other shapes"),
        (SAVED | {"draft": [1, 2]}, "have other shapes"),
        (SAVED | {"draft": nn.Linear(4, 3).state_dict()}, "have other shapes"),
        ([1, 2], "is not a whole training checkpoint"),
        (SAVED | {"step": 30, "log": "".join(LINE % i for i in range(30))}, "it is at step 30"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path, content, message):
    path = tmp_path / "checkpoint.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message) as error:
        train(tmp_path)
    assert str(path) in str(error.value) and "delete it to begin" in str(error.value)


@pytest.mark.parametrize("damage", ["shape", "nan", "hyperparameters"])
def test_a_damaged_optimizer_state(tmp_path, damage):
    """Shapes and values are refused; settings are the recipe's, not the file's."""
    train(tmp_path, stop_after=3)
    path = tmp_path / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    if damage == "hyperparameters":
        saved["adam"]["param_groups"][0] |= {"betas": "x", "eps": None, "weight_decay": 9.0}
    else:
        moment = saved["adam"]["state"][0]["exp_avg"]
        saved["adam"]["state"][0]["exp_avg"] = moment * float("nan") if damage == "nan" else moment[:1]
    torch.save(saved, path)
    if damage == "hyperparameters":
        assert torch.equal(train(tmp_path)[1], train(tmp_path.with_name("whole"))[1])
        return
    with pytest.raises(ValueError, match=r"not finite: delete it|have other shapes"):
        train(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"lr": x} for x in (0.0, -1e-3, float("inf"), float("nan"))]
    + [{"weight_decay": -0.1}, {"muon_lr": float("nan")}, {"clip": 0.0}, {"warmup_share": 1.5}],
)
def test_rates_that_no_run_can_use_are_refused(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=name):
        Recipe(**changes)


def test_muon_moves_matrices_of_one_shape_as_it_moves_each_alone():
    shapes = [(6, 4), (3, 6, 4), (6, 4), (3, 6, 4), (4, 9)]
    start = [torch.randn(shape) for shape in shapes]
    ways = []
    for groups in ([range(5)], [[i] for i in range(5)]):
        some = [nn.Parameter(p.clone()) for p in start]
        optimizers = [Muon([some[i] for i in group], 0.1, weight_decay=0.1) for group in groups]
        torch.manual_seed(1)
        for _ in range(3):
            for p in some:
                p.grad = torch.randn(p.shape)
            for optimizer in optimizers:
                optimizer.step()
        ways.append(some)
    for before, together, alone in zip(start, *ways, strict=True):
        assert (together - alone).abs().max() < 1e-2 * (together - before).abs().max()
