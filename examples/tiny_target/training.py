"""Training of a small target from raw text: the embedded model, and the micro model of the tests."""

import math
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.tiny_target.model import Learner, TargetShape, balance_loss, first_model, round_experts
from examples.tiny_target.own_text import answers, cut_prompts, own_text_losses
from examples.tiny_target.recall import echo_rows, recall_rows
from examples.tiny_target.splice import UNTAUGHT, cut_pieces, splice
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.text.corpus import Document
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id
from outpace.train.checkpoint import OneFile
from outpace.train.data import rows_of_step, token_stream
from outpace.train.losses import chunked_nll
from outpace.train.trainer import fit, training_folder


@dataclass(frozen=True, kw_only=True)
class TargetRecipe(TargetShape):
    """How to train a target from raw text. Fields of the recipes in this folder."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    head_dim: int = 32
    expert_size: int = 192
    steps: int = 1500
    row_tokens: int = 1024  # rows of this length ..
    long_row_tokens: int = 4096  # .. and of this one for the last `long_share` of the steps
    long_share: float = 0.1
    step_tokens: int = 16384
    focus: tuple[str, ...] = ()  # globs of files ("asyncio/*") that ..
    focus_share: float = 0.0  # .. this share of the rows is cut from; the rest from all files
    splice_share: float = 0.0  # of the rows in focus: they begin with any file's text (train/splice.py) ..
    splice_own: float = 0.0  # .. and this share of them with what the model generates to that
    recall_share: float = 0.0  # of all rows: they end with what stood far back in them (train/recall.py) ..
    recall_random: float = 0.0  # .. and this share of them is of random tokens
    text: float = 1.0  # weight of the loss on the rows
    # weight of the loss on what the model's own greedy text generates for the first time ..
    settle: float = 0.0
    unlikelihood: float = 0.0  # .. and of the loss on its loops ..
    own_every: int = 3  # .. in every so many steps
    own_rows: int = 16
    own_prompt: int = 128
    own_tokens: int = 192
    own_ngram: int = 8
    save_every: int = 100
    eval_every: int = 250

    def __post_init__(self) -> None:
        super().__post_init__()
        for share in ("recall_share", "recall_random"):
            if getattr(self, share) > 1:
                raise ValueError(f"{share} {getattr(self, share)}: a share, up to 1, of the rows")
        if self.splice_own > 1:
            raise ValueError(f"splice_own {self.splice_own}: a share, up to 1, of the spliced rows")
        if self.splice_own and self.own_prompt + self.own_tokens >= self.row_tokens:
            raise ValueError(
                f"splice_own {self.splice_own}: own_prompt {self.own_prompt} and "
                f"own_tokens {self.own_tokens} leave no room for a passage in row_tokens {self.row_tokens}"
            )
        if self.splice_share > 1 or (self.splice_share and not self.focus):
            raise ValueError(f"splice_share {self.splice_share}: a share, up to 1, of the rows in focus")
        if self.focus_share > 1 or bool(self.focus) != bool(self.focus_share):
            raise ValueError(
                f"focus {list(self.focus)} with focus_share {self.focus_share}: globs of files and the "
                "share (up to 1) of the rows that they give go together"
            )


def bits_per_byte(
    model: Decoder, tokenizer: Tokenizer, documents: list[Document], row_tokens: int = 2048
) -> float:
    """Held-out loss in bits per UTF-8 byte; every document by itself, cut into rows."""
    end = token_id(tokenizer, END_OF_TEXT)
    nll, size = 0.0, 0
    with torch.inference_mode():
        for document in documents:
            ids = [end, *encode(tokenizer, document.text)]
            size += len(document.text.encode())
            for i in range(0, len(ids) - 1, row_tokens):
                part = torch.tensor(ids[i : i + row_tokens + 1])[None]
                hidden = model(part[:, :-1]).hidden[0]
                nll += float(chunked_nll(hidden, model.dense_head, part[0, 1:]).sum())
    return nll / math.log(2) / size


def _text_rows(
    model: Decoder, tokenizer: Tokenizer, streams: list[np.ndarray], recipe: TargetRecipe, step: int
) -> tuple[Tensor, Tensor, int]:
    """The step's inputs and labels [rows, length]: of all files, of those in focus, spliced ones, and last
    those to recall from; -> and how many these are."""
    long = step >= round(recipe.steps * (1 - recipe.long_share))
    length = recipe.long_row_tokens if long else recipe.row_tokens
    rows = max(1, recipe.step_tokens // length)
    # a step may have but one row: over the steps the shares come out
    before, after = (round(n * rows * recipe.recall_share) for n in (step, step + 1))
    recalled = after - before
    everywhere, focused = split_rows(rows - recalled, recipe.focus_share)
    focused, spliced = split_rows(focused, recipe.splice_share)
    cut = [
        rows_of_step(stream, length, n, step * n, recipe.seed)
        for stream, n in zip(streams, (everywhere, focused), strict=False)
        if n
    ]
    if spliced:
        rng = seeded(recipe.seed, 3, step)
        theirs, own = split_rows(spliced, recipe.splice_own)
        pieces = cut_pieces(streams[0], theirs, length // 16, length // 2, rng)
        pieces += _own_pieces(model, streams[0], own, recipe, rng)
        cut.append(splice(pieces, streams[1], length))
    if recalled:
        rng = seeded(recipe.seed, 4, step)
        written, random = split_rows(recalled, recipe.recall_random)
        if written:
            cut.append(recall_rows(tokenizer, streams[0], written, length, rng))
        if random:
            cut.append(echo_rows(model.config.vocab_size, random, length, rng))
    inputs, labels = (torch.cat(x) for x in zip(*cut, strict=True))
    return inputs, labels, recalled


def _own_pieces(
    model: Decoder, stream: np.ndarray, count: int, recipe: TargetRecipe, rng: torch.Generator
) -> list[np.ndarray]:
    """Prompts and the beginnings of what the model generates to them: where its own words may lead it."""
    if not count:
        return []
    prompts = cut_prompts(stream, count, recipe.own_prompt, rng)
    value = _own_answers(model, prompts, recipe.own_tokens)
    kept = [int(torch.randint(len(s) + 1, (1,), generator=rng)) for s in value]
    return [np.asarray(p + s[:n]) for p, s, n in zip(prompts, value, kept, strict=True)]


def _own_answers(model: Decoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    rounded = round_experts(model, False)  # decoding through the rounding is ten times slower
    value = answers(model, prompts, new_tokens)
    round_experts(model, rounded)
    return value


def _learn_text(
    model: Decoder, tokenizer: Tokenizer, streams: list[np.ndarray], recipe: TargetRecipe, step: int
) -> dict[str, Any]:
    """Gradients of the loss on the step's rows, added to what is there; -> metrics."""
    inputs, labels, recalled = _text_rows(model, tokenizer, streams, recipe, step)
    out = model(inputs, routing=True)
    training = labels != UNTAUGHT
    nll = chunked_nll(out.hidden[training], model.dense_head, labels[training])
    loss = nll.mean()
    metrics = {"loss": loss.item()}
    if recalled:
        metrics["recall"] = nll[-int(training[-recalled:].sum()) :].mean().item()
    if not out.routing:
        (recipe.text * loss).backward()
        return metrics
    balance = balance_loss(out.routing, recipe.experts_per_token)
    (recipe.text * loss + recipe.balance * balance).backward()
    return metrics | {"balance": balance.item()}


def _learn_own_text(model: Decoder, stream: np.ndarray, recipe: TargetRecipe, step: int) -> dict[str, Any]:
    """Gradients of the losses on what the model itself generates, added to what is there; -> metrics."""
    if not (recipe.unlikelihood or recipe.settle) or step % recipe.own_every:
        return {}
    prompts = cut_prompts(stream, recipe.own_rows, recipe.own_prompt, seeded(recipe.seed, step))
    value = _own_answers(model, prompts, recipe.own_tokens)
    unlikely, likely, repeats = own_text_losses(model, prompts, value, recipe.own_ngram)
    (recipe.unlikelihood * unlikely + recipe.settle * likely).backward()
    return {"repeats": repeats, "unlikelihood": unlikely.item(), "own": likely.item()}


def train_target(
    recipe: TargetRecipe,
    tokenizer: Tokenizer,
    train: list[Document],
    held_out: list[Document],
    folder: Path,
    *,
    init: Decoder | None = None,
    stop_after: int | None = None,
) -> Decoder:
    """Train, resuming from folder/checkpoint.pt where there is one, and return the model (dense).

    `init`: a trained target whose weights are the start, with optimizers that remember nothing. Raises
    ValueError where its config is not the recipe's.
    """
    model = first_model(recipe, token_id(tokenizer, END_OF_TEXT), init)
    learner = Learner(model, recipe, recipe.steps)
    streams = [token_stream(tokenizer, train, recipe.seed)]
    if recipe.focus:
        streams.append(token_stream(tokenizer, matching(train, recipe.focus), recipe.seed))

    def update(step: int) -> dict[str, Any]:
        learner.begin(step)
        metrics = _learn_own_text(model, streams[0], recipe, step) | _learn_text(
            model, tokenizer, streams, recipe, step
        )
        learner.update()
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            metrics["bits_per_byte"] = bits_per_byte(model, tokenizer, held_out[::8])
        return metrics

    with training_folder(folder):
        fit(folder, recipe, update, OneFile(folder, learner.parts()), title="target", stop_after=stop_after)
    model.dtype = torch.float32
    return model


def split_rows(rows: int, focus_share: float) -> tuple[int, int]:
    """How many of a step's rows come from all files, and how many from those in focus."""
    focused = round(rows * focus_share)
    return rows - focused, focused


def matching(documents: list[Document], globs: tuple[str, ...]) -> list[Document]:
    """The documents where the name fits a glob. Raises ValueError for a glob that fits none."""
    for glob in globs:
        if not any(fnmatch(d.name, glob) for d in documents):
            example = documents[0].name
            raise ValueError(f"focus {glob!r} fits none of the {len(documents)} files, such as {example}")
    return [d for d in documents if any(fnmatch(d.name, glob) for glob in globs)]
