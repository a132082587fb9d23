"""A whole bench on a tiny target: the shape of the report, what its figures mean, and what it must notice."""

import io
import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from dflash_drafts import random_dflash
from rich.console import Console
from test_prompts import document

from outpace.bench import methods as ours
from outpace.bench import metrics, speed
from outpace.bench.metrics import LosslessCheck, compare, is_tie
from outpace.bench.run import Results, Timed, interleave
from outpace.bench.speed import PAGE, BenchSettings, lengths, print_report
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.decode.trace import Trace
from outpace.loading import open_target
from outpace.models.load import build, named_tensors
from outpace.tasks.prompts import problem_prompts
from outpace.text.harmony import HarmonyTokens
from outpace.text.tokenizer import train_bpe

DOCUMENTS = [document(name, 80) for name in "abc"]
OURS = ("plain", "ngram", "dflash")


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([d.text for d in DOCUMENTS], 300)


@pytest.fixture(scope="module")
def target():
    model = build(tiny.config("gpt_oss", vocab_size=300))
    tiny.randomise(named_tensors(model))
    return model.eval()


@pytest.fixture(scope="module")
def draft(target):
    return random_dflash(target)


def quiet():
    return Console(file=io.StringIO(), width=80)


def measure(target, draft, tokenizer, documents, settings, console):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        report = speed.run_bench(target, draft, tokenizer, documents, settings, place, console)
        assert [file.name for file in place.iterdir()] == ["progress.jsonl"]  # removed by `Page.write`
    return report


def tiny_settings(**changes):
    values = {"methods": OURS, "regimes": ("11+19",), "batches": (1, 2), "repeats": 2, "prompts": 4}
    return BenchSettings(**values | changes)


@pytest.fixture(scope="module")
def report(target, draft, tokenizer):
    return measure(target, draft, tokenizer, DOCUMENTS, tiny_settings(), quiet())


def test_the_report_has_the_promised_shape(report):
    assert {"machine", "versions", "target", "results"} <= set(report)
    assert {"torch", "python"} <= set(report["versions"])
    assert len(report["target"]["fingerprint"]) == 64
    assert [(r["method"], r["batch"]) for r in report["results"]] == [(m, b) for b in (1, 2) for m in OURS]
    for r in report["results"]:
        assert set(r) >= {"method", "regime", "batch", "temperature", "tokens_per_s", "speedup", "tau"}
        assert set(r) >= {"accept_len", "accept_rate", "accept_by_position", "time", "lossless"}
        assert set(r["accept_len"]) == {"mean", "p50", "p90"}
        assert set(r["time"]) == {"draft", "verify", "rest"}
        assert set(r["lossless"]) >= {"checked", "violations", "ties"}
        assert r["prompts"] == 4
        assert r["repeats"] == len(r["tokens_per_s_repeats"]) == 2
        assert (r["prompt_tokens"], r["new_tokens"]) == (11, 19)
        assert r["lossless"] == {"checked": 4 * 19, "violations": 0, "ties": 0, "unrepeated": 0}
        first = 19 / 18  # decoding is not credited with the token that prefill yields
        assert r["end_to_end_tokens_per_s"] < r["tokens_per_s"] * first
        if r["method"] == "plain":
            assert r["speedup"] == 1.0
            assert r["tau"] == 1.0
            assert r["accept_by_position"] == []
            assert r["time"]["draft"] == 0
        else:
            assert len(r["accept_by_position"]) == 4 or r["method"] == "ngram"  # it may find nothing
            assert r["tau"] == pytest.approx(1 + r["accept_len"]["mean"], abs=1e-3)
    assert json.loads(json.dumps(report)) == report


def test_a_speedup_sets_runs_of_one_turn_against_each_other():
    def run(decode_s, tokens=9):
        return Timed(tokens=[[7] * tokens], first_s=0.5, decode_s=decode_s, trace=Trace())

    def runs(*seconds):  # of two groups in three repeats
        return {(i // 2, i % 2): run(s) for i, s in enumerate(seconds)}

    plain = runs(2.0, 6.0, 4.0, 12.0, 2.0, 6.0)  # the whole machine is slow in the second repeat
    twice = runs(1.0, 3.0, 2.0, 6.0, 1.0, 3.0)
    assert metrics.speed_ratio(plain, plain) == 1.0 and metrics.speed_ratio(twice, plain) == 2.0
    once = runs(1.0, 3.0, 2.0, 6.0, 9.0, 3.0)  # and for one run alone in the third
    assert metrics.speed_ratio(once, plain) == 2.0
    uneven = runs(1.0, 6.0, 2.0, 12.0, 1.0, 6.0)  # of the first group alone twice as fast: 7 s for 8
    assert metrics.speed_ratio(uneven, plain) == pytest.approx(8 / 7)
    shorter = {turn: run(seconds.decode_s / 4, 3) for turn, seconds in plain.items()}
    assert metrics.speed_ratio(shorter, plain) == 1.0  # a token takes as long, there are fewer


def test_rates_are_tokens_over_seconds_and_medians_of_repeats():
    def run(decode_s, first_s=0.5):
        trace = Trace([[3, 3]] * 4, [[0, 1], [2, 3], [1, -1], [3, -1]])
        trace.seconds |= {"draft": decode_s / 4, "verify": decode_s / 2}
        return Timed(tokens=[[7] * 9, [7] * 9], first_s=first_s, decode_s=decode_s, trace=trace)

    cell = metrics.ResultCell("x", 2, 9, [[[1] * 6] * 2] * 2, {})
    seconds = {0: (1.0, 3.0), 1: (2.0, 2.0), 2: (6.0, 2.0)}
    cell.runs["plain"] = {(r, g): run(s[g]) for r, s in seconds.items() for g in (0, 1)}
    cell.runs["dflash"] = {(r, g): run(s[g] / 2) for r, s in seconds.items() for g in (0, 1)}
    cell.runs["transformers"] = {(0, 0): run(4.0)}
    values = {m: metrics.result(None, cell, m, 1.0) for m in cell.runs}
    assert values["plain"]["tokens_per_s_repeats"] == [8.0, 8.0, 4.0]  # 2 groups x 2 rows x 8 tokens
    assert values["plain"]["tokens_per_s"] == 8.0
    assert values["dflash"]["speedup"] == 2.0
    assert values["transformers"]["tokens_per_s"] == 4.0
    assert values["transformers"]["speedup"] == 0.25  # over plain's first group of its first repeat alone
    assert values["dflash"]["accept_len"] == {"mean": 1.6667, "p50": 1, "p90": 3}
    assert values["dflash"]["tau"] == 2.6667
    assert values["dflash"]["accept_rate"] == round(10 / 18, 4)
    assert values["dflash"]["accept_by_position"] == [0.8333, 0.5, 0.3333]
    times = values["plain"]["time"]
    assert times == {"draft": 0.6667, "verify": 1.3333, "rest": 0.6667}
    assert values["plain"]["prefill"]["tokens_per_s"] == 24.0
    assert values["plain"]["end_to_end_tokens_per_s"] == 7.2  # 2 groups x 18 tokens / 5 s


def test_a_method_that_changes_the_text_is_caught(target, draft, tokenizer, monkeypatch):
    honest = generate

    def wrong(target, prompts, request, draft=None, **kwargs):
        out = honest(target, prompts, request, draft, **kwargs)
        if draft is not None and len(out.tokens[0]) > 8:  # not the warm-up
            out.tokens[0][7] = (out.tokens[0][7] + 1) % 300
        return out

    monkeypatch.setattr(ours, "generate", wrong)
    result = measure(target, draft, tokenizer, DOCUMENTS, tiny_settings(batches=(1,)), quiet())
    lossless = {r["method"]: r["lossless"] for r in result["results"]}
    assert lossless["plain"]["violations"] == 0
    assert lossless["dflash"] == {"checked": 4 * 8, "violations": 4, "ties": 0, "unrepeated": 0}
    assert "4 / 32" in PAGE.markdown(result)


def test_a_run_that_does_not_repeat_is_caught(target, tokenizer, monkeypatch):
    honest, calls = generate, []

    def drifting(*args, **kwargs):
        out = honest(*args, **kwargs)
        calls.append(1)
        if len(calls) > 5 + 4:  # warm-up, one repeat, warm-up of the second batch size ..
            out.tokens[0][-1] = (out.tokens[0][-1] + 1) % 300
        return out

    monkeypatch.setattr(ours, "generate", drifting)
    result = measure(target, None, tokenizer, DOCUMENTS, tiny_settings(methods=("plain",)), quiet())
    assert [r["lossless"]["unrepeated"] for r in result["results"]] == [0, 0]
    assert result["results"][1]["lossless"]["violations"] == 2  # batch 2 against batch 1


def test_only_a_tie_excuses(target):
    prompt = tiny.tokens(9).tolist()
    answer = generate(target, [prompt], Request(max_new_tokens=6)).tokens[0]
    wrong = [*answer[:3], (answer[3] + 1) % 300, *answer[4:]]
    assert compare(target, prompt, answer, answer) == LosslessCheck(checked=6)
    assert compare(target, prompt, wrong, answer) == LosslessCheck(checked=4, violations=1)
    assert compare(target, prompt, answer[:5], answer) == LosslessCheck(checked=5, violations=1)
    twin = build(target.config)
    twin.load_state_dict(target.state_dict())
    with torch.no_grad():  # two tokens with one and the same row of the head: a tie wherever one wins
        twin.lm_head.weight[wrong[3]] = twin.lm_head.weight[answer[3]]
    assert is_tie(twin, [*prompt, *answer[:3]], wrong[3], answer[3])
    assert not is_tie(twin, [*prompt, *answer[:3]], (answer[3] + 2) % 300, answer[3])
    assert compare(twin, prompt, wrong, answer) == LosslessCheck(checked=4, ties=1)


def turns(cell, settings):
    """(repeat, group, method) in the order of running, warm-up left out."""
    ran, names = [], ("plain", "ngram", "transformers", "transformers-dflash")

    def method(name, prompts, new_tokens, seed):
        repeat, group = divmod(seed - settings.seed * 1_000_003, 1009)
        if new_tokens > 8:
            ran.append((repeat, group, name))
        return Timed(tokens=[[7] * 9], first_s=0.5, decode_s=1.0, trace=Trace())

    methods = {name: partial(method, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        inputs = (cell.groups, cell.new_tokens, settings, Results(Path(folder), {}), str)
        runs = interleave("cell", methods, *inputs, partial(settings.skips, cell))
    assert {(*turn, name) for name, of in runs.items() for turn in of} == set(ran)
    assert len(ran) == speed.planned_runs(cell, methods, settings)
    return ran


def test_methods_are_interleaved(target, tokenizer):
    settings = BenchSettings(regimes=("11+19",), batches=(1,), prompts=3, repeats=2, baseline_prompts=2)
    cell = metrics.ResultCell("11+19", 1, 19, [[[1]]] * 3, {})
    plan = turns(cell, settings)
    ours = [(r, g, m) for r, g, m in plan if m in OURS]
    assert len(ours) == 2 * 3 * 2
    assert len({ours[i][2] for i in (0, 2, 4, 6)}) == 2  # the first of a turn changes
    assert [(r, g) for r, g, m in plan if m == "transformers"] == [(0, 0), (0, 1)]
    wide = metrics.ResultCell("11+19", 2, 19, [[[1]] * 2], {})
    assert "transformers-dflash" not in {m for _, _, m in turns(wide, settings)}


def test_a_budget_skips_repeats_and_says_so(target, tokenizer):
    settings = tiny_settings(methods=("plain",), repeats=3, budget_s=1e-9)
    result = measure(target, None, tokenizer, DOCUMENTS, settings, quiet())
    assert [r["repeats"] for r in result["results"]] == [1, 1]
    assert any("1 of 3 repeats" in line for line in result["remarks"])


def test_what_cannot_run_is_left_out_with_one_line(target, tokenizer, monkeypatch):
    for baseline in (speed.baselines, speed.llama_cpp):
        monkeypatch.setattr(baseline, "installed", lambda: False)
    settings = tiny_settings(methods=speed.METHODS, repeats=1)
    result = measure(target, None, tokenizer, DOCUMENTS, settings, quiet())
    assert {r["method"] for r in result["results"]} == {"plain", "ngram"}
    assert sum("not installed" in line for line in result["remarks"]) == 2
    assert any("make oracle" in line for line in result["remarks"])
    assert "| llama.cpp |" not in PAGE.markdown(result)  # nor a column for it
    assert sum("no draft" in line for line in result["remarks"]) == 1


def test_sampling_is_measured_and_not_compared(target, draft, tokenizer):
    settings = tiny_settings(methods=speed.METHODS, temperature=1.0, batches=(2,))
    result = measure(target, draft, tokenizer, DOCUMENTS, settings, quiet())
    assert {r["method"] for r in result["results"]} == {*OURS, "dflash-tree", "default"}
    assert all(r["lossless"]["checked"] == 0 for r in result["results"])
    assert "not checked" in PAGE.markdown(result)


def test_with_transformers_beside(target, draft, tokenizer):
    pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers >= 5.23")
    methods = [m for m in speed.METHODS if m != speed.LLAMA_CPP]
    settings = tiny_settings(methods=tuple(methods), batches=(1, 2), repeats=1)
    result = measure(target, draft, tokenizer, DOCUMENTS, settings, quiet())
    of = {(r["method"], r["batch"]): r for r in result["results"]}
    assert set(of) == {(m, b) for m in methods for b in (1, 2)} - {("transformers-dflash", 2)}
    assert all(r["lossless"]["violations"] == 0 for r in of.values())
    assert of["transformers", 1]["prompts"] == 2
    assert result["agreement"][0]["prompts"] == 2
    assert result["agreement"][0]["prompts_that_differ"] == 0
    assert result["agreement"][0]["rounds_compared"] > 10
    assert any("batch 1 only" in line for line in result["remarks"])


def test_files_appear_whole_and_read_well(report, tmp_path):
    PAGE.write(report, tmp_path / "new")
    names = {p.name for p in (tmp_path / "new").iterdir()}
    assert {"report.json", "report.md"} <= names
    assert not any(name.endswith(".tmp") for name in names)
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == report
    text = (tmp_path / "new" / "report.md").read_text()
    assert "Prompt 11, decode 19 tokens" in text
    assert text.count("| dflash |") == 2
    assert "**Machine**" in text


def test_the_printed_table_is_whole_at_80_columns(report):
    longest = {"method": "transformers-dflash", "tokens_per_s": 12345.6, "tau": 10.25, "speedup": 10.25}
    longest |= {
        "over_llama_cpp": 10.25,
        "lossless": {"checked": 16384, "violations": 10, "ties": 2, "unrepeated": 0},
    }
    console = quiet()
    print_report(report | {"results": [*report["results"], report["results"][-1] | longest]}, console)
    value = console.file.getvalue()
    assert max(map(len, value.splitlines())) <= 80
    assert "transformers-dflash" in value and "12345.6" in value and "10 / 16384" in value
    assert "…" not in value


def test_what_was_not_checked_or_does_not_repeat_is_printed_so(report):
    sampled = report["results"][-1] | {"temperature": 1.0, "batch": 4}
    sampled["lossless"] = {"checked": 0, "violations": 0, "ties": 0, "unrepeated": 0}
    drifting = report["results"][-1] | {"batch": 8}
    drifting["lossless"] = {"checked": 70, "violations": 0, "ties": 1, "unrepeated": 3}
    console = quiet()
    print_report(report | {"results": [sampled, drifting]}, console)
    message = " ".join(console.file.getvalue().split())
    assert "not checked" in message and "0 / 70" in message
    assert speed.unrepeated_remark(drifting).endswith("batch 8: 3 rows of repeats differ from the first")


def test_pictures_are_wide_enough_for_a_readme(report, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    PAGE.write(report, tmp_path)
    for name in ("speed.png", "acceptance.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") == 1600
    only_plain = report | {"results": [r for r in report["results"] if r["method"] == "plain"]}
    PAGE.write(only_plain, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("plain", "eagle")}, "no method 'eagle'; known: llama.cpp, transformers, "),
        ({"regimes": ("middle",)}, "no regime 'middle'; known: problems, short, long, or"),
        ({"regimes": ("4+1",)}, "with at least 2 decoded tokens"),
        ({"batches": (1, 9)}, r"must lie in 1..4"),
        ({"batches": ()}, r"must lie in 1..4"),
        ({"repeats": 0}, "repeats 0: it must be at least 1"),
        ({"methods": ()}, "name at least one of methods"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_settings(**changes)


def test_problems_are_answered_whole(tmp_path):
    target, tokenizer = open_target("default")
    settings = BenchSettings(methods=("plain", "ngram"), prompts=3, batches=(1, 2), repeats=1)
    report = speed.run_bench(target, None, tokenizer, [], settings, tmp_path, quiet())
    assert report["settings"]["regimes"] == ["problems"]
    rows = report["results"]
    assert [(r["method"], r["regime"], r["batch"]) for r in rows] == [
        ("plain", "problems", 1),
        ("ngram", "problems", 1),
    ]
    prompts = problem_prompts(HarmonyTokens(tokenizer), 3, settings.seed, speed.LONGEST)
    stop = frozenset(target.config.eos_token_ids)
    answers = [generate(target, [p], Request(max_new_tokens=999, stop=stop)).tokens[0] for p in prompts]
    lengths = [len(answer) for answer in answers]
    assert len(set(lengths)) > 1 and all(r["lossless"]["checked"] == sum(lengths) for r in rows)
    assert f"answers of up to {max(lengths)}" in PAGE.markdown(report, plots=False).lower()


def test_the_regimes_are_the_published_ones():
    assert lengths("short") == (256, 256)
    assert lengths("long") == (1024, 2048)
    assert lengths("64+128") == (64, 128)
