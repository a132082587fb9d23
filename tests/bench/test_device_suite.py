"""The suite device: a page of guarantees and speeds of the device that is there; faults show as such."""

import json
import re

import pytest
import torch
from test_cli import run

import outpace
from outpace.bench import device as suite
from outpace.bench.device import ABSENT, FAIL, PASS, Device, DeviceSettings, checks_of
from outpace.drafts.lookup import NGram
from outpace.models.cuda_graphs import GraphStep, GraphTarget

FEW = DeviceSettings(concurrency=(1, 2), prompt_tokens=64, new_tokens=8, widest=3)
OPTIONS = ("concurrency=1,2", "prompt_tokens=64", "new_tokens=8", "widest=3")


def test_a_cpu_runs_its_part_and_prints_one_page(monkeypatch, capsys, tmp_path):
    pairs = [word for option in OPTIONS for word in ("--set", option)]
    command = ("bench", "--suite", "device", "--out", tmp_path, "--device", "cpu", *pairs)
    code, out, _ = run(monkeypatch, capsys, *command)
    report = json.loads((tmp_path / "report.json").read_text())
    results = {row["check"]: row["result"] for row in report["guarantees"]}
    assert code == 0 and list(results.values()).count(PASS) == 8 and FAIL not in results.values()
    assert results["steps are CUDA graphs"] == results["memory is within the plan"] == ABSENT
    cells = [(row["concurrency"], row["method"]) for row in report["speeds"]]
    methods = ("plain", "ngram", "dflash", "tree of dflash")
    assert cells == [(n, method) for n in (1, 2) for method in methods]
    assert all(row["tokens_per_s"] > 0 and row["tau"] >= 1 for row in report["speeds"])
    assert "| steps are CUDA graphs | not on this device |" in out and "## Speed" in out
    code, again, _ = run(monkeypatch, capsys, *command, "--json")
    assert code == 0 and json.loads(again)["device"] == "cpu"


def test_other_suites_have_no_device(monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "bench", "--out", tmp_path, "--device", "cpu")
    assert code == 2 and "--device and --deterministic are for --suite device, not speed" in " ".join(
        err.split()
    )


def test_faults_of_steps_are_fails(monkeypatch):
    model = outpace.load()
    prompts = [model.tokenizer.encode("import os\nimport sys\n").ids]
    device = Device(name="cuda", target=GraphTarget(model.target), drafts={"ngram": NGram(block_size=4)})
    checks = checks_of(device, prompts, FEW)
    assert checks["steps are CUDA graphs"]() == "none was captured"
    assert checks["packed experts are those of a CPU"]() == ""
    turns, known = [], suite.run_experts
    monkeypatch.setattr(suite, "run_experts", lambda *a: turns.append(1) or known(*a) * len(turns))
    assert re.fullmatch(r"\d+% off", checks["packed experts are those of a CPU"]())
    run_step = GraphStep.run

    def wrong(self, tokens, step, rows):
        out = run_step(self, tokens, step, rows)
        return out._replace(hidden=out.hidden + tokens.shape[1] - 1, logits=-out.logits, best=out.best - 1)

    monkeypatch.setattr(GraphStep, "run", wrong)
    rows = checks["rows of a pass of 1 to 3 tokens are one-token steps"]()
    assert rows.startswith("a chain of 2, a tree of 2")
    for kind in ("one sequence", "a draft's chain", "several sequences"):
        assert (
            checks[f"captured steps write the modules' tokens, {kind}"]() == "other tokens in the first turn"
        )
    assert checks["captured steps write the modules' tokens, a draft's tree"]() is None
    assert suite._checked(lambda: None)["result"] == ABSENT
    assert suite._checked(lambda: "why") == {"result": FAIL, "detail": "why"}


def test_memory_beyond_the_plan_is_a_fail(monkeypatch):
    model = outpace.load()
    plan = suite.MemoryPlan(weights=3, kv=2, step=1, sequences=1, length=2)
    device = Device(name="cuda", target=GraphTarget(model.target), drafts={}, plan=plan)
    for taken, passes in ((plan.total, True), (plan.total + 1, False)):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, taken=taken: taken)
        assert (suite._memory(device) == "") == passes


@pytest.mark.parametrize(
    "wrong", [{"concurrency": (0,)}, {"concurrency": ()}, {"widest": 33}, {"new_tokens": 1}]
)
def test_settings_that_measure_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="device: "):
        DeviceSettings(**wrong)
