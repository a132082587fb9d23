"""Drafts side by side on a tiny target: what runs, what is counted, what is refused, what survives a stop."""

import io
import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from dflash_drafts import random_dflash
from rich.console import Console
from test_prompts import document

from outpace.bench import comparison, methods
from outpace.bench.comparison import (
    COMPARISON_PAGE,
    CONTROLLER_PAGE,
    LOSSLESS_PAGE,
    remarks,
    run_comparison,
    run_controller,
    run_lossless,
    share_accepting,
)
from outpace.bench.methods import Case, MethodSpec, load_method
from outpace.bench.run import Results, Timed, interleave, seed_for
from outpace.bench.suite import SuiteRecipe, SuiteRequest, prompts_of
from outpace.checkpoint.save import write_json
from outpace.config import load_settings
from outpace.decode.generate import generate
from outpace.decode.trace import Prediction, Trace
from outpace.drafts.eagle3 import Eagle3, Eagle3Config
from outpace.formats.load import save_draft
from outpace.models.load import build, fingerprint, named_tensors
from outpace.text.tokenizer import train_bpe

pytestmark = pytest.mark.usefixtures("few_repeats_in_module")
DOCUMENTS = [document(name, 80) for name in "abc"]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"draft": "ngram", "rules": ["match", "gumbel"]},
    "DFlash": {"draft": "dflash", "controller": [False]},
    "DFlash tree": {"draft": "dflash", "num_draft_tokens": 9, "rules": ["match", "gumbel"]},
    "EAGLE-3": {"draft": "eagle3", "num_steps": 3, "rules": ["rejection"]},
    "EAGLE-3 tree": {
        "draft": "eagle3",
        "num_steps": 2,
        "topk": 3,
        "num_draft_tokens": 7,
        "controller": [False],
    },
    "P-EAGLE": {"draft": "p-eagle", "num_steps": 3, "rules": ["gumbel"], "controller": [False]},
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([d.text for d in DOCUMENTS], 300)


@pytest.fixture(scope="module")
def target():
    model = build(tiny.config("gpt_oss", vocab_size=300))
    tiny.randomise(named_tensors(model))
    return model.eval()


def eagle3(c, **changes):
    config = Eagle3Config(
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=44,
        vocab_size=c.vocab_size,
        draft_vocab_size=c.vocab_size,
        rope=c.rope,
        rms_norm_eps=1e-5,
        layer_ids=(0, 1, 3),
        **changes,
    )
    return Eagle3(config).eval()


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, target):
    """A folder of three drafts, with provenance: one cache, one budget."""
    folder, c = tmp_path_factory.mktemp("drafts"), target.config
    made = {
        "dflash": random_dflash(target),
        "eagle3": eagle3(c),
        "p-eagle": eagle3(c, parallel=True, mask_token_id=2),
    }
    for seed, (name, draft) in enumerate(made.items()):
        tiny.randomise(named_tensors(draft), seed=seed + 5)
        save_draft(draft, folder / name)
        values = {"target_fingerprint": fingerprint(target), "training_tokens": 7000, "training_hours": 0.5}
        write_json(folder / name / "provenance.json", values | {"steps": 3, "cache_sha256": "c" * 64})
    return folder


def recipe(**changes):
    values = {"prompts": 2, "prompt_tokens": 21, "new_tokens": 10, "repeats": 2, "lossless_prompts": 4}
    values |= {"lossless_tokens": 12, "lossless_batch": 2, "calibrate_s": 0.01, "widths": [2, 4]}
    values |= {"controller_prompts": 2}
    return load_settings(SuiteRecipe, None, values | {"methods": METHODS} | changes)


def quiet():
    return Console(file=io.StringIO(), width=80)


def request_for(target, tokenizer, drafts, folder, recipe):
    return SuiteRequest(
        target=target,
        tokenizer=tokenizer,
        documents=DOCUMENTS,
        recipe=recipe,
        drafts=drafts,
        calibration_text=tiny.tokens(200).tolist(),
        folder=folder,
        console=quiet(),
    )


@pytest.fixture(scope="module")
def report(target, tokenizer, drafts, tmp_path_factory):
    return run_comparison(request_for(target, tokenizer, drafts, tmp_path_factory.mktemp("out"), recipe()))


def test_every_method_runs_at_every_temperature_under_its_rules(report):
    entries = [(r["method"], r["temperature"], r["rule"], r["controller"]) for r in report["results"]]
    wanted = [("plain", 0.0, "match", False)]
    both = (False, True)
    wanted += [(m, 0.0, "match", c) for m in METHODS for c in METHODS[m].get("controller", both)]
    wanted += [("plain", 1.0, rule, False) for rule in ("match", "gumbel")]
    for name, value in METHODS.items():
        for rule in value.get("rules", ["match", "rejection", "gumbel"]):
            wanted += [(name, 1.0, rule, c) for c in value.get("controller", both)]
    assert entries == wanted
    assert len({r["label"] for r in report["results"]}) == len(entries)
    for r in report["results"]:
        assert (r["prompts"], r["repeats"], r["new_tokens"]) == (2, 2, 10)
        assert (r["predicted"] is not None) == r["controller"]
        if r["controller"]:
            value = r["predicted"]
            assert value["speedup_error"] == pytest.approx(
                value["speedup"] / r["speedup"] - 1, rel=0.01, abs=1e-3
            )
        assert r["tau"] == pytest.approx(1 + sum(r["reached"]), abs=1e-3)
        assert r["columns"] >= 1
    assert json.loads(json.dumps(report)) == report
    assert report["remarks"] == []
    rules = {
        m: ["greedy", *value.get("rules", ["match", "rejection", "gumbel"])] for m, value in METHODS.items()
    }
    steered = [m for m in METHODS if True in METHODS[m].get("controller", both)]
    assert set(report["costs"]) == {f"{m}, {rule}" for m in steered for rule in rules[m]}


def test_texts_are_plain_decodings_where_they_must_be(report):
    for r in report["results"]:
        lossless = r["lossless"]
        assert lossless["violations"] == lossless["ties"] == 0
        if r["temperature"] == 0:
            assert lossless["checked"] == 2 * 10
        elif r["rule"] == "gumbel":
            assert lossless["checked"] == 2 * 2 * 10  # every repeat has its own seed
        else:
            assert lossless["checked"] == 0


def test_shapes_are_the_ones_settings_for(report):
    assert {name: about["columns"] for name, about in report["methods"].items()} == {
        "ngram": 8,
        "DFlash": 5,
        "DFlash tree": 9,
        "EAGLE-3": 4,
        "EAGLE-3 tree": 7,
        "P-EAGLE": 4,
    }
    kinds = [about["kind"] for about in report["methods"].values()]
    assert kinds == ["n-gram", "DFlash", "DFlash", "EAGLE-3", "EAGLE-3", "P-EAGLE"]
    assert report["methods"]["DFlash tree"]["trained"]["tokens"] == 7000
    assert report["methods"]["DFlash"]["parameters"] > 0 == report["methods"]["ngram"]["parameters"]
    tree = next(r for r in report["results"] if r["method"] == "DFlash tree" and not r["controller"])
    assert tree["columns"] == 9


def test_files_read_well(report, tmp_path):
    COMPARISON_PAGE.write(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    text = (tmp_path / "report.md").read_text()
    assert "| EAGLE-3 tree | gumbel |" in text and "0 / 40" in text
    assert "| DFlash | DFlash | 5 |" in text and "7,000 | 0.50 |" in text
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    for name in ("speedup.png", "tau.png", "time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_method_that_changes_the_text_is_caught(target, tokenizer, drafts, tmp_path, monkeypatch):
    honest = generate

    def wrong(target, prompts, request, draft=None, **kwargs):
        out = honest(target, prompts, request, draft, **kwargs)
        if draft is not None and len(out.tokens[0]) > 8:  # not a rehearsal
            out.tokens[0][9] = (out.tokens[0][9] + 1) % 300
        return out

    monkeypatch.setattr(methods, "generate", wrong)
    settings = recipe(methods={"DFlash": {"draft": "dflash", "controller": [False]}})
    comparison = run_comparison(request_for(target, tokenizer, drafts, tmp_path, settings))
    counts = {
        (r["temperature"], r["rule"]): r["lossless"] for r in comparison["results"] if r["method"] != "plain"
    }
    assert counts[0.0, "match"]["violations"] == 2 and counts[0.0, "match"]["checked"] == 2 * 10
    assert counts[1.0, "gumbel"]["violations"] == 4
    total = run_lossless(request_for(target, tokenizer, drafts, tmp_path / "lossless", settings))
    assert total["violations"] == 2 * 2  # of two batches the first row, greedy and coupled
    assert "4 violations" in LOSSLESS_PAGE.markdown(total)


def test_the_lossless_suite_counts_every_method_twice(target, tokenizer, drafts, tmp_path):
    result = run_lossless(request_for(target, tokenizer, drafts, tmp_path, recipe()))
    assert (result["violations"], result["ties"], result["prompts"]) == (0, 0, 4)
    cases = [(r["method"], r["temperature"], r["steered"]) for r in result["results"]]
    assert len(cases) == len(set(cases)) == 2 * (3 * 2 + 3)
    assert all(r["checked"] == 4 * 12 for r in result["results"])
    assert result["checked"] == 18 * 4 * 12
    assert "0 violations, 0 ties" in LOSSLESS_PAGE.markdown(result)
    points = [(p["batch"], p["context"]) for costs in result["costs"].values() for p in costs["points"]]
    assert len(points) == len(result["costs"]) and {batch for batch, _ in points} == {2}
    assert (tmp_path / "progress.jsonl").exists()  # until the report is written
    LOSSLESS_PAGE.write(result, tmp_path)
    assert not (tmp_path / "progress.jsonl").exists()


def test_the_controller_is_compared_with_every_length(target, tokenizer, drafts, tmp_path):
    few = {name: METHODS[name] for name in ("ngram", "DFlash tree", "P-EAGLE")}
    settings = recipe(methods=few, repeats=1)
    controller = run_controller(request_for(target, tokenizer, drafts, tmp_path, settings))
    scenes = [(r["text"], r["temperature"], r["method"]) for r in controller["results"]]
    two = ("ngram", "DFlash tree")
    assert scenes == [(x, t, m) for x in ("held-out", "random") for t in (0.0, 1.0) for m in two]
    for r in controller["results"]:
        assert [f["width"] for f in r["fixed"]] == ([2, 4, 8] if r["method"] == "ngram" else [2, 4, 9])
        speeds = {f["width"]: f["tokens_per_s"] for f in r["fixed"]} | {1: r["plain_tokens_per_s"]}
        assert r["best_tokens_per_s"] == max(speeds.values()) == speeds[r["best_width"]]
        steered = r["controller"]["tokens_per_s"]
        assert r["over_best"] == pytest.approx(steered / r["best_tokens_per_s"], abs=2e-3)
        assert r["over_plain"] == pytest.approx(steered / r["plain_tokens_per_s"], abs=2e-3)
        assert all(f["lossless"]["checked"] == 2 * 10 for f in (*r["fixed"], r["controller"]))
        assert not any(f["lossless"]["violations"] for f in (*r["fixed"], r["controller"]))
    assert "| random | 1 | DFlash tree |" in CONTROLLER_PAGE.markdown(controller)
    alone = recipe(methods={"P-EAGLE": METHODS["P-EAGLE"]})
    with pytest.raises(ValueError, match="no method of this recipe has a controller"):
        run_controller(request_for(target, tokenizer, drafts, tmp_path, alone))


def test_random_text_is_random_and_holds_no_end(target, tokenizer):
    request = request_for(target, tokenizer, None, None, recipe(prompt_tokens=50))
    drawn = prompts_of("random", 40, request)
    assert drawn == prompts_of("random", 40, request)
    assert {len(p) for p in drawn} == {50} and len(set(map(tuple, drawn))) == 40
    used = {t for p in drawn for t in p}
    assert len(used) > 250 and not used & set(target.config.eos_token_ids)


def fake(seconds):
    trace = Trace([[2, 2]], [[1, -1]], [[3, 3]])
    trace.predicted.append(Prediction(2.5, 0.25, 2, 0.5))
    return lambda prompts, new_tokens, seed: Timed(
        tokens=[[seed % 97, new_tokens]], first_s=0.1, decode_s=seconds, trace=trace
    )


def test_turns_are_kept_and_not_run_again(tmp_path):
    ran = []
    named = {name: fake(i + 1.0) for i, name in enumerate("abc")}
    groups, schedule = [[[1]], [[2]]], SimpleNamespace(repeats=2, seed=5)
    first = interleave("x", named, groups, 9, schedule, Results(tmp_path, {"of": 1}), ran.append)
    assert ran == [*"abc", *"bca", *"bca", *"cab"]
    assert first["b"][1, 0].tokens == [[seed_for(5, 1, 0) % 97, 9]]
    again = interleave(
        "x", dict.fromkeys("abc"), groups, 9, schedule, Results(tmp_path, {"of": 1}), ran.append
    )
    assert again == first
    assert again["c"][0, 1].trace.predicted == [Prediction(2.5, 0.25, 2, 0.5)]
    with pytest.raises(TypeError):  # another key: nothing is kept, and None is no method
        interleave("x", dict.fromkeys("abc"), groups, 9, schedule, Results(tmp_path, {"of": 2}), ran.append)


def test_a_stopped_comparison_goes_on(target, tokenizer, drafts, tmp_path, monkeypatch):
    settings = recipe(methods={"ngram": METHODS["ngram"]})
    honest, ran = comparison.interleave, []

    def stopping(name, *rest):
        ran.append(name)
        if len(ran) == 2:
            raise RuntimeError("the power failed")
        return honest(name, *rest)

    monkeypatch.setattr(comparison, "interleave", stopping)
    with pytest.raises(RuntimeError, match="the power failed"):
        run_comparison(request_for(target, tokenizer, drafts, tmp_path, settings))
    kept = dict(x for line in read_lines(tmp_path)[1:] for x in line.items())
    assert len(kept) == 7 and sum(key.startswith("T=0, ") for key in kept) == 4
    assert kept["costs of ngram, greedy"]["widths"] == [1, 2, 3, 4, 5, 6, 7, 8]
    result = run_comparison(request_for(target, tokenizer, drafts, tmp_path, settings))
    ours = [
        kept[f"T=0, repeat {r}, group {g}"]["plain, T=0, match"]["decode_s"] for r in (0, 1) for g in (0, 1)
    ]
    speeds = [18 / (ours[0] + ours[1]), 18 / (ours[2] + ours[3])]
    assert result["results"][0]["tokens_per_s_repeats"] == [round(s, 2) for s in speeds]
    COMPARISON_PAGE.write(result, tmp_path)
    assert not (tmp_path / "progress.jsonl").exists()


def read_lines(folder):
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def test_results_survive_a_kill(tmp_path):
    results = Results(tmp_path, {"of": (1, 2)})
    assert results.values == {} and not (tmp_path / "progress.jsonl").exists()
    results["a"], results["b"] = [1, None], {"x": 2.5}
    with (tmp_path / "progress.jsonl").open("ab") as file:
        file.write(b'{"c":[1,2')  # killed while it wrote
    again = Results(tmp_path, {"of": [1, 2]})
    assert again.values == {"a": [1, None], "b": {"x": 2.5}}
    assert "c" not in again
    again["d"] = 4
    assert read_lines(tmp_path) == [{"key": {"of": [1, 2]}}, {"a": [1, None]}, {"b": {"x": 2.5}}, {"d": 4}]
    other = Results(tmp_path, {"of": 3})
    assert other.values == {}
    other["e"] = 5
    assert read_lines(tmp_path) == [{"key": {"of": 3}}, {"e": 5}]


def test_share_accepting_counts_all_steps():
    assert share_accepting([0, 3, 1, 0]) == [0.5, 0.25, 0.25]
    assert share_accepting([0, 0]) == [] == share_accepting([])


def test_unequal_data_is_reported():
    def about(tokens, cache):
        return {"kind": "DFlash", "trained": {"tokens": tokens, "cache_sha256": cache}}

    assert remarks({"a": about(5, "x"), "b": about(5, "x"), "n": {"kind": "n-gram", "trained": None}}) == []
    value = remarks({"a": about(5, "x"), "b": about(6, "y"), "c": {"kind": "DFlash", "trained": None}})
    assert len(value) == 3
    assert "no provenance next to the draft of c" in value[0]
    assert "teacher caches differ (a: x, b: y)" in value[1] and "tokens differ (a: 5, b: 6)" in value[2]
    looked_up = about(None, "x") | {"kind": "suffix"}
    assert remarks({"a": about(5, "x"), "s": looked_up}) == []  # it is made without steps
    assert "tokens differ (a: 5, b: None)" in remarks({"a": about(5, "x"), "b": about(None, "x")})[0]
    other = remarks({"a": about(5, "x"), "s": about(None, None) | {"kind": "suffix"}})
    assert "teacher caches differ (a: x, s: None)" in other[0]


def loaded(target, tokenizer, drafts, **message):
    return load_method("M", MethodSpec(**message), drafts, target, tokenizer, fingerprint(target))


def test_a_draft_has_learnt_what_the_drafts_it_began_from_have(target, tokenizer, drafts, tmp_path):
    shutil.copytree(drafts / "dflash", tmp_path / "dflash")
    file = tmp_path / "dflash" / "provenance.json"
    last = json.loads(file.read_text()) | {"training_tokens": 7000, "training_hours": 0.1, "steps": 30}
    first = {"training_tokens": 500, "training_hours": 0.02, "steps": 7, "cache_sha256": "of another"}
    file.write_text(json.dumps(last | {"started_from": {"steps": 2, "started_from": first}}))
    trained = loaded(target, tokenizer, tmp_path, draft="dflash").describe()["trained"]
    assert (trained["tokens"], trained["hours"], trained["steps"]) == (7500, 0.12, 39)
    assert trained["cache_sha256"] == last["cache_sha256"] != "of another"


def test_a_draft_of_another_target_is_refused(target, tokenizer, drafts):
    other = tiny.target("llama")
    with pytest.raises(ValueError, match=r"method 'M': .*dflash was trained for another target"):
        spec = MethodSpec(draft="dflash")
        load_method("M", spec, drafts, other, tokenizer, fingerprint(other))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"draft": "nowhere"}, "nowhere is not there"),
        ({"draft": "ngram", "num_draft_tokens": 8}, "method 'M': num_draft_tokens 8: 'ngram'"),
        ({"draft": "dflash", "num_steps": 3}, "method 'M': num_steps 3: .*dflash"),
        ({"draft": "dflash", "topk": 3}, "method 'M': topk 3: "),
        ({"draft": "dflash", "num_draft_tokens": 1}, "method 'M': a tree of 1 nodes"),
        ({"draft": "eagle3", "topk": 3}, "method 'M': topk 3 grows a tree: give num_draft_tokens"),
    ],
)
def test_shapes_a_draft_cannot_propose_are_refused(target, tokenizer, drafts, text, message):
    with pytest.raises(ValueError, match=message):
        loaded(target, tokenizer, drafts, **text)


def test_a_width_the_draft_does_not_have_is_refused(target, tokenizer, drafts):
    method = loaded(target, tokenizer, drafts, draft="dflash")
    case = Case(method="M", temperature=0.0, rule="match", width=6)
    with pytest.raises(ValueError, match="width 6: M proposes at most 5 positions"):
        methods.run_case(case, target, method.draft)
