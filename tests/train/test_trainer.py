"""The training loop: what decides where a run goes on, and what stops it."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from outpace.checkpoint.publish import one_writer
from outpace.train.drafts import StepLoss, TrainingRecipe, learn


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingRecipe):
    steps: int = 9
    save_every: int = 3
    eval_every: int = 4
    lr: float = 0.01


def train(folder, stop_after=None, seed=0, loss=None, **changes):
    torch.manual_seed(seed)
    draft = nn.Linear(5, 3)

    def loss_of(step):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
        value = draft(x).square().mean() if loss is None else loss(draft, x, step)
        return StepLoss(value, 7, {})

    done = learn(draft, Recipe(**changes), folder, "toy", loss_of, dict, stop_after=stop_after)
    return done, draft.weight.detach().clone()


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a checkpoint", "cannot be read"),
        ({"draft": {}}, "is no checkpoint of a training"),
        ({"step": "three"}, "is no checkpoint of a training"),
        ({"step": 3}, "of other shapes|have other shapes"),
        ({"step": 3, "draft": [1, 2]}, "have other shapes"),
        ([1, 2], "is no checkpoint of a training"),
        ({"step": 30}, "it is at step 30, and 9 are asked for"),
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
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"lr": x} for x in (0.0, -1e-3, float("inf"), float("nan"))]
    + [{"weight_decay": -0.1}, {"muon_lr": float("nan")}, {"clip": 0.0}, {"warmup_share": 1.5}],
)
def test_rates_that_no_run_can_use_are_refused(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=name):
        Recipe(**changes)
