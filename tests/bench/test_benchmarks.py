"""The scripts of benchmarks/ start, and their reports state where they were measured."""

import json

import torch

from benchmarks import dflash_train


def test_the_training_comparison_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    path = tmp_path / "report.json"
    dflash_train.main(["--anchors", "3", "--repeats", "1", "--json", str(path)])
    report = json.loads(path.read_text())
    assert {"commit", "date", "not_for_publication", "machine", "versions"} <= set(report)
    assert {"processor", "vector", "cores", "threads", "load_1min"} <= set(report["machine"])
    for result in report["results"]:  # both steps compute the same loss
        ours, plain = (result[kind]["losses"] for kind in ("ours", "plain"))
        assert ours[0] > 1 and abs(ours[0] - plain[0]) < 1e-3
    assert [r["dtype"] for r in report["results"]] == ["float32", "bfloat16"]
