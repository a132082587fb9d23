"""The reference's forward is wrong in a known way: the doctor names it, in the half that it touches."""

import copy

import pytest
import tiny
import wrong_twins

from outpace.doctor.compare import Reference, compare
from outpace.doctor.engine import walk
from outpace.doctor.prediction import known_mistakes
from outpace.doctor.sample import Sample
from outpace.doctor.transformers_reference import walk_transformers
from outpace.models.load import load_target

IDS = tiny.tokens(1, 60)[0].tolist()  # far past the window of 7 and the original length of 32
HALF = {"attention": "why attention departs", "mlp": "why the MLP departs"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, twins):
    """(family, changes) -> our model, and a copy of the transformers model on the same weights."""
    made = {}

    def one(family, changes):
        key = family, repr(changes)
        if key not in made and changes:
            folder = tmp_path_factory.mktemp(family)
            if "rope_parameters" in changes:
                base = tiny.HF[family]["rope_parameters"]
                changes = changes | {"rope_parameters": base | changes["rope_parameters"]}
            made[key] = folder, tiny.save_twin(family, folder, **changes)
        folder, twin = made[key] if changes else twins(family)
        return load_target(folder), copy.deepcopy(twin)

    return one


def checks(model, twin):
    reference = Reference(walk=walk_transformers(twin, IDS))
    return list(compare(model, walk(model, IDS), reference, Sample.whole(IDS), loss_counts=False))


def why(result):
    return [c for c in result if c.name.startswith("why")]


CASES = [("attention", *case) for case in wrong_twins.ATTENTION] + [
    ("mlp", *case) for case in wrong_twins.MLP
]


@pytest.mark.parametrize(
    ("half", "family", "name", "plant", "changes"), CASES, ids=[f"{c[1]}: {c[2]}" for c in CASES]
)
def test_a_mistake_of_the_reference_is_named(half, family, name, plant, changes, pair, monkeypatch):
    model, twin = pair(family, changes)
    plant(twin, monkeypatch)
    result = checks(model, twin)
    named = why(result)
    assert named and all(c.name == HALF[half] for c in named), [c.message for c in result]
    departing = {i for i, row in result[1].evidence.items() if row["departs"]}
    assert departing == {str(i) for c in named for i in c.evidence["layers"]}
    for check in named:
        assert check.evidence["ours"] == [name], check.message


def test_every_known_mistake_is_planted_somewhere():
    """Here, or where a checkpoint alone can be wrong so."""
    planted = {case[2] for case in CASES}
    elsewhere = ("RMSNorm eps", "q/k rows permuted", "RoPE base")
    for family in tiny.FAMILIES:
        for name in known_mistakes(tiny.target(family)):
            assert name in planted or name.startswith(elsewhere), name
