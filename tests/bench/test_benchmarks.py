"""The scripts of benchmarks/ start, and their reports state where they were measured."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import draft_memory, draft_training
from outpace.api import load, load_draft
from outpace.cli.main import main
from outpace.formats.export import export_draft, open_target_files
from outpace.formats.load import describe_draft
from outpace.teacher.store import StoreError, TeacherCache
from outpace.train.data import pack
from outpace.train.dflash import block_states

STATED = {"commit", "date", "not_for_publication", "machine", "versions"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Four answers of the embedded model, with its states."""
    folder = tmp_path_factory.mktemp("answers")
    problems = ("problems", folder / "problems.jsonl", "--count", 4, "--seed", 8)
    settings = ("samples=4", "response_tokens=[40,40]")
    build = ("teacher", "build", "--prompts", problems[1], "--out", folder / "cache", "--final")
    for command in (problems, (*build, *(x for s in settings for x in ("--set", s)))):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr("sys.argv", ["outpace", *map(str, command)])
            main()
        assert ended.value.code == 0
    return folder / "cache"


@pytest.mark.parametrize("engine", draft_training.MAKERS)
def test_a_trainer_of_drafts_runs_and_its_draft_decodes(engine, answers, tmp_path):
    if engine != draft_training.OURS:
        pytest.importorskip(engine, reason=f"{engine} is not installed (make peers)", exc_type=ImportError)
    few = ("--anchors", "12", "--steps", "2", "--dtypes", "float32", "--problems", "1", "--threads", "1")
    both = dict.fromkeys((draft_training.OURS, engine))
    draft_training.main(["--cache", str(answers), "--out", str(tmp_path), "--engines", *both, *few])
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) >= STATED
    assert {"processor", "vector", "cores", "threads", "load_1min"} <= set(report["machine"])
    row = report["rows"][-1]
    assert row["engine"] == engine and row["tau"] >= 1 and row["tokens"] and not row["mismatched_tokens"]
    assert len(row["last_losses"]) == 2 and row["peak_gib"] > 0.2 and row["tokens_per_s"] > row["steps_per_s"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(["--steps", "1"], "one number for each of --anchors"), (["--cache", "none"], "none")],
)
def test_a_comparison_of_trainers_that_cannot_be(wrong, named, tmp_path, capsys):
    with pytest.raises((SystemExit, StoreError)) as ended:
        draft_training.main(["--out", str(tmp_path), "--engines", draft_training.OURS, *wrong])
    assert named in f"{ended.value}{capsys.readouterr().err}"


def test_a_trainer_that_dies_ends_the_comparison(answers, tmp_path):
    """For its process "dead" is no engine."""
    setting = draft_training.Setting(8, 1, "float32", 1, answers, tmp_path)
    with pytest.raises(RuntimeError, match="the process of dead has ended"):
        draft_training.compare(setting, ["dead"], load("default"), tmp_path, 1)


def test_a_dflash_of_speculators_is_ours(answers, tmp_path):
    """Its training forward on the weights that all trainers begin with, anchor by anchor."""
    reason = "speculators is not installed (make peers)"
    pytest.importorskip("speculators.models.dflash.core", reason=reason, exc_type=ImportError)
    model, cache = load("default"), TeacherCache.open(answers)
    draft_training.write_start(tmp_path, model, cache)
    setting = draft_training.Setting(400, 1, "float32", 1, answers, tmp_path)
    draft = load_draft(str(tmp_path / "zlab"), model).draft
    with torch.no_grad():  # projections into the residual stream begin at 0 and would hide the layers
        for name, weight in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    described, files = describe_draft(draft, torch.float32), open_target_files("default")
    export_draft(described, "speculators", tmp_path / "speculators", files)
    _, network = draft_training.by_speculators(setting, model)
    row = cache.sample(0)
    tokens, length = row.tokens[None], len(row.tokens)
    hidden, _, _, _, places = network._backbone_forward(
        row.aux.transpose(0, 1).flatten(1).float()[None],
        tokens,
        (torch.arange(length) >= row.prompt_length).float()[None],
        row.final.float()[None],
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=length - row.prompt_length - draft_training.BLOCK,
    )
    packed = pack([row], draft_training.BLOCK, length, None, [torch.Generator()])
    own = block_states(draft, model.target, packed, torch.float32)
    theirs = hidden[0].view(-1, draft_training.BLOCK, hidden.shape[-1])
    assert places[:: draft_training.BLOCK].tolist() == packed.layout.seen[: len(theirs)].tolist()
    torch.testing.assert_close(theirs, own[: len(theirs)], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(theirs[:, 1], theirs[:1, 1].expand_as(theirs[:, 1]), atol=0.1)


def test_the_memory_of_a_training_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    sizes = {"hidden_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    small = replace(draft_memory.CONFIG, **sizes, intermediate_size=20, vocab_size=90, mask_token_id=2)
    values = draft_memory.measure(small, anchors=3, length=19)
    assert values["blocks"] == [3, 7] and values["loss"] > 1
    marks = list(values["peak_rss_gib"].values())
    assert marks == sorted(marks)
    monkeypatch.setattr(draft_memory, "measure", lambda optimizer: {"optimizer": optimizer})
    draft_memory.main(["--no-optimizer", "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) >= STATED and report["memory"] == {"optimizer": False}
