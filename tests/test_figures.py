"""Figures that the documentation states, against the code and files that they come from."""

import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outpace.checkpoint.shipped import EMBEDDED
from outpace.cli.checkpoints import synth
from outpace.cli.measure import RUNS
from outpace.formats.random_weights import PRINTABLE
from outpace.models.published import PUBLISHED
from outpace.plan.sizes import retrofitted, sizes_of
from outpace.teacher.store import encode_aux
from outpace.text.tokenizer import read_tokenizer

ROOT = Path(__file__).parents[1]


def page(name):
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def stored(width, dtype):
    """Bytes that a teacher cache takes for one state."""
    return sum(t.nbytes for t in encode_aux(torch.ones(1, width), dtype) if t is not None)


def test_bytes_of_a_final_state():
    config = json.loads((EMBEDDED / "target" / "config.json").read_text())
    C, V = config["hidden_size"], config["vocab_size"]
    assert (stored(C, "bfloat16"), stored(C, "fp8")) == (2 * C, C + 4)
    assert "(2 C bytes per token, C + 4 in fp8), where the logits would cost 4 V" in page("teacher-cache.md")
    assert f"{2 * C} bytes against {4 * V / 1024:g} KiB for the embedded target" in page("teacher-cache.md")
    C, V = (PUBLISHED["gpt-oss-20b"][name] for name in ("hidden_size", "vocab_size"))
    assert f"{2 * C / 1000:.1f} kB against {4 * V / 1000:.0f} kB for gpt-oss-20b" in page("teacher-cache.md")


def test_bytes_of_latents_at_the_shape_of_gpt_oss_20b():
    whole = sizes_of("20b", PUBLISHED["gpt-oss-20b"])
    rows = re.findall(
        r"^\| ([\d,]+)(?: \(none\))? \| ([\d,]+) \| ([\d.]+) GiB \|$",
        (ROOT / "docs/mla.md").read_text(),
        re.M,
    )
    ranks = [int(rank.replace(",", "")) for rank, *_ in rows]
    assert ranks == [1024, 768, 512, 256]
    for rank, (_, nbytes, total) in zip(ranks, rows, strict=True):
        growing = retrofitted(whole, rank % 1024, 0, 1, None).kv_growing()
        assert f"{growing:,.0f}" == nbytes and f"{growing * 131072 / 2**30:.2f}" == total


def test_what_is_read_of_gguf_files():
    """Bytes by format, and which formats the tile of the kernel reads itself."""
    row = re.compile(r"^\| ([\w, ]+) \| ([\d., ]+) \| as stored \| float32, (\d* ?\w+) ", re.M)
    text = (ROOT / "docs" / "gguf.md").read_text(encoding="utf-8")
    where = {}
    for names, nbytes, way in row.findall(text):
        for name, stated in zip(names.split(", "), nbytes.split(", "), strict=True):
            values, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
            assert float(stated) == size * 32 / values, name
            where[name] = way
    kernel, products = (
        (ROOT / "outpace" / "kernels" / name).read_text(encoding="utf-8")
        for name in ("cpu.c", "cpu_products.c")
    )
    kinds = re.search(r"enum \{ ([\w, ]+), WHOLE, PAIRED \};  // of weights", kernel)
    last = re.search(r"int no_tile\(long kind\) \{ return kind > (\w+) ", products)
    spread = re.search(r"SPREAD = (\d+)", kernel)
    assert kinds is not None and last is not None and spread is not None
    order = kinds[1].split(", ")
    blocks = {
        kind.removeprefix("GGML_"): at > order.index(last[1])
        for at, kind in enumerate(order)
        if kind not in ("F32", "BF16", "F16")
    }
    assert where == {kind: f"{spread[1]} values" if late else "unpacked" for kind, late in blocks.items()}


def test_ids_of_the_tokenizer_that_synth_writes():
    assert read_tokenizer(EMBEDDED / "target").get_vocab_size() == PRINTABLE
    assert f"embedded one, of {PRINTABLE:,} ids" in page("checkpoints.md")
    assert synth.__doc__ is not None and f"favours its {PRINTABLE:,} ids" in synth.__doc__


def test_every_suite_is_published_or_to_be_measured():
    published = {
        "serve": "serve",
        "soak": "soak",
        "speed": "speed",
        "tasks": "tasks",
        "answers": "answers",
        "memory-answers": "memory-answers",
        "draft-context": "draft-context",
    }
    assert all((ROOT / "reports" / folder / "report.json").is_file() for folder in published.values())
    missing = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("## To be measured")[1]
    named = set(re.findall(r"--suite ([\w-]+)", missing))
    assert set(RUNS) - set(published) <= named <= set(RUNS)


def report(folder):
    return json.loads((ROOT / "reports" / folder / "report.json").read_text(encoding="utf-8"))


def test_what_the_results_say_of_problems():
    solved = report("tasks")
    fixed, steered = (
        row
        for row in report("answers")["results"]
        if row["family"] == "all" and row["method"] == "DFlash 2" and not row["temperature"]
    )
    checked, text = steered["lossless"], page("results.md")
    assert f"{solved['accuracy']:.0%}".replace("%", " %") + " of the answers are right" in text
    assert f"reaches a tau of {fixed['tau']:.2f} over whole answers" in text
    assert f"that is {steered['speedup']:.2f} times the tokens/s of plain decoding" in text
    assert f"and {steered['over_llama_cpp']:.2f} times llama.cpp's" in text
    assert not checked["violations"] and f"none of {checked['checked']:,} tokens is another" in text
    assert f"reaches a tau of {fixed['tau']:.2f}" in page("embedded.md")
    trained = report("answers")["methods"]["DFlash 2"]["trained"]
    learnt = f"{trained['steps']:,} steps in {60 * trained['hours']:.0f} minutes, reaches"
    assert learnt in page("embedded.md")
    assert f"reaches a tau of {fixed['tau']:.1f} over" in page("howto/train.md")
    worst = min(solved["families"], key=lambda row: row["accuracy"])
    assert f"to {worst['accuracy']:.0%}".replace("%", " %") + f" of the {worst['family']}" in text
    costs = report("answers")["costs"]["DFlash 2, greedy"]["points"][0]
    verify, draft = (costs[name][-1] / costs["plain"] for name in ("verify", "draft"))
    assert f"take as long as {verify + draft:.1f} single steps" in text
    passes = f"takes as long as {verify:.1f} single steps and the draft as {draft:.1f}, so that"
    assert f"{passes} the draft at its full length brings {fixed['speedup']:.2f} times" in page("embedded.md")
    rows = [
        row
        for row in report("answers")["results"]
        if row["method"] == "DFlash 2" and row["controller"] and not row["temperature"]
    ]
    least = min(rows, key=lambda row: row["speedup"])
    gained = f"with it {least['family']} gain the least, {least['speedup'] - 1:.0%}".replace("%", " %")
    assert least["speedup"] > 1 and f"{gained}." in page("embedded.md")
    assert steered["speedup"] >= 2.0 and steered["over_llama_cpp"] >= 3.5
    most = f"no family gains less than {least['speedup'] - 1:.0%}".replace("%", " %")
    assert f"The aims, 2.0 and 3.5, are met, and {most}" in text


def test_tokens_that_the_embedded_model_has_seen():
    third = json.loads((EMBEDDED / "target/provenance.json").read_text(encoding="utf-8"))
    second = third["started_from"]
    first = second["started_from"]
    assert f"{first['steps']:,} steps by two processes" in page("embedded.md")
    assert f"{second['steps']:,} and {third['steps']:,} steps on from there" in page("embedded.md")
    # the second counted its padding
    millions = (first["tokens"] + 0.988 * second["tokens"] + third["tokens"]) / 1e6
    assert f"has seen {millions:.0f} million tokens" in page("embedded.md")
    solved = {row["family"]: row["accuracy"] for row in report("tasks")["families"]}
    assert report("tasks")["accuracy"] > 0.95 and min(solved.values()) > 0.85
    assert {"json", "needles"} == set(sorted(solved, key=solved.__getitem__)[:2])
    assert "none below 85 %, is met" in page("embedded.md") and round(1 / (1 - solved["needles"])) == 8


def test_what_the_results_say_of_answers_with_less_memory():
    measured = report("memory-answers")
    rows = {row["name"]: row for row in measured["rows"]}
    same = ("latents, loss, 75%", *(f"partial KV of {n} tokens, lossless" for n in (128, 64)))
    assert all(rows[name]["unchanged"] == rows[name]["of"] == 192 for name in (*same, "float16"))
    assert "all of 192 answers stay the same" in page("results.md")
    half, lossy = rows["latents, loss, 50%"], rows["partial KV of 64 tokens, lossy"]
    assert half["unchanged"] == half["of"] - 2 and half["right"] >= rows["original"]["right"]
    assert "with latents of half the size two are, and none that was right is lost" in page("embedded.md")
    needles = next(row for row in report("tasks")["families"] if row["family"] == "needles")
    assert round(1 / (1 - needles["accuracy"])) == 8 and "one in eight of those is not solved" in page(
        "embedded.md"
    )
    deep = {name: sum(row["needles"].values()) for name, row in rows.items()}
    asked = measured["settings"]["needles"] * len(measured["settings"]["depths"])
    least = deep["latents, loss, 25%"], deep["index, 12.5% of the context"], deep["original"]
    assert least == (14, 14, 14) and asked == 18 and "none of the 14 of 18 codes" in page("embedded.md")
    assert not deep["partial KV of 64 tokens, lossy"] and deep["partial KV of 64 tokens, lossless"] == 14
    assert 0.45 < 1 - lossy["unchanged"] / 192 < 0.5 and "nearly half of the answers" in page("embedded.md")


def test_what_the_results_say_of_answers_over_keys_of_two_bytes():
    whole, half = (report(name) for name in ("tasks", "tasks-float16"))
    assert half["target"]["kv_cache_dtype"] == "float16" and half["settings"] == whole["settings"]
    right = [sum(row["right"] for row in r["families"]) for r in (whole, half)]
    answers = half["settings"]["problems"] * len(half["families"])
    assert abs(right[0] - right[1]) < answers / 1000
    assert f"{right[1]:,} answers of {answers:,} are right, and {right[0]:,} with" in page("results.md")


def test_what_the_drafts_bring():
    """At temperature 0 and at 0.8, in the pages of drafts, the controller and exactness."""
    results = report("answers")["results"]
    rows = [row for row in results if row["family"] == "all" and row["method"] == "DFlash 2"]
    fixed, steered = ([row["speedup"] for row in rows if row["controller"] is on] for on in (False, True))
    text = page("controller.md")
    assert f"brings {fixed[0]:.2f} times plain decoding at its full length and {steered[0]:.2f} times" in text
    assert f"at 0.8 it brings {fixed[1]:.2f} and {steered[1]:.2f} times" in text
    counts = defaultdict[float, list[int]](list)
    for row in results:
        if row["family"] == "all" and row["method"] not in ("llama.cpp", "plain"):
            assert not row["lossless"]["violations"]
            counts[row["temperature"]].append(row["lossless"]["checked"])
    (cold, *colder), (warm, *warmer) = counts[0.0], counts[0.8]
    assert {*colder} == {cold} and {*warmer} == {warm} and len(colder) == len(warmer) == 6
    assert (
        f"each of seven methods, a tree and the controller among them, none of {cold:,} tokens at temperature"
        f" 0 and none of {warm:,} at 0.8"
    ) in page("lossless.md")
    passes = {row["method"]: row["round_ms"]["verify"] for row in results
              if row["family"] == "all" and not row["temperature"] and not row.get("controller")
              and "round_ms" in row}  # fmt: skip
    times = passes["DFlash 2, tree of 16"] / passes["plain"]
    assert f"verification of 16 positions costs {times:.1f} times that of one" in page("drafts.md")
    best = {}
    for row in sorted(results, key=lambda row: row["speedup"]):
        if not row["temperature"] and row["family"] != "all":
            best[row["family"]] = row["method"]
    most = sum(method.startswith("DFlash 2") for method in best.values())
    assert len(best) == 16
    assert f"A DFlash 2 is the fastest in {most} of sixteen kinds of problems" in page("drafts.md")


def test_what_the_pages_say_of_trainers_and_of_a_long_context():
    rows = {(r["anchors"], r["dtype"], r["engine"]): r for r in report("draft-training")["rows"]}
    assert all(not row["mismatched_tokens"] for row in rows.values())
    settings = (512, "float32"), (64, "float32"), (64, "bfloat16")
    wide, narrow, rounded = (
        [rows[*setting, peer]["outpace_over_it"] for peer in ("speculators", "specforge")]
        for setting in settings
    )
    assert min(wide) > 2 and rounded[0] > 1.5
    text = page("results.md")
    assert f"takes a step in {1 / wide[0]:.2f} of speculators' time and {1 / wide[1]:.2f} of SpecF" in text
    assert f"in float32, it is {narrow[0]:.2f} and {narrow[1]:.2f} times as fast" in text
    assert f"as our recipes have it, {rounded[0]:.2f} and {rounded[1]:.2f} times." in text
    costs = report("draft-context")
    seconds = {(c["shape"], c["context"], c["variant"]): c["seconds"] for c in costs["cells"]}
    kept, formed = (seconds["gpt-oss-20b", 122880, name] for name in ("cached", "recomputed"))
    text = page("dflash.md")
    assert f"takes {kept:.2f} s with cached keys and values and {formed:.1f} s where they are" in text
    assert seconds["draft", 122880, "cached"] < 1.2 * seconds["draft", 2048, "cached"]
    tau = {r["variant"]: r["tau"] for r in costs["acceptance"] if r["regime"] == "1024+512"}
    assert f"a tau of {tau['noise cached']:.2f} and not {tau['cached']:.2f} on held-out" in text


def test_what_the_results_say_of_the_server():
    rows = report("serve")["results"]
    plain, drafts = ([r for r in rows if r["method"] == name] for name in ("no draft", "draft"))
    assert min(r["over_llama_server"] for r in plain) >= 1.2
    least = min(r["over_llama_server"] for r in drafts)
    below = sorted(r["speedup"] for r in drafts if round(r["speedup"], 2) < 0.97)
    assert f"with the default draft {least:.2f} times or more" in page("results.md")
    words = {0: "no row is below", 1: "one row is", 2: "two rows are", 3: "three rows are"}
    where = f" at {below[0]:.2f}" + f" to {below[-1]:.2f}" * (len(below) > 1) if below else ""
    assert f"{words[len(below)]}{where}" in page("results.md")
    first, *_, last = (row["tau"] for row in drafts)
    assert f"tau goes from {first:.2f} with one client to {last:.2f} with 32" in page("results.md")


def test_what_the_results_say_of_keys_and_values_of_two_bytes():
    steps = report("llama-cpp")["steps"]
    row = steps["batch of 32"]
    less = 1 - row["outpace_float16_ms"] / row["outpace_float32_ms"]
    assert f"it takes {less * 100:.0f} % less" in page("results.md")


def test_what_the_results_say_of_verify_passes():
    words = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
    times = {name: row["outpace_ms"] for name, row in report("llama-cpp")["steps"].items()}
    eight, sixteen = (words[round(times[f"{n} tokens"] / times["1 token"])] for n in (8, 16))
    assert f"8 tokens costs {eight} of them and one of 16 {sixteen}" in page("results.md")


def test_what_the_default_draft_brings_next_to_llama_cpp():
    texts = [report(f"llama-cpp{name}")["text"] for name in ("", "/busy", "/avx2", "/theirs-avx2")]
    rates = [t["default"]["tokens_per_s"] / t["autoregressive"]["tokens_per_s"] for t in texts]
    assert f"{min(rates):.2f} to {max(rates):.2f} times the tokens/s of plain decoding in these" in page(
        "results.md"
    )


def test_what_rounded_activations_bring_to_prompts():
    shapes = report("llama-cpp/shapes")["shapes"]
    for name in ("small-moe:bf16", "qwen3-0.6b:bf16"):
        row = shapes[name]["steps"]["prompt of 512"]
        assert round(row["outpace_rounded_ms"] / row["outpace_ms"] * 6) == 4
    assert "two thirds of the time on larger models" in page("howto/decode.md")


def test_what_tiles_bring():
    """Of a dense model on a CPU with AMX, next to another machine's vectors."""
    tiles, vectors = report("llama-cpp/shapes-amx"), report("llama-cpp/shapes")
    assert "AMX" in tiles["machine"]["vector"] and "AMX" not in vectors["machine"]["vector"]
    rows, others = (r["shapes"]["qwen3-0.6b:bf16"]["steps"] for r in (tiles, vectors))
    ratios = [f"{rows[step]['ratio']:.2f}" for step in ("8 tokens", "16 tokens", "prompt of 512")]
    assert "8 tokens {} times as fast as it, 16 tokens {} times, a prompt of 512 {} times".format(
        *ratios
    ) in (page("log.md"))
    more = rows["8 tokens"]["outpace_ms"] / rows["1 token"]["outpace_ms"]
    assert f"Eight tokens of Qwen3-0.6B's shape take {more:.2f} times as long as one" in page("kernels.md")
    assert rows["prompt of 512"]["ratio"] > 2 and "a dense model less than half of llama.cpp's time" in (
        (ROOT / "CHANGELOG.md").read_text()
    )
    assert "so a prompt takes less time than" in page("results.md")
    assert rows["1 token"]["outpace_ms"] > others["1 token"]["outpace_ms"] and (
        "its two cores are slower" in page("results.md")
    )


def test_what_published_acceptance_would_bring():
    """Three times llama.cpp's plain decoding was the aim, on a dense shape."""
    rows = {row["method"]: row for row in report("synthetic/qwen3-0.6b-bf16-draft-5")["results"]}
    assert min(rows[f"tau {tau:g}, block 16"]["over_llama_cpp"] for tau in (6.5, 7.3)) >= 3
    assert not any(row["lossless"]["violations"] for row in rows.values() if row["asked"])
    free = [row for row in report("synthetic/qwen3-0.6b-bf16-draft-0")["results"] if row["asked"]]
    best = max(row["over_llama_cpp"] for row in free)
    assert f"would bring {best:.1f} times llama.cpp's speed at most" in page("results.md")
    even = {f"{row['break_even']:.1f}" for row in free if "block 16" in row["method"]}
    assert len(even) == 1 and f"pays from a tau of {even.pop()} on in blocks of 16" in page("results.md")
