"""Training by several processes, which torchrun starts as a user would: the same run as by one."""

import json
from pathlib import Path

import distributed
import pytest
import torch
from processes import torchrun

from outpace.ops import ranks

SCRIPT = Path(distributed.__file__)
KINDS = [*distributed.KINDS, *distributed.RETROFITS]
TOLERANCE = 1e-5
MUON = 5e-3  # it rounds to bfloat16, where the CPU multiplies that: the last bits of a sum become visible


def log(folder, kind):
    return [json.loads(line) for line in (folder / kind / "log.jsonl").read_text().splitlines()]


def check(kind, got, wanted):
    assert [r["step"] for r in got] == [r["step"] for r in wanted] == list(range(len(got)))
    for mine, reference in zip(got, wanted, strict=True):
        assert mine.keys() == reference.keys() and mine["tokens"] == reference["tokens"]
        rounded = kind == "muon" and mine["step"] > 2
        assert mine["loss"] == pytest.approx(reference["loss"], abs=MUON if rounded else TOLERANCE)
        for name in set() if rounded else set(mine) - {"seconds", "tokens_per_s"}:
            assert mine[name] == pytest.approx(reference[name], abs=2e-4), (mine["step"], name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        distributed.train(kind, folder)
    return folder


def test_two_processes_train_as_one(alone, tmp_path):
    """Every kind of draft and retrofit: of five rows three by one process, two by the other."""
    done = torchrun(2, SCRIPT, tmp_path, -1, *KINDS)
    assert done.returncode == 0, done.stderr[-2000:]
    for kind in KINDS:
        is_draft = kind in distributed.KINDS
        assert len(log(tmp_path, kind)) == (distributed.STEPS if is_draft else 12)
        check(kind, log(tmp_path, kind), log(alone, kind))
        report = Path("draft/provenance.json" if is_draft else f"model/{kind.split()[0]}.json")
        assert (tmp_path / kind / report).is_file()


@pytest.mark.parametrize("kind", distributed.SPLIT)
def test_micro_batches_are_one_batch(kind, alone, tmp_path):
    """Five rows in three parts, whatever weighs them."""
    distributed.train(kind, tmp_path, stop_after=12, micro_batches=3)
    check(kind, log(tmp_path, kind), log(alone, kind)[:12])


def test_a_killed_process_costs_the_steps_since_the_checkpoint(alone, tmp_path):
    """kill -9 of one ends all; another number of processes goes on."""
    failed = torchrun(2, SCRIPT, tmp_path, 2 * 34, "dflash")
    assert failed.returncode != 0 and "SIGKILL" in failed.stderr
    saved = torch.load(tmp_path / "dflash" / "checkpoint.pt", weights_only=True)["step"]
    assert saved == 30 and not (tmp_path / "dflash" / "draft").exists()
    done = torchrun(3, SCRIPT, tmp_path, -1, "dflash")
    assert done.returncode == 0, done.stderr[-2000:]
    check("dflash", log(tmp_path, "dflash"), log(alone, "dflash"))
    assert len(log(tmp_path, "dflash")) == distributed.STEPS


def test_every_process_needs_a_row(monkeypatch):
    assert ranks.own([3, 4]) == [[3, 4]]
    assert ranks.own([3, 4, 5], 2) == [[3, 5], [4]]
    monkeypatch.setattr(ranks, "size", lambda: 3)
    with pytest.raises(ValueError, match="rows 5: 3 processes train, each with 2 micro-batches of a row"):
        ranks.own([3, 4, 5, 6, 7], 2)
