"""What the training of a target begins with: a shape, first weights or those of a start, and optimizers."""

import dataclasses

import pytest
import torch
from target_shapes import SHAPE as SMALL

from examples.tiny_target.model import TargetShape, balance_loss, first_model, shape_of
from outpace.models.load import load_target
from outpace.models.save import dense_tensors, save_target
from outpace.train.trainer import Muon, orthogonalise

SHAPE = dataclasses.replace(SMALL, bfloat16=False)


def test_a_start_gives_its_weights(tmp_path):
    save_target(first_model(SHAPE, 7, None), tmp_path)
    saved = load_target(tmp_path)
    started = dict(first_model(dataclasses.replace(SHAPE, seed=2), 7, saved).named_parameters())
    assert started.keys() == dense_tensors(saved).keys()
    for name, tensor in dense_tensors(saved).items():
        assert torch.equal(started[name], tensor.float()), name


def test_a_start_of_another_shape_is_refused():
    start = first_model(SHAPE, 7, None)
    with pytest.raises(ValueError, match="differ in sliding_window"):
        first_model(dataclasses.replace(SHAPE, sliding_window=9), 7, start)


def test_the_shape_of_a_start_is_a_recipe_of_its_own():
    config = dataclasses.replace(SHAPE, rope_theta=5e4).config(7)
    assert TargetShape(**shape_of(config)).config(7) == config


@pytest.mark.parametrize("name, value", [("num_layers", 0), ("expert_size", 0), ("balance", -1.0)])
def test_a_recipe_that_cannot_be_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} {value}"):
        TargetShape(**{name: value})


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
