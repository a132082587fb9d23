"""The commands as a user types them: JSON that parses, errors that name the thing and exit 2."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from questions import ANSWER, QUESTION

from outpace.cli.main import main


def run(monkeypatch, capsys, *arguments):
    """-> exit code, stdout, stderr."""
    monkeypatch.setattr("sys.argv", ["outpace", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    given = capsys.readouterr()
    return ended.value.code, given.out, given.err


def test_generate_streams_the_same_text_that_json_holds(monkeypatch, capsys):
    options = ("generate", "default", "import os\n", "-n", 24, "--ignore-eos")
    code, out, _ = run(monkeypatch, capsys, *options)
    assert code == 0
    code, output, _ = run(monkeypatch, capsys, *options, "--json")
    assert code == 0
    result = json.loads(output)
    assert out == result["text"] + "\n"
    assert len(result["tokens"]) == 24 and result["tau"] >= 1


def test_threads_are_what_the_flag_says(monkeypatch, capsys):
    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            command = ("generate", "default", "import os\n", "-n", 2, "--threads", count)
            code, _, _ = run(monkeypatch, capsys, *command)
            assert (code, torch.get_num_threads()) == (0, count)
    finally:
        torch.set_num_threads(before)
    for count in (0, 129):  # a runtime that cannot start its threads ends the process without a word
        code, _, error = run(monkeypatch, capsys, "generate", "default", "import os\n", "--threads", count)
        assert code == 2 and "--threads" in error


def test_the_text_is_the_same_with_every_draft(monkeypatch, capsys):
    texts = set()
    for draft in (
        ["none"],
        ["ngram"],
        ["dflash"],
        ["dflash", "--num-draft-tokens", 12],
        ["dflash", "--num-draft-tokens", 70],
    ):
        _, out, _ = run(monkeypatch, capsys, "generate", "default", QUESTION, "--chat", "--draft", *draft)
        texts.add(out)
    assert len(texts) == 1 and ANSWER in texts.pop()


def test_partial_kv_changes_no_text_unless_it_is_lossy(monkeypatch, capsys, tmp_path):
    prompt = tmp_path / "prompt.py"
    prompt.write_text("".join(f"def f_{i}(x):\n    return {i * i} + x\n" for i in range(40)))
    given = ("generate", "default", "--prompt-file", prompt, "-n", 60, "--ignore-eos")
    _, plain, _ = run(monkeypatch, capsys, *given, "--draft", "none")
    sizes = "n_window_blocks=1", "n_sink_blocks=1", "block_size=4"
    few = (*given, "--kv-budget", 12, *(x for size in sizes for x in ("--kv-budget-set", size)))
    for draft in ("ngram", "dflash", "eagle3", "none"):
        _, out, _ = run(monkeypatch, capsys, *few, "--draft", draft)
        assert out == plain, draft
    code, output, _ = run(monkeypatch, capsys, *few, "--json")
    partial = json.loads(output)["partial"]
    assert code == 0 and 0 < partial["confirmed"] <= partial["passed"] and partial["forwards"] > 0
    _, out, _ = run(monkeypatch, capsys, *few, "--kv-budget-lossy", "--stats", "--draft", "ngram")
    assert "LOSSY" in out and not out.startswith(plain)


def test_latent_kv_goes_on_and_off(monkeypatch, capsys, tmp_path):
    out, recipe = (
        tmp_path / "small",
        ("--set", "rows=2", "--set", "row_tokens=128", "--set", "rank=3", "--set", "allocate=equal"),
    )
    code, output, _ = run(monkeypatch, capsys, "retrofit", "mla", "--out", out, *recipe, "--json")
    report = json.loads(output)
    assert code == 0 and report["numbers_per_token"]["after"] == 3 * 3
    texts = {}
    for name, model, options in (
        ("whole", "default", ("--draft", "none")),
        ("off", out, ("--no-mla",)),
        ("on", out, ("--mla",)),
        ("as stated", out, ()),
        ("drafted", out, ("--draft", "dflash")),
    ):
        given = ("generate", model, "import os", "-n", 30, "--ignore-eos")
        _, texts[name], _ = run(monkeypatch, capsys, *given, *options)
    assert texts["off"] == texts["whole"] != texts["on"] == texts["as stated"] == texts["drafted"]


def test_sparse_attention_goes_on_and_off_and_learns(monkeypatch, capsys, tmp_path):
    out, made = tmp_path / "sparse", ("rows=1", "row_tokens=256", "top_k=0.01", "min_context=0", "recent=3")
    corpus = ("--corpus", Path(sysconfig.get_path("stdlib"), "asyncio"))
    given = [*corpus, *(x for item in made for x in ("--set", item))]
    code, output, _ = run(monkeypatch, capsys, "retrofit", "dsa", "--out", out, *given, "--json")
    assert code == 0 and json.loads(output)["settings"]["index_heads"] == 8
    prompt = tmp_path / "long.py"
    prompt.write_text("".join(f"def f_{i}(x):\n    return {i * i} + x\n" for i in range(40)))
    texts, ask = {}, ("--prompt-file", prompt, "-n", 30, "--ignore-eos")
    by_index = ("--kv-budget", 160, "--kv-budget-set", "selector=index")
    for name, model, options in (
        ("whole", "default", ("--draft", "none")),
        ("off", out, ("--no-dsa",)),
        ("on", out, ("--draft", "none")),
        ("drafted", out, ("--draft", "dflash")),
        ("chosen for", out, ("--no-dsa", "--draft", "ngram", *by_index)),
    ):
        _, texts[name], _ = run(monkeypatch, capsys, "generate", model, *ask, *options)
    assert texts["off"] == texts["whole"] == texts["chosen for"] != texts["on"] == texts["drafted"]
    short = [
        x
        for item in ("steps=2", "row_tokens=256", "validation_texts=1", "queries=8")
        for x in ("--set", item)
    ]
    where = (out, "--out", tmp_path / "run", *corpus)
    code, output, _ = run(monkeypatch, capsys, "train", "dsa", *where, *short)
    assert code == 0 and "untrained: held-out loss" in output and "trained: held-out loss" in output
    code, output, _ = run(monkeypatch, capsys, "inspect", tmp_path / "run" / "model", "--json")
    assert code == 0 and json.loads(output)["parts"]["retrofit"]["parameters"] > 0


def test_generate_from_a_file_with_stats(monkeypatch, capsys, tmp_path):
    (tmp_path / "prompt.py").write_text("class Shape:\n    def area(self):\n")
    code, out, _ = run(
        monkeypatch,
        capsys,
        "generate",
        "default",
        "--prompt-file",
        tmp_path / "prompt.py",
        "-n",
        8,
        "--stats",
    )
    assert code == 0 and "tau" in out and "tokens/s" in out


def test_inspect_default(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "inspect", "default", "--json")
    data = json.loads(out)
    assert code == 0 and data["architecture"] == "GptOssForCausalLM"
    assert data["missing"] == data["left_over"] == []
    assert 0 < data["active_parameters"] < data["parameters"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "no/such/folder"), "no/such/folder is not there"),
        (("generate", "default", ""), "the prompt is empty"),
        (("generate", "default", "x", "--kv-budget", 100), "sinks and window alone are 160"),
        (
            ("generate", "default", "x", "--kv-budget", 512, "--kv-budget-set", "selektor=quest"),
            "did you mean `selector`",
        ),
        (
            ("generate", "default", "x", "--kv-budget", 512, "--kv-budget-set", "n_retrieval_blocks=3"),
            "--kv-budget sets the number",
        ),
        (("generate", "default", "x", "--kv-budget-lossy"), "go with --kv-budget TOKENS"),
        (("generate", "default", "x", "--no-mla"), "no latent KV to switch"),
        (
            ("retrofit", "mla", "--out", "x", "--set", "rank=999"),
            "rank 999: keys and values of a layer have 512",
        ),
        (("retrofit", "mla", "--out", "x", "--set", "methode=svd"), "did you mean `method`"),
        (("generate", "default", "x", "--no-dsa"), "no sparse attention to switch"),
        (("retrofit", "dsa", "--out", "x", "--set", "top_k=3"), "top_k 3"),
        (("train", "dsa", "default", "--out", "x"), "this target has no index"),
        (("train", "mla", "default", "--out", "x"), "this target has no latents"),
        (("train", "mla", "no/such", "--out", "x"), "no/such is not there"),
        (("bench", "--suite", "memory", "--out", "x"), "this target has none"),
        (("bench", "--suite", "pareto", "--draft", "ngram", "--out", "x"), "measures a target alone"),
        (("plan", "20b", "--hardware", "9000xfast"), "known are h100"),
        (
            ("generate", "default", "x", "--kv-budget", 512, "--kv-budget-set", "selector=index"),
            "no index to choose by",
        ),
        (("generate", "default", "x", "--kv-budget", 512, "--speculate", "off"), "no draft tokens to verify"),
        (("generate", "default", "x", "--kv-budget", 512, "--num-speculative-tokens", 3), "leave it out"),
        (("bench", "--suite", "context", "--draft", "ngram", "--out", "no"), "measures a target alone"),
        (("generate", "default"), "give a prompt after the model, or --prompt-file"),
        (("generate", "default", "x", "--temperature", 1, "--seed", 2**64), f"seed {2**64}: it must lie in"),
        (("generate", "default", "x", "--draft", "no/such"), "no/such is not there"),
        (("generate", "default", "x", "--temperature", "-1"), "temperature -1.0 is below 0"),
        (("generate", "default", "x", "-n", "0"), "max_new_tokens 0"),
        (("generate", "default", "x", "--num-draft-tokens", "1"), "a tree of 1 nodes proposes nothing"),
        (("generate", "default", "x", "--num-draft-tokens", "5000"), "a tree of 5000 nodes: at most 1024"),
        (
            ("generate", "default", "x", "--num-draft-tokens", "8", "--draft", "ngram"),
            "num_draft_tokens 8: 'ngram' proposes no trees",
        ),
        (("generate", "default", "x", "--topk", "8", "--draft", "dflash"), "topk 8: it is for trees"),
        (
            ("generate", "default", "x", "--num-steps", "8", "--draft", "dflash"),
            "num_steps 8: only an EAGLE-3 has it",
        ),
        (("generate", "default", "x", "-n", "200000"), "positions end at"),
        (("bench", "--out", "x", "--set", "batchs=1"), "did you mean `batches`"),
        (("bench", "--out", "x", "--set", "batches"), "write key=value"),
        (("bench", "--out", "x", "--set", "batches=a"), "`batches` wants tuple[int, ...], not ['a']"),
        (("train", "dflash", "--cache", "no/cache", "--out", "x"), "no/cache"),
        (("train", "dflash", "--cache", "x", "--out", "x", "--init", "ngram"), "means no weights"),
        (("teacher", "verify", "no/cache"), "no/cache"),
        (("teacher", "build", "--out", "x", "--position-offsets", "0,far"), "'far' is not a whole number"),
        (
            ("teacher", "build", "--out", "x", "--position-offsets", 10**20),
            "`position_offsets` is 1000000000",
        ),
        (
            ("teacher", "build", "--out", "x", "--set", f"samples={2 * 10**9}"),
            "samples 2000000000: it must be",
        ),
        (
            ("train", "dflash", "--cache", "x", "--out", "x", "--set", f"rows={10**12}"),
            "`rows` is 1000000000000",
        ),
    ],
)
def test_bad_input_ends_in_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_help_has_examples(monkeypatch, capsys):
    for command in (
        ("generate",),
        ("bench",),
        ("check",),
        ("train", "dflash"),
        ("teacher", "build"),
        ("retrofit", "mla"),
        ("retrofit", "dsa"),
        ("train", "mla"),
        ("train", "dsa"),
        ("plan",),
    ):
        code, out, _ = run(monkeypatch, capsys, *command, "--help")
        assert code == 0 and "outpace " + " ".join(command) in " ".join(out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [("generate", "default", "x"), ("serve", "default")])
def test_a_gpu_that_is_not_there_is_named(monkeypatch, capsys, command):
    code, _, err = run(monkeypatch, capsys, *command, "--device", "cuda:1")
    assert code == 2 and "device cuda:1: there are 0 CUDA devices here" in " ".join(err.split())
