"""The suite recall: held-out loss by position, and retrieval of notes (needles) far back in the context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor

from outpace.bench import plots
from outpace.bench.report import Page, Report, table_of
from outpace.bench.run import Bar, Run, at_least
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.text.corpus import Document, note
from outpace.text.tokenizer import encode

FIRST = 256  # tokens of the first bucket; each further one is as long as all before it


@dataclass(frozen=True, kw_only=True)
class RecallSettings:
    """`texts` held-out files of `length` tokens, read from the beginning. The loss of their last quarter is
    also measured with only the `near` to 2 `near` preceding tokens, which shows the value of the earlier
    ones. `needles` notes, "name = value", at each of `distances` tokens."""

    length: int = 8192
    texts: int = 8
    near: int = 1024
    distances: tuple[int, ...] = (64, 256, 1024, 2048, 4096, 7168)
    needles: int = 24
    batch: int = 8
    chunk: int = 512
    seed: int = 1

    def __post_init__(self) -> None:
        at_least(self, "recall", texts=1, needles=1, batch=1, chunk=1, near=1)
        if self.length < max(2 * FIRST, 4 * self.near):
            raise ValueError(
                f"recall: length {self.length}: at least {2 * FIRST}, and four times near {self.near}"
            )
        if not self.distances or min(self.distances) < 1 or self.needles % self.batch:
            raise ValueError(
                f"recall: distances {list(self.distances)} of at least 1 token, and needles {self.needles} "
                f"that fill batches of {self.batch}"
            )


def run_recall(
    target: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    settings: RecallSettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report. `documents`: held-out ones. A stopped run continues from folder/progress.jsonl. Raises
    ValueError for too few files or positions."""
    longest = max(settings.length, max(settings.distances) + FIRST)
    if longest > target.config.max_position_embeddings:
        raise ValueError(
            f"recall: {longest:,} tokens, and this model's positions end at "
            f"{target.config.max_position_embeddings:,}: lower length and distances"
        )
    texts = long_texts(tokenizer, documents, settings.length + 1, settings.texts)
    run = Run(target, folder, settings=settings)
    with Bar(console, "recall", len(texts) + len(settings.distances)) as bar:

        def once(name: str, measure: Callable[[], Any]) -> Any:
            bar.step(name)
            return run.once(name, measure)

        losses = [once(f"text {i}", partial(text_loss, target, row, settings)) for i, row in enumerate(texts)]
        needles = [
            once(f"distance {n}", partial(find_needles, target, tokenizer, texts, n, settings))
            for n in settings.distances
        ]
    buckets, last = (
        [fmean(x) for x in zip(*(loss[key] for loss in losses), strict=True)] for key in losses[0]
    )
    edges = pairwise([0, *ends(settings.length)])
    loss = [{"begin": a, "end": b, "nats": round(x, 4)} for (a, b), x in zip(edges, buckets, strict=True)]
    quarter = {"all": round(last[0], 4), "near": round(last[1], 4)}
    return run.report(loss=loss, last_quarter=quarter, needles=needles)


def long_texts(
    tokenizer: Tokenizer, documents: Sequence[Document], length: int, count: int
) -> list[list[int]]:
    """The first `length` tokens of `count` held-out files. Raises ValueError where fewer are long enough."""
    texts: list[list[int]] = []
    for document in sorted(documents, key=lambda d: d.name):
        ids = encode(tokenizer, document.text)
        if len(ids) >= length and len(texts) < count:
            texts.append(ids[:length])
    if len(texts) < count:
        raise ValueError(
            f"recall: {len(texts)} held-out files have {length:,} tokens, and {count} are wanted: lower "
            "texts or length, or name a larger --corpus"
        )
    return texts


def ends(length: int) -> list[int]:
    """Ends of the position buckets: FIRST, doubled up to `length`."""
    edges = [FIRST]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    return edges


@torch.inference_mode()
def nll(target: Decoder, row: Sequence[int], chunk: int) -> Tensor:
    """Loss in nats [n - 1] of every token but the first, computed in chunks over a cache."""
    tokens = torch.tensor([row], device=target.device)
    cache, losses = target.make_cache(1, len(row)), []
    for begin in range(0, len(row) - 1, chunk):
        hidden = target(tokens[:, begin : min(begin + chunk, len(row) - 1)], cache).hidden[0]
        labels = tokens[0, begin + 1 : begin + 1 + len(hidden)]
        losses.append(F.cross_entropy(target.logits(hidden).float(), labels, reduction="none"))
    return torch.cat(losses)


def text_loss(target: Decoder, row: list[int], settings: RecallSettings) -> dict[str, list[float]]:
    """Mean loss by bucket; and of the last quarter, with all of the preceding text and with the near part
    only."""
    loss, length, near = nll(target, row, settings.chunk), settings.length, settings.near
    edges = [0, *ends(length)]
    buckets = [float(loss[a:b].mean()) for a, b in pairwise(edges)]
    begin = length - length // 4
    parts = []
    for at in range(begin, length, near):
        short = row[at - near : min(at + near, length) + 1]
        parts.append(nll(target, short, settings.chunk)[near:])
    return {"buckets": buckets, "last": [float(loss[begin:].mean()), float(torch.cat(parts).mean())]}


def find_needles(
    target: Decoder, tokenizer: Tokenizer, texts: list[list[int]], distance: int, settings: RecallSettings
) -> dict[str, Any]:
    """Prompts of a note, `distance` tokens of a held-out file, and the note's name; found where greedy
    decoding gives the note's value."""
    rng = seeded(settings.seed, distance)
    prompts, values = [], []
    for i in range(settings.needles):
        name, value = note(rng)
        text = texts[i % len(texts)]
        begin = int(torch.randint(len(text) - distance, (), generator=rng)) if len(text) > distance else 0
        cue = encode(tokenizer, f"\n{name} = ")
        filler = (text[begin:] + text)[:distance]
        prompts.append([*text[:32], *cue, *encode(tokenizer, f"{value}\n"), *filler, *cue])
        values.append(value)
    right = digits = 0
    for begin in range(0, settings.needles, settings.batch):
        some = slice(begin, begin + settings.batch)
        given = generate(target, prompts[some], Request(max_new_tokens=6)).tokens
        for tokens, value in zip(given, values[some], strict=True):
            answer = tokenizer.decode(tokens)[:6]
            right += answer == value
            digits += sum(a == b for a, b in zip(answer, value, strict=False))
    total = settings.needles
    return {"distance": distance, "found": right, "of": total, "digits": round(digits / (6 * total), 4)}


LEGEND = """\
- loss: nats per token of held-out files, read from their beginning: the mean over files of a stretch's mean.
- the last quarter: what text far back is worth to what follows.
- needles: a line `name = value` is so many tokens of a held-out file ahead of its name; found where
  greedy decoding gives all six digits of the value. One digit in ten is right by chance.
"""
loss_table = table_of(
    "loss",
    ("position", lambda r: [r["begin"], r["end"]], "{:,} .. {:,}"),
    ("loss, nats", "nats", "{:.3f}"),
)
needle_table = table_of(
    "needles",
    ("needle, tokens back", "distance", "{:,}"),
    ("found", lambda r: [r["found"], r["of"]], "{} of {}"),
    ("digits right", "digits", "{:.0%}"),
)


def _body(report: Report) -> list[str]:
    near, last = report["settings"]["near"], report["last_quarter"]
    message = (
        f"The last quarter: {last['all']:.3f} nats with all of the text, {last['near']:.3f} with the "
        f"{near:,} to {2 * near:,} tokens before each token."
    )
    return [*loss_table(report), message, "", *needle_table(report), LEGEND]


def _plot(report: Report) -> Any:
    figure, (left, right) = plots.figure(1, 2, 3.6, "A long context")
    loss, needles = report["loss"], report["needles"]
    left.plot([r["end"] for r in loss], [r["nats"] for r in loss], "o-", color=plots.BLUE, markersize=3.5)
    percent = [100 * r["found"] / r["of"] for r in needles]
    right.plot([r["distance"] for r in needles], percent, "o-", color=plots.RED, markersize=3.5)
    right.set_ylim(-3, 103)
    plots.label(left, "position", "held-out loss, nats")
    plots.label(right, "tokens back", "needles found, %")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    return figure


PAGE = Page("Recall in a long context", _body, plots={"recall.png": ("Needles and loss", _plot)})
