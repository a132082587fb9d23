"""Odd flag values and broken input: exit code 0, 1 or 2 and one line, never a traceback."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cli import run

from outpace.api import Model
from outpace.cli.main import main
from outpace.loading import open_target
from outpace.ops.sampling import Sampling, generator
from outpace.text.tokenizer import train_bpe

NUMBERS = st.one_of(
    st.sampled_from(["0", "-1", "1", "2", "nan", "inf", "-inf", "1e-45", "1e-300", "1e300", "0.5", "-0.0"]),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.text(max_size=3),
)
FLAGS = """
    temperature top-k top-p min-p repetition-penalty presence-penalty frequency-penalty seed draft-temperature
    acceptance draft draft-quant num-draft-tokens num-steps topk speculate num-speculative-tokens kv-budget
    kv-budget-set layers top-logits prefill-chunk tensor-parallel-size
"""
WORDS = st.sampled_from(
    ["none", "ngram", "eagle3", "dflash", "q8_0", "gumbel", "block", "rejection", "auto", "off", "always"]
)
LENGTHS = st.sampled_from(["0", "-1", "4", "1e3", "131073", str(2**70)])
OPTIONS = st.lists(
    st.tuples(st.sampled_from([f"--{flag}" for flag in FLAGS.split()]), st.one_of(NUMBERS, WORDS))
    | st.tuples(st.just("-n"), LENGTHS),
    max_size=5,
)
PROMPTS = st.one_of(st.just("x"), st.text(max_size=20), st.binary(max_size=6).map(os.fsdecode))


@pytest.fixture(scope="module")
def quick():
    """One loaded model, and outputs of at most 4 tokens."""
    opened = open_target("default")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.decode.auto.QUICK", 0.0)
        patch.setattr(
            "outpace.api.load",
            lambda name, layers=None, **_: Model(
                name=name,
                target=opened[0] if layers is None else open_target(name, layers)[0],
                tokenizer=opened[1],
                layers=layers,
            ),
        )
        yield patch


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=PROMPTS, options=OPTIONS)
def test_odd_values_never_end_in_a_traceback(quick, prompt, options):
    words = [word for option in options for word in option]
    out, err = io.StringIO(), io.StringIO()
    quick.setattr(sys, "argv", ["outpace", "generate", "default", "-n", "4", *words, "--", prompt])
    quick.setattr(sys, "stdout", out)
    quick.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, 1, 2), (words, err.getvalue())
    assert (ended.value.code == 0) == ("rror" not in err.getvalue()), (words, err.getvalue())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "1e-45"), "temperature 1e-45 is outside [1e-06, 1e+06]"),
        (("--repetition-penalty", "1e-300"), "repetition_penalty 1e-300 is outside"),
        (
            ("--temperature", 1, "--acceptance", "block", "--draft-temperature", "1e-300"),
            "draft_temperature 1e-300 is outside",
        ),
        (("--kv-budget", 1_000_000_000), "--kv-budget 1000000000: this model's positions end at 131072"),
    ],
)
def test_values_that_no_arithmetic_survives(monkeypatch, capsys, arguments, message):
    code, _, err = run(monkeypatch, capsys, "generate", "default", "x", "-n", 4, *arguments)
    assert code == 2 and message in " ".join(err.split())


def test_the_smallest_temperature_is_greedy_and_the_largest_works(monkeypatch, capsys):
    greedy, tiny, hot = (
        run(monkeypatch, capsys, "generate", "default", "import os", "-n", 12, "--temperature", value)
        for value in (0, 1e-6, 1e6)
    )
    assert greedy[1] == tiny[1] != hot[1] and hot[0] == 0
    assert Sampling(repetition_penalty=1e6, temperature=0.0).penalises


def test_a_long_prompt_is_refused_before_it_is_tokenised(monkeypatch, capsys, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 4_000_000)
    monkeypatch.setattr("outpace.api.encode_prompt", None)
    for command in (
        ("generate", "default", "--prompt-file", tmp_path / "long.txt"),
        ("chat", "default", "-m", "-"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("word " * 4_000_000))
        code, _, err = run(monkeypatch, capsys, *command)
        assert code == 2 and "20,000,000 characters" in err and "positions end at 131,072" in err


@pytest.mark.parametrize("encoding", ["surrogateescape", "strict"])
@pytest.mark.parametrize("options", [(), ("-m", "-")])
def test_standard_input_that_is_not_utf8(monkeypatch, capsys, encoding, options):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8", encoding))
    code, _, err = run(monkeypatch, capsys, "chat", "default", *options)
    assert code == 2 and "is not" in err and "UTF-8" in err


def test_a_prompt_file_that_is_not_utf8(monkeypatch, capsys, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfer")
    code, _, err = run(monkeypatch, capsys, "generate", "default", "--prompt-file", tmp_path / "latin.txt")
    assert code == 2 and "latin.txt is not UTF-8 (byte 2)" in " ".join(err.split())


def test_a_vocabulary_that_no_memory_holds_is_refused():
    with pytest.raises(ValueError, match="vocab_size 1000000000000: it must be 266 to 1,048,576"):
        train_bpe(["text"], 10**12)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_is_one_line(monkeypatch, capsys, error):
    def load(name, layers=None, **_):
        raise error

    monkeypatch.setattr("outpace.api.load", load)
    code, _, err = run(monkeypatch, capsys, "generate", "default", "x")
    assert code == 2 and "not enough memory" in err and "Traceback" not in err


def test_every_bit_of_a_seed_counts():
    first = {
        int(generator(seed).initial_seed()) for seed in (7, 7 + 2**32, 7 + 2**33, 7 + 2**63, -7, 2**64 - 1)
    }
    assert len(first) == 6 and max(first) < 2**32 and generator(7).initial_seed() == 7
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="it must lie in"):
            generator(seed)


def shell(line, **more):
    command = line.replace("outpace", f"{sys.executable} -m outpace", 1)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, **more)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("outpace generate default x -n 4 >&-", 2, "the standard output is closed"),
        ("outpace generate default x -n 4 >/dev/full", 2, "No space left on device"),
        ("outpace inspect default --json >/dev/full", 2, "No space left on device"),
        ("outpace generate default x -n 300 --ignore-eos | head -c 1; exit ${PIPESTATUS[0]}", 1, ""),
    ],
)
def test_standard_output_that_cannot_be_written(line, code, message):
    ended = shell(line)
    assert ended.returncode == code and message in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) <= 1, ended.stderr


def test_ctrl_c_of_a_teacher_says_how_to_resume(tmp_path):
    out = tmp_path / "cache"
    command = [
        sys.executable,
        "-m",
        "outpace",
        "teacher",
        "build",
        "--out",
        str(out),
        "--set",
        "samples=2000",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while not (out / "meta.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert f"the same command resumes from {out}" in err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("convert default folder", "folder"),
        ("convert default model.gguf", "model.gguf"),
        ("export dflash --to zlab --out draft", "draft"),
        ("train dflash --cache cache --out run --set rows=1 --set steps=2 --set eval_every=2", "run"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path, arguments, name):
    """`ulimit -f` ends writes as a full disk does, at 1,000 blocks of 1 KiB."""
    if arguments.startswith("train"):
        lengths = "--set samples=3 --set prompt_tokens=[8,12] --set response_tokens=[10,14]"
        assert shell(f"outpace teacher build --out cache {lengths}", cwd=tmp_path).returncode == 0
    ended = shell(f"ulimit -f 1000; outpace {arguments}", cwd=tmp_path)
    message = ended.stderr.strip()
    assert ended.returncode == 2 and len(message.splitlines()) == 1, message
    why = "could not be written, the disk is full or a limit is reached:"
    found = re.search(why + r" it needs ([\d,]+) bytes, [\d,]+ bytes are free there", message)
    assert found is not None and name in message, message
    if not arguments.startswith("train"):
        assert not (tmp_path / name).exists()
        return
    assert "run/checkpoint.pt could not" in message
    assert shell(f"outpace {arguments}", cwd=tmp_path).returncode == 0
    needed = (tmp_path / "run" / "checkpoint.pt").stat().st_size
    assert 0.97 * needed < int(found[1].replace(",", "")) <= needed


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mla", "dsa"])
def test_ctrl_c_of_a_training_says_how_to_resume(monkeypatch, capsys, tmp_path, kind):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    is_draft = kind in ("dflash", "eagle3")
    train = f"outpace.train.{kind}.train_{kind}" if is_draft else "outpace.retrofit.train.train_retrofit"
    monkeypatch.setattr(train, interrupted)
    if not is_draft:
        made = f"outpace.retrofit.{kind}.{kind.title()}Trainer"
        monkeypatch.setattr(made, lambda *arguments: None)
    monkeypatch.setattr("outpace.cli.training.teacher_cache", lambda *arguments, **options: None)
    arguments = ("--cache", tmp_path) if is_draft else ("default",)
    code, _, err = run(monkeypatch, capsys, "train", kind, *arguments, "--out", tmp_path / "run")
    assert code == 130 and f"the same command resumes from {tmp_path / 'run'}" in err.replace("\n", "")
