"""Every writing command, killed before its file operations, leaves the old result or the new one."""

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import draft_samples
import pytest
import test_build as teacher_builds
import test_dflash_training as dflash_training
import test_eagle3_training as eagle3_training
import test_retrofit_training as retrofits
import tiny
import torch
from dflash_drafts import random_dflash
from kill_points import contents, kill_points, killed_before
from taught import TOKENIZER, TrainedSetup

from outpace.bench import run as bench_run
from outpace.bench.machine import machine, provenance
from outpace.checkpoint.strict_json import read_object
from outpace.cli.measure import bench
from outpace.drafts.lookup import load_suffix
from outpace.formats.convert import convert_target, write_folder
from outpace.formats.export import export_draft
from outpace.formats.load import load_draft, save_draft
from outpace.models.load import load_target
from outpace.retrofit.dsa import DsaSettings
from outpace.retrofit.mla import MlaSettings
from outpace.retrofit.pipeline import retrofit
from outpace.teacher.store import TeacherCache
from outpace.text.corpus import Document, read_corpus, split
from outpace.train import suffix
from outpace.train.dflash import train_dflash
from outpace.train.eagle3 import train_eagle3
from outpace.train.suffix import build_suffix

POINTS = 6  # of one command
TIMED = ("training_hours", "log.jsonl", "checkpoint.pt")


def sweep(tmp_path, run, check, most=POINTS, before=None):
    """run(folder) writes; `before` prepares the folder; check(folder, done) asserts on what is there."""
    folders = iter(tmp_path / str(n) for n in range(1000))

    def begun():
        folder = next(folders)
        if before is not None:
            before(folder)
        return folder

    whole = begun()
    points = kill_points(lambda: run(whole), most)
    check(whole, True)
    outcomes = set()
    for k in points:
        folder = begun()
        assert killed_before(lambda: run(folder), k)  # noqa: B023 - called at once
        outcomes.add(check(folder, False))
        run(folder)
        check(folder, True)
        assert not list(folder.rglob("*.tmp")), "what the killed run left is still there"
        shutil.rmtree(folder)
    return whole, outcomes


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_training_of_a_draft(kind, tmp_path):
    target, module = tiny.target("gpt_oss"), dflash_training if kind == "dflash" else eagle3_training
    cache = TrainedSetup(target, [tiny.tokens(n, seed=n) for n in (31, 17)], module.LAYERS)
    train = train_dflash if kind == "dflash" else train_eagle3
    recipe = replace(module.RECIPE, rows=1, steps=3, save_every=1, eval_every=9)
    weights = {}

    def run(folder):
        train(recipe, target, TOKENIZER, cache, [], folder)

    def check(folder, done):
        if not (folder / "draft").exists():
            assert not done
            return "none"
        values = dict(load_draft(folder / "draft").named_parameters())
        assert read_object(folder / "draft" / "provenance.json")["steps"] == 3
        assert all(torch.equal(weights.setdefault(name, p), p) for name, p in values.items())
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 2]
        return "whole"

    assert sweep(tmp_path, run, check)[1] == {"none", "whole"}


world = retrofits.world  # a fixture


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_training_of_a_retrofit(kind, world, tmp_path):
    recipe = replace(retrofits.MLA if kind == "mla" else retrofits.DSA, steps=2, save_every=1)
    reports = {}

    def run(folder):
        retrofits.trained(kind, world, folder, recipe)

    def check(folder, done):
        if not (folder / "model").exists():
            assert not done
            return "none"
        load_target(folder / "model")
        report = read_object(folder / "model" / f"{kind}.json")["held_out"]
        assert reports.setdefault("held_out", report) == report
        files = contents(folder / "model")
        del files[f"{kind}.json"]  # it has the hours
        assert reports.setdefault("files", files) == files
        return "whole"

    assert sweep(tmp_path, run, check)[1] == {"none", "whole"}


@pytest.fixture(scope="module")
def shelf(world, tmp_path_factory):
    """A target of random weights as a folder, and files of text, some of them held out."""
    model, tokenizer, _, _ = world
    folder = tmp_path_factory.mktemp("shelf")
    write_folder(model, folder / "target", tokenizer, None)
    (folder / "text").mkdir()
    names = [Document(f"t{n}.py", "") for n in range(1000)]
    train, held_out = split(names)
    for n, document in enumerate(train[:12] + held_out[:6]):
        text = "".join(f"def f_{n}_{i}(x, y):\n    return x * {i} + y - {n}\n\n" for i in range(60))
        (folder / "text" / document.name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_a_retrofit_without_training(kind, shelf, tmp_path):
    small = {"rows": 2, "row_tokens": 48}
    settings = MlaSettings(**small) if kind == "mla" else DsaSettings(**small, min_context=0)
    documents, files = read_corpus(shelf / "text"), {}

    def run(folder):
        if not (folder / "out").exists():  # it is refused over another result
            retrofit(str(shelf / "target"), settings, documents, folder / "out")

    def check(folder, done):
        if not (folder / "out").exists():
            assert not done
            return "none"
        load_target(folder / "out")
        assert files.setdefault("all", contents(folder / "out")) == contents(folder / "out")
        return "whole"

    assert sweep(tmp_path, run, check, most=5)[1] == {"none", "whole"}


def test_a_suffix_index_over_another(tmp_path, monkeypatch):
    monkeypatch.setattr(suffix, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # the report says hours
    recipe = replace(teacher_builds.RECIPE, samples=3, position_offsets=(0,))
    cache, target = teacher_builds.make(tmp_path / "cache", recipe), tiny.target("gpt_oss")

    def write(count, out):
        build_suffix(target, cache, out, count)
        load_suffix(out / "draft", target.config.vocab_size)

    assert old_or_new(tmp_path, partial(write, 1), partial(write, None)) == {"old", "new"}


def test_a_benchmark_over_another(shelf, tmp_path, monkeypatch):
    """Every file of a report is the old or the new one, and until all are new the measurements are kept."""
    monkeypatch.setattr(bench_run, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    for name, fixed in (("machine", machine(torch.device("cpu"))), ("provenance", provenance())):
        monkeypatch.setattr(bench_run, name, lambda *_, fixed=fixed: fixed)
    settings = ["length=512", "needles=2", "near=128", "distances=[40]", "batch=2", "chunk=256"]

    def write(texts, folder):
        where = {"target": str(shelf / "target"), "corpus": shelf / "text", "out": folder / "report"}
        bench(suite="recall", set_=[*settings, f"texts={texts}"], **where)

    write(2, tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    write(3, tmp_path / "new")
    old, new = (contents(tmp_path / name / "report") for name in ("old", "new"))
    assert set(old) == set(new) == {"report.json", "report.md", "recall.png"}
    assert all(old[name] != new[name] for name in old)

    def check(folder, done):
        files = contents(folder / "report")
        kept = files.pop("progress.jsonl", None)
        assert all(files[name] in (old[name], new[name]) for name in old) and set(files) == set(old)
        assert (files == new and kept is None) or not done
        assert kept is not None or files in (old, new)
        return ("new" if files == new else "old" if files == old else "part", kept is not None)

    before = lambda folder: shutil.copytree(tmp_path / "old", folder)  # noqa: E731
    outcomes = sweep(tmp_path, partial(write, 3), check, most=20, before=before)[1]
    assert outcomes == {("old", True), ("part", True), ("new", True), ("new", False)}


def test_building_a_teacher_cache(tmp_path):
    recipe = replace(teacher_builds.RECIPE, samples=3, shard_samples=3, position_offsets=(0,))
    files = {}

    def run(folder):
        teacher_builds.make(folder, replace(recipe, shard_samples=1))

    def check(folder, done):
        if not (folder / "meta.json").exists():
            assert not done
            return "none"
        cache = TeacherCache.open(folder, unfinished=not done)
        if len(cache):
            cache.verify()  # whatever is recorded is whole
        if done:
            assert files.setdefault("all", contents(folder)) == contents(folder)
        return "whole" if cache.meta.complete else "part"

    assert "part" in sweep(tmp_path, run, check)[1]


def old_or_new(tmp_path, write_old, write_new, most=POINTS):
    """Both results as a whole folder; the output folder has the name `model` in each run's folder."""

    def place(folder):
        return folder / "model"

    (tmp_path / "samples").mkdir()
    write_old(tmp_path / "samples" / "old")
    shutil.copytree(tmp_path / "samples" / "old", tmp_path / "samples" / "new")
    write_new(tmp_path / "samples" / "new")
    old, new = (contents(tmp_path / "samples" / name) for name in ("old", "new"))
    assert old != new

    def check(folder, done):
        actual = contents(place(folder))
        assert actual == new or (actual == old and not done)
        return "new" if actual == new else "old"

    before = lambda folder: shutil.copytree(tmp_path / "samples" / "old", place(folder))  # noqa: E731
    return sweep(tmp_path, lambda folder: write_new(place(folder)), check, most, before)[1]


def test_converting_over_a_folder(tmp_path):
    outcomes = old_or_new(
        tmp_path,
        lambda out: convert_target("default", out, "bf16"),
        lambda out: convert_target("default", out, "f32", overwrite=True),
    )
    assert outcomes == {"old", "new"}


def test_converting_over_a_file(tmp_path):
    def write(kind, out):
        out.mkdir(exist_ok=True)
        convert_target("default", out / "it.gguf", kind, overwrite=True)

    assert "old" in old_or_new(tmp_path, partial(write, "bf16"), partial(write, "f32"))


def test_saving_a_draft_over_another(tmp_path):
    drafts = [random_dflash(tiny.target("qwen3"), seed) for seed in (1, 2)]
    outcomes = old_or_new(
        tmp_path, lambda out: save_draft(drafts[0], out), lambda out: save_draft(drafts[1], out)
    )
    assert outcomes == {"old", "new"}


def test_exporting_a_draft_over_another(tmp_path):
    draft = draft_samples.dflash(torch.bfloat16)
    outcomes = old_or_new(
        tmp_path,
        lambda out: export_draft(draft, "zlab", out),
        lambda out: export_draft(draft, "zlab", out, dtype=torch.float32),
    )
    assert outcomes == {"old", "new"}
