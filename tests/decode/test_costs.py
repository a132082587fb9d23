"""Cost tables: lines between the points, files that are refused, experts counted."""

import dataclasses
import itertools
import json
import math

import pytest
import tiny
import torch
from test_lossless import random_dflash

from outpace.checkpoint.base import LoadError
from outpace.config import cache_folder
from outpace.decode.calibrate import touched_experts, width_grid
from outpace.decode.costs import (
    Costs,
    Point,
    Touched,
    fingerprint,
    read_costs,
    rising,
    table_path,
    write_costs,
)
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree

TEXT = tiny.tokens(400, seed=4).tolist()


def point(batch=1, context=100.0, scale=1.0, **changes):
    verify, draft = (1.0, 1.5, 3.0), (0.0, 0.5, 0.7)
    values = {
        "verify": tuple(scale * x for x in verify),
        "draft": tuple(scale * x for x in draft),
        "rest": 0.25,
        "plain": 0.875 * scale,
    }
    return Point(batch=batch, context=context, **(values | changes))


def costs(*points, **changes):
    values = {"fingerprint": "f" * 64, "widths": (1, 2, 4), "acceptance": 0.5, "described": {"draft": "none"}}
    return Costs(points=points or (point(),), **(values | changes))


# ---- the table -------------------------------------------------------------------------------------


def test_lines_between_widths_and_beyond():
    table = costs()
    assert [table.verify_seconds(n, 7) for n in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.25, 3.0, 4.5]
    assert [table.draft_seconds(n, 7) for n in (1, 2, 3, 4)] == [0.0, 0.5, pytest.approx(0.6), 0.7]
    assert table.round_seconds(4, 7) == 0.7 + 3.0 + 0.25 and table.round_seconds(1, 7) == 1.25
    assert table.round_seconds(2, 7, width=4) == 0.7 + 1.5 + 0.25
    assert table.break_even(4, 7) == 3.95 / 1.25 and table.break_even(1, 7) == 1
    table = costs(point(idle=0.125))
    assert table.round_seconds(1, 7) == 1.125 and table.round_seconds(2, 7) == 0.5 + 1.5 + 0.25


def test_lines_between_contexts_and_batches():
    table = costs(point(), point(context=300.0, scale=2.0), point(batch=5, scale=3.0))
    assert table.verify_seconds(2, 50) == table.verify_seconds(2, 100) == 1.5
    assert table.verify_seconds(2, 200) == 2.25 and table.verify_seconds(2, 400) == 3.75
    assert table.plain_seconds(50) == 0.875 and table.plain_seconds(200) == 1.5 * 0.875
    assert table.plain_seconds(100, 4) == 3 * 0.875
    assert table.verify_seconds(2, 100, 3) == pytest.approx((1.5 + 4.5) / 2)
    assert table.verify_seconds(2, 100, 10) == 9.0  # what 4 positions of 5 rows take
    assert costs(point(batch=5)).verify_seconds(2, 100, 2) == 1.5
    falling = costs(point(), point(context=300.0, scale=0.5))
    assert falling.verify_seconds(2, 900) == 0.75  # noise does not go on falling


@pytest.mark.parametrize("seed", range(20))
def test_what_rises_is_the_nearest_that_does(seed):
    rng = torch.Generator().manual_seed(seed)
    ys = (torch.rand(5, generator=rng) * 4).round().tolist()
    got = rising(ys)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(got))
    grid = [i / 12 for i in range(49)]  # means of up to 4 whole numbers lie on it
    best = min(
        sum((a - b) ** 2 for a, b in zip(ys, zs, strict=True))
        for zs in itertools.combinations_with_replacement(sorted({*grid[::3], *got}), 5)
    )
    assert sum((a - b) ** 2 for a, b in zip(ys, got, strict=True)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("block", [2, 8, 16, 60, 256])
def test_widths_are_dense_where_it_matters(block):
    grid = width_grid(block)
    assert grid[0] == 1 and grid[-1] == block and len(grid) < 30
    assert set(range(1, min(block, 16) + 1)) <= set(grid)
    assert all(b - a <= max(1, a / 4) for a, b in itertools.pairwise(grid))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": (2, 3, 4)}, "ascend from 1"),
        ({"widths": (1, 2)}, "costs for 2 widths"),
        ({"points": ()}, "needs points"),
        ({"points": (point(), point())}, "one at each"),
        ({"points": (point(rest=-1.0),)}, "not a time"),
        ({"points": (point(verify=(1.0, math.nan, 2.0)),)}, "not a time"),
        ({"points": (point(verify=(0.0, 1.0, 2.0)),)}, "not a time"),
        ({"acceptance": 1.5}, "no share"),
    ],
)
def test_a_table_that_nobody_measured_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(costs(), **change)


# ---- its file --------------------------------------------------------------------------------------


def test_a_table_comes_back_as_it_was(tmp_path):
    touched = Touched(experts=5, per_token=3, widths=(1, 2), measured=(3.0, 3.9), rho=0.9)
    for table in (costs(), costs(point(), point(batch=4), touched=touched)):
        path = write_costs(table, tmp_path)
        assert read_costs(tmp_path, table.fingerprint) == table
        assert path == table_path(tmp_path, table.fingerprint) and not list(path.parent.glob("*.tmp"))
    assert read_costs(tmp_path, "a" * 64) is None


def spoil(message, **changes):
    return json.dumps(message | changes)


SPOILT = [
    (lambda message: "{", "JSON"),
    (lambda message: spoil(message, format=1), "has format 1; this version reads 8"),
    (lambda message: spoil(message, fingerprint="f" * 24 + "0" * 40), "measured for another target"),
    (lambda message: spoil(message, points=[]), "is not a cost table"),
    (lambda message: spoil(message, points=[{**message["points"][0], "speed": 1}]), "is not a cost table"),
    (
        lambda message: spoil(message, points=[{**message["points"][0], "verify": ["1", 2, 3]}]),
        "is not a cost table",
    ),
    (lambda message: spoil(message, widths=None), "is not a cost table"),
    (lambda message: json.dumps({k: v for k, v in message.items() if k != "touched"}), "is not a cost table"),
    (lambda message: "[]", "object"),
]


@pytest.mark.parametrize(("how", "message"), SPOILT)
def test_a_file_that_is_spoilt_or_foreign_is_refused_by_name(tmp_path, how, message):
    path = write_costs(costs(), tmp_path)
    path.write_text(how(json.loads(path.read_text())))
    with pytest.raises(LoadError, match=message) as refused:
        read_costs(tmp_path, "f" * 64)
    assert str(path) in str(refused.value)


def test_where_tables_lie(monkeypatch, tmp_path):
    monkeypatch.delenv("OUTPACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "outpace"
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_the_fingerprint_knows_target_draft_and_machine(monkeypatch):
    model = tiny.target("gpt_oss")
    known = {fingerprint(model, random_dflash(model))}
    assert known == {fingerprint(model, random_dflash(model))}
    for target, draft in (
        (model, random_dflash(model, 5)),
        (model, random_dflash(model, seed=1)),
        (model, NGram()),
        (model, NGram(block_size=5)),
        (model, DDTree(random_dflash(model), 9)),
        (model, DDTree(random_dflash(model), 8)),
        (tiny.target("qwen3"), NGram()),
        (tiny.target("qwen3", seed=1), NGram()),
    ):
        known.add(fingerprint(target, draft))
    known.add(fingerprint(model, NGram(), "gumbel"))
    assert len(known) == 10
    with monkeypatch.context() as other:
        other.setattr("outpace.decode.costs.built", lambda: "cpu-of-another-source")
        assert fingerprint(model, NGram()) not in known
    assert fingerprint(model, NGram()) in known
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert fingerprint(model, NGram()) not in known


# ---- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_are_counted_as_by_hand(family):
    model, text, widths = tiny.target(family), TEXT[:40], (1, 2, 3, 5)
    got = touched_experts(model, text, widths)
    with torch.inference_mode():
        logits = model(torch.tensor([text]), routing=True).routing
    counts = {n: [] for n in widths}
    for layer in logits:
        chosen = [sorted(range(5), key=lambda e: -row[e])[:3] for row in layer.tolist()]
        for n in widths:
            counts[n] += [len({e for c in chosen[i : i + n] for e in c}) for i in range(len(text) - n + 1)]
    assert len(logits) == sum(model.config.moe_layers)
    assert got.measured == pytest.approx([sum(c) / len(c) for c in counts.values()])
    assert got.measured[0] == 3 and got.experts == 5 and got.per_token == 3
    assert got.independent(2) == pytest.approx(5 * (1 - 0.4**2))
    fit = [3 + got.rho * (got.independent(n) - 3) for n in widths]
    off = sum((a - b) ** 2 for a, b in zip(fit, got.measured, strict=True))
    for other in (got.rho - 0.01, got.rho + 0.01):
        worse = [3 + other * (got.independent(n) - 3) for n in widths]
        assert off < sum((a - b) ** 2 for a, b in zip(worse, got.measured, strict=True))


def test_a_dense_model_touches_none():
    assert touched_experts(tiny.target("llama"), TEXT, (1, 2)) is None
