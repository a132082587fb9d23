"""The recall suite: losses by position as a plain forward has them, needles that a perfect reader finds."""

import json

import pytest
import tiny
import torch
import torch.nn.functional as F
from rich.console import Console

from outpace.bench import recall
from outpace.bench.recall import (
    PAGE,
    RecallSettings,
    ends,
    find_needles,
    needle_table,
    nll,
    run_recall,
    text_loss,
)
from outpace.decode.request import Generation
from outpace.decode.trace import Trace
from outpace.loading import open_target
from outpace.text.corpus import read_corpus, split
from outpace.text.tokenizer import encode

QUIET = Console(quiet=True)
SMALL = {
    "length": 600,
    "texts": 2,
    "near": 128,
    "distances": (40, 300),
    "needles": 4,
    "batch": 2,
    "chunk": 200,
}


@pytest.fixture(scope="module")
def held_out():
    """A few files of the standard library."""
    names = ("asyncio/", "email/", "http/", "json/", "xml/")
    return split([d for d in read_corpus() if d.name.startswith(names)])[1]


@pytest.mark.parametrize("chunk", [7, 64])
@torch.inference_mode()
def test_losses_are_those_of_a_plain_forward(chunk):
    model, row = tiny.target("gpt_oss"), tiny.tokens(70, seed=3)
    wanted = F.cross_entropy(model.logits(model(row[None]).hidden[0, :-1]), row[1:], reduction="none")
    assert (nll(model, row.tolist(), chunk) - wanted).abs().max() < 2e-5


def test_buckets_and_the_last_quarter_by_hand(monkeypatch):
    """The loss of a token is its place in the text, plus a thousand where less than all is before it."""
    row = list(range(601))
    monkeypatch.setattr(
        recall,
        "nll",
        lambda target, part, chunk: torch.tensor(part[1:], dtype=torch.float) + 1000 * (part[0] > 0),
    )
    result = text_loss(None, row, RecallSettings(**SMALL))
    assert result["buckets"] == [128.5, 384.5, 556.5] and ends(600) == [256, 512, 600]
    assert result["last"] == [525.5, 1525.5]  # tokens 451 .. 600, the same in both


def test_a_perfect_reader_finds_every_needle(monkeypatch, held_out):
    target, tokenizer = open_target("default")
    texts = [encode(tokenizer, d.text)[:700] for d in held_out if len(d.text) > 4000][:2]
    seen = []

    def reader(target, prompts, request):
        items = []
        for prompt in prompts:
            lines = tokenizer.decode(prompt).split("\n")
            cue = lines[-1]
            (value,) = {line.removeprefix(cue) for line in lines[:-1] if line.startswith(cue)}
            seen.append(len(prompt))
            items.append(encode(tokenizer, value if distance == 40 else value[:5] + "x"))
        return Generation(items, Trace())

    monkeypatch.setattr(recall, "generate", reader)
    settings = RecallSettings(**SMALL)
    for distance in (40, 300):
        result = find_needles(target, tokenizer, texts, distance, settings)
        wanted = (4, 1.0) if distance == 40 else (0, round(5 / 6, 4))
        assert (result["found"], result["digits"]) == wanted and result["of"] == 4
    assert min(seen[4:]) - max(seen[:4]) > 250


def test_a_report_and_its_resumption(tmp_path, monkeypatch, held_out):
    target, tokenizer = open_target("default")
    measured = []
    honest = recall.find_needles

    def once(target, tokenizer, texts, distance, settings):
        measured.append(distance)
        if measured == [40, 300]:
            raise KeyboardInterrupt
        return honest(target, tokenizer, texts, distance, settings)

    monkeypatch.setattr(recall, "find_needles", once)
    with pytest.raises(KeyboardInterrupt):
        run_recall(target, tokenizer, held_out, RecallSettings(**SMALL), tmp_path, QUIET)
    report = run_recall(target, tokenizer, held_out, RecallSettings(**SMALL), tmp_path, QUIET)
    assert measured == [40, 300, 300]
    assert [(r["begin"], r["end"]) for r in report["loss"]] == [(0, 256), (256, 512), (512, 600)]
    assert all(1 < r["nats"] < 20 for r in report["loss"])
    PAGE.write(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recall.png", "report.json", "report.md"]
    assert "| 512 .. 600 |" in PAGE.markdown(report) and len(needle_table(report)) == 5


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"length": 400}, "length 400: at least 512, and four times near 128"),
        ({"distances": (0,)}, "of at least 1 token"),
        ({"needles": 5}, "needles 5 that fill batches of 2"),
        ({"texts": 0}, "texts 0: it must be at least 1"),
        ({"texts": 10**4}, "10000 are wanted"),
        ({"length": 10**6}, "positions end at"),
    ],
)
def test_settings_that_cannot_be(message, error, tmp_path, held_out):
    target, tokenizer = open_target("default")
    with pytest.raises(ValueError, match=error):
        settings = RecallSettings(**SMALL | message)
        run_recall(target, tokenizer, held_out, settings, tmp_path, QUIET)
