"""Training by several processes, which torchrun starts as a user would: the same run as by one."""

import json
import shutil
from pathlib import Path

import distributed
import pytest
import torch
from processes import torchrun
from safetensors.torch import load_file

from outpace.ops import ranks

SCRIPT = Path(distributed.__file__)
KINDS = [*distributed.KINDS, *distributed.RETROFITS]
SHARDED = ("muon", "thinned", "dflash")
KILLED = 2 * 34  # samples that process 1 reads before, two in each step
TOLERANCE = 1e-5


def log(folder, kind):
    return [json.loads(line) for line in (folder / kind / "log.jsonl").read_text().splitlines()]


def check(kind, got, wanted):
    assert [r["step"] for r in got] == [r["step"] for r in wanted] == list(range(len(got)))
    for mine, reference in zip(got, wanted, strict=True):
        assert mine.keys() == reference.keys() and mine["tokens"] == reference["tokens"]
        assert mine["loss"] == pytest.approx(reference["loss"], abs=TOLERANCE), (kind, mine["step"])
        for name in set(mine) - {"seconds", "tokens_per_s"}:
            assert mine[name] == pytest.approx(reference[name], abs=2e-4), (mine["step"], name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        distributed.train(kind, folder)
    return folder


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """Every kind by two processes, some as shards as well; process 1 is killed in the last."""
    folder = tmp_path_factory.mktemp("by_two")
    ended = torchrun(2, SCRIPT, folder, KILLED, *KINDS, *(f"{kind}:shard" for kind in SHARDED))
    assert ended.returncode != 0 and "SIGKILL" in ended.stderr, ended.stderr[-2000:]
    return folder


def test_two_processes_train_as_one(alone, by_two):
    """Every kind of draft and retrofit: of five rows three by one process, two by the other."""
    for kind in KINDS:
        is_draft = kind in distributed.KINDS
        assert len(log(by_two, kind)) == (distributed.STEPS if is_draft else 12)
        check(kind, log(by_two, kind), log(alone, kind))
        report = Path("draft/provenance.json" if is_draft else f"model/{kind.split()[0]}.json")
        assert (by_two / kind / report).is_file()


def test_a_sharded_draft_trains_as_a_whole_one(alone, by_two):
    """Each process has and writes a half."""
    folder = by_two / "shard"
    for kind in SHARDED[:-1]:
        assert len(log(folder, kind)) == distributed.STEPS
        check(kind, log(folder, kind), log(alone, kind))
        sizes = [f.stat().st_size for f in (folder / kind / "checkpoint" / "step-50").glob("*.distcp")]
        assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes)
    ours, wanted = (load_file(d / "thinned" / "draft" / "model.safetensors") for d in (folder, alone))
    assert ours.keys() == wanted.keys()
    assert all((ours[n].float() - wanted[n].float()).abs().max() < 2e-3 for n in wanted)


@pytest.mark.parametrize("kind", distributed.SPLIT)
def test_micro_batches_are_one_batch(kind, alone, tmp_path):
    """Five rows in three parts, whatever weighs them."""
    distributed.train(kind, tmp_path, stop_after=12, micro_batches=3)
    check(kind, log(tmp_path, kind), log(alone, kind)[:12])


def test_a_killed_process_costs_the_steps_since_the_checkpoint(alone, by_two, tmp_path):
    """kill -9 of one ends all; another number of processes goes on, and with shards one alone."""
    failed = torchrun(2, SCRIPT, tmp_path, KILLED, "dflash")
    assert failed.returncode != 0 and "SIGKILL" in failed.stderr
    saved = torch.load(tmp_path / "dflash" / "checkpoint.pt", weights_only=True)["step"]
    assert saved == 30 and not (tmp_path / "dflash" / "draft").exists()
    shutil.copytree(by_two / "shard" / "dflash", tmp_path / "shard" / "dflash")
    (saved,) = (tmp_path / "shard" / "dflash" / "checkpoint").glob("*/run.json")
    assert saved.parent.name in ("step-20", "step-30")  # the second may still be written
    shutil.copytree(tmp_path / "shard", tmp_path / "one")
    done = torchrun(3, SCRIPT, tmp_path, -1, "dflash", "dflash:shard")
    assert done.returncode == 0, done.stderr[-2000:]
    distributed.train("dflash", tmp_path / "one", shard=True)
    for folder in (tmp_path, tmp_path / "shard", tmp_path / "one"):
        check("dflash", log(folder, "dflash"), log(alone, "dflash"))
        assert len(log(folder, "dflash")) == distributed.STEPS
    for folder in (tmp_path / "shard", tmp_path / "one"):
        assert [d.name for d in (folder / "dflash" / "checkpoint").iterdir()] == ["step-50"]


def test_checkpoints_of_shards_that_cannot_be_gone_on_with(tmp_path):
    folder = tmp_path / "dflash" / "checkpoint" / "step-11"

    def train(**changes):
        distributed.train("dflash", tmp_path, stop_after=11, shard=True, **changes)

    train()
    assert [d.name for d in folder.parent.iterdir()] == ["step-11"]
    with pytest.raises(
        ValueError, match="checkpoint is of a run with shard=true, and this one has shard=false"
    ):
        distributed.train("dflash", tmp_path)
    (tmp_path / "dflash" / "checkpoint.pt").touch()
    with pytest.raises(ValueError, match=r"checkpoint.pt is of a run with shard=false"):
        train()
    (tmp_path / "dflash" / "checkpoint.pt").unlink()
    run = (folder / "run.json").read_text()
    for message, changes in (("other shapes", {"num_heads": 4}), ("this recipe has 7 steps", {"steps": 7})):
        with pytest.raises(ValueError, match=f"step-11 is of another run .*{message}"):
            train(**changes)
    for text in ("{", "[]", run.replace('"step": 11', '"step": 10'), run.replace("loss", "lost", 1)):
        (folder / "run.json").write_text(text)
        if "lost" not in text:
            with pytest.raises(ValueError, match="step-11 is not a whole training checkpoint"):
                train()
    (folder / "run.json").write_text(run)
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(ValueError, match="step-11 is not a whole training checkpoint"):
        train()


def test_every_process_needs_a_row(monkeypatch):
    assert ranks.own([3, 4]) == [[3, 4]]
    assert ranks.own([3, 4, 5], 2) == [[3, 5], [4]]
    monkeypatch.setattr(ranks, "size", lambda: 3)
    with pytest.raises(ValueError, match="rows 5: 3 processes train, each with 2 micro-batches of a row"):
        ranks.own([3, 4, 5, 6, 7], 2)
