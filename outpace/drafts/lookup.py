"""Prompt lookup: propose what followed the last occurrence of the present n-gram. No training, no model."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outpace.checkpoint.hf import read_config
from outpace.checkpoint.open import LoadError, open_checkpoint, to_tensor
from outpace.checkpoint.save import save_checkpoint
from outpace.drafts.base import HostProposal, Proposal, roots
from outpace.drafts.sampler import DraftSampler
from outpace.drafts.tree import assembled, check_nodes
from outpace.ops.suffixes import Suffixes


@dataclass(frozen=True)
class NGram:
    """Looks for the longest n-gram first, from `longest` down to `shortest`."""

    block_size: int = 8
    longest: int = 4
    shortest: int = 2
    target_layer_ids: tuple[int, ...] = ()

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "NGramSession":
        return NGramSession(self, batch)


class NGramSession:
    def __init__(self, draft: NGram, batch: int) -> None:
        self.draft = draft
        self.history: list[list[int]] = [[] for _ in range(batch)]
        # per row and length: n-gram -> indices of the tokens after its occurrences, the latest last
        sizes = range(draft.shortest, draft.longest + 1)
        self.seen: list[dict[int, dict[tuple[int, ...], list[int]]]] = [
            {n: {} for n in sizes} for _ in range(batch)
        ]

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        for row, seen, ids, count in zip(self.history, self.seen, tokens.tolist(), counts, strict=True):
            for token in ids[:count]:
                for n, table in seen.items():
                    if len(row) >= n:
                        table.setdefault(tuple(row[-n:]), []).append(len(row))
                row.append(token)

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """The text has no logits: there is nothing to choose by."""
        guesses = [[token, *self._continuation(b, token)][:width] for b, token in enumerate(last.tolist())]
        counts = [len(g) for g in guesses]
        padded = [g + [0] * (max(counts) - len(g)) for g in guesses]
        return HostProposal(padded, counts, None, None, last.device)

    def rewind(self, lengths: list[int]) -> None:
        for row, seen, length in zip(self.history, self.seen, lengths, strict=True):
            while len(row) > length:
                row.pop()
                for n, table in seen.items():
                    if len(row) >= n:
                        table[tuple(row[-n:])].pop()

    def select(self, batch_indices: list[int]) -> None:
        self.history = [self.history[b] for b in batch_indices]
        self.seen = [self.seen[b] for b in batch_indices]

    def _continuation(self, b: int, last: int) -> list[int]:
        text = [*self.history[b][-self.draft.longest :], last]
        for n in sorted(self.seen[b], reverse=True):
            starts = self.seen[b][n].get(tuple(text[-n:])) if len(text) >= n else None
            if starts:
                return (self.history[b] + [last])[starts[-1] : starts[-1] + self.draft.block_size - 1]
        return []


ARCHITECTURE = "OutpaceSuffix"
NODES = 12


@dataclass(frozen=True, eq=False)
class Suffix:
    """Proposes trees of `nodes` positions, root included. Nothing is drawn and nothing is read of the target:
    q is None, and rejection rules take its draft tokens as certain ones. Raises ValueError for sizes that
    make no tree."""

    answers: Suffixes
    vocab_size: int
    nodes: int = NODES
    target_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_nodes(self.nodes)

    @property
    def block_size(self) -> int:
        return self.nodes

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "SuffixSession":
        return SuffixSession(self.answers, batch, length)


class SuffixSession:
    def __init__(self, answers: Suffixes, batch: int, length: int) -> None:
        self.answers = answers
        # on the CPU, where lookup runs, whatever the target's device
        self.history = torch.empty(batch, length + 1, dtype=torch.int32)
        self.cells = self.history.numpy()  # the same memory: a tensor is slow to write a few numbers to
        self.lengths = [0] * batch

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        for b, (ids, count) in enumerate(zip(tokens.tolist(), counts, strict=True)):
            n = self.lengths[b]
            self.cells[b, n : n + count] = ids[:count]
            self.lengths[b] = n + count

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """Positions in descending order of survival, as counted: the first n of them are the best tree of
        n."""
        rows = []
        for b, (n, token) in enumerate(zip(self.lengths, last.tolist(), strict=True)):
            self.cells[b, n] = token
            result = self.answers.grow(self.history[b, : n + 1], width - 1)
            rows.append(([token, *result.tokens], [0, *result.parents], [1.0, *result.reach]))
        return assembled(rows, last.device)

    def rewind(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)

    def select(self, batch_indices: list[int]) -> None:
        self.history, self.lengths = self.history[batch_indices], [self.lengths[b] for b in batch_indices]
        self.cells = self.history.numpy()


def save_suffix(answers: Suffixes, vocab_size: int, folder: Path) -> None:
    """folder/config.json and model.safetensors; what stood there before goes when these are whole."""
    config = {"architectures": [ARCHITECTURE], "vocab_size": vocab_size}
    text = answers.text.short() if vocab_size <= torch.iinfo(torch.int16).max else answers.text
    save_checkpoint(folder, config, [("text", text), ("order", answers.order)])


def is_suffix(folder: Path) -> bool:
    return (folder / "config.json").is_file() and read_config(folder).get("architectures") == [ARCHITECTURE]


def load_suffix(folder: Path, vocab_size: int, nodes: int = NODES) -> Suffix:
    """`vocab_size`: the target's. Raises LoadError, naming the folder, for answers of another vocabulary and
    for files that `save_suffix` did not write; ValueError for `nodes` that make no tree."""
    ours = read_config(folder).get("vocab_size")
    if ours != vocab_size:
        raise LoadError(
            f"{folder} holds answers of a target with vocab_size {ours}; this one has {vocab_size}: build it "
            "from this target's cache (outpace train suffix)"
        )
    files = open_checkpoint(folder)
    names = set(files.names())
    if names != {"text", "order"}:
        raise LoadError(f"{folder} holds {', '.join(sorted(names))[:80]}, where text and order belong")
    text, order = (to_tensor(files.get(name)) for name in ("text", "order"))
    n = len(text) if text.dim() == 1 else 0
    whole = text.dtype in (torch.int16, torch.int32) and order.dtype == torch.int32
    if not n or not whole or order.shape != text.shape:
        raise LoadError(f"{folder}: text and order are two lists of one length, of integers, and not empty")
    if int(text.min()) < -1 or int(text.max()) >= vocab_size:
        raise LoadError(f"{folder}: text has tokens outside the vocabulary of {vocab_size}")
    if int(order.min()) < 0 or int(order.max()) >= n or bool((order.bincount(minlength=n) != 1).any()):
        raise LoadError(f"{folder}: order does not name every place of the text once")
    return Suffix(Suffixes(text.int(), order), vocab_size, nodes)


@dataclass(frozen=True)
class NullDraft:
    """Proposes the last verified token and nothing after it. Remembers nothing: it is its own session."""

    block_size: int = 1
    target_layer_ids: tuple[int, ...] = ()

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "NullDraft":
        return self

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        pass

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        return roots(last)

    def rewind(self, lengths: list[int]) -> None:
        pass

    def select(self, batch_indices: list[int]) -> None:
        pass
