"""EAGLE-3 at work: verified states into its memory, then a chain, a dynamic tree, or all in one pass."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.cache.kv import Cache, Step
from outpace.drafts.choice import Choice
from outpace.drafts.eagle3 import Eagle3
from outpace.drafts.proposal import Proposal
from outpace.drafts.tree import Growth, best_first
from outpace.models.decoder import Decoder
from outpace.ops.attention import attend_view

MOST_HELD = 64  # verified tokens that wait for the next proposal; a prompt's are run as they come


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is proposed. branch 1: a chain of `depth` guesses. Above: a tree of `nodes` columns, root
    included, of the best among all children seen, `branch` of each of the `branch` nodes that a level runs;
    one pass alone ranks whole paths, by the product of their guesses' probabilities."""

    depth: int = 5
    branch: int = 1
    nodes: int = 0  # 0: as many as the chain has

    def __post_init__(self) -> None:
        if self.depth < 1 or self.branch < 1:
            raise ValueError(f"depth {self.depth}, branch {self.branch}: each must be at least 1")
        if self.branch > 1 and self.nodes < 2:
            raise ValueError(f"a tree of {self.nodes} nodes: the root and one guess are the least")
        if self.branch == 1 and self.nodes not in (0, self.depth + 1):
            raise ValueError(f"a chain of {self.depth} guesses has {self.depth + 1} nodes, not {self.nodes}")

    @classmethod
    def of(cls, nodes: int = 0, depth: int = 0, branch: int = 0) -> "Shape":
        """From what a person says, 0 being "as usual": a tree of so many nodes, else a chain."""
        usual = cls()
        return cls(depth=depth or usual.depth, branch=branch or (8 if nodes else 1), nodes=nodes)

    @property
    def block_size(self) -> int:
        return self.depth + 1 if self.branch == 1 else self.nodes


@dataclass(frozen=True)
class BoundEagle3:
    """An EAGLE-3 with its target, ready to draft. Raises ValueError where the two do not fit."""

    draft: Eagle3
    target: Decoder
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        ours, theirs = self.draft.config, self.target.config
        for what, a, b in (
            ("hidden_size", ours.target_hidden_size, theirs.hidden_size),
            ("vocab_size", ours.vocab_size, theirs.vocab_size),
        ):
            if a != b:
                raise ValueError(f"this draft was made for a target with {what} {a}; this one has {b}")
        if ours.layer_ids[-1] >= theirs.num_layers:
            raise ValueError(
                f"this draft reads the target's layers {list(ours.layer_ids)}; this one has layers "
                f"0..{theirs.num_layers - 1}"
            )

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.draft.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    def begin(self, batch: int, length: int, offset: int = 0) -> "Eagle3Session":
        return Eagle3Session(self, batch, length, offset)


class Eagle3Session:
    """The memory holds one entry for every pair (state of the token at t, token at t + 1) of verified text,
    at index and rotary position t. The pair of the newest state waits until its token is known, which is
    when the next proposal is asked for. What is guessed is written behind the verified pairs and never
    kept: the next append overwrites it, so that a guessed state never outlives its round.
    """

    def __init__(self, bound: BoundEagle3, batch: int, length: int, offset: int) -> None:
        self.draft, self.target, self.shape = bound.draft, bound.target, bound.shape
        config, shape = self.draft.config, self.shape
        guessed = shape.depth * (1 if self.draft.config.parallel else shape.branch)
        self.scale = config.head_dim**-0.5
        self.cache = Cache(
            batch,
            length + guessed,
            guessed,
            (config.sliding_window,) * config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            offset=offset,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        # tokens [B,T], aux [n,B,T,C] and how many of each row, of the newest verified tokens
        self.held: list[tuple[Tensor, Tensor, list[int]]] = []

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        assert aux is not None, "EAGLE-3 reads the target's hidden states"
        width = max(counts)
        if not width:
            return
        self.held.append((tokens[:, :width], aux[:, :, :width], counts))
        if sum(piece[0].shape[1] for piece in self.held) > MOST_HELD:
            self._settle()

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)
        self.held = [(t[rows], aux[:, rows], [counts[b] for b in rows]) for t, aux, counts in self.held]

    def propose(self, last: Tensor, width: int, choice: Choice) -> Proposal:
        depth = min(self.shape.depth, width - 1)
        if self.draft.config.parallel:
            return self._at_once(last, width, depth, choice)
        hidden = self._run_pairs(last)
        if self.shape.branch > 1:
            return self._tree(last, hidden, width, depth, choice)
        return self._chain(last, hidden, depth, choice)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B,T,C] -> [B,T,V] over the target's vocabulary, -inf where the draft has no row: their
        softmax is what the draft proposes."""
        return self.draft.widen(self.draft.head(hidden, self.target))

    # ---- what is verified ----------------------------------------------------------------------------

    def _all_held(self) -> tuple[Tensor, Tensor, list[int]]:
        """The pieces as one, each row's tokens at its front."""
        assert self.held, "a proposal follows an observation"
        if len(self.held) == 1:
            tokens, aux, counts = self.held[0]
            return tokens[:, : max(counts)], aux[:, :, : max(counts)], counts
        tokens = torch.cat([piece[0] for piece in self.held], dim=1)
        aux = torch.cat([piece[1] for piece in self.held], dim=2)
        at: list[list[int]] = [[] for _ in self.cache.lengths]
        begin = 0
        for piece, _, counts in self.held:
            for b, count in enumerate(counts):
                at[b] += range(begin, begin + count)
            begin += piece.shape[1]
        total = [len(columns) for columns in at]
        padded = [columns + [0] * (max(total) - len(columns)) for columns in at]
        index = torch.tensor(padded, device=tokens.device)
        row = torch.arange(len(at), device=tokens.device)[:, None]
        return tokens[row, index], aux[:, row, index], total

    def _settle(self) -> None:
        """Run every pair whose token is known; the newest state of each row goes on waiting."""
        tokens, aux, counts = self._all_held()
        known = [count - 1 for count in counts]
        if max(known):
            embeds = self.draft.embed(tokens[:, 1:], self.target)
            step = self.cache.begin(max(known), known)
            self._run(embeds, self.draft.fuse(aux[:, :, :-1]), step)
            self.cache.advance(step)
        row, newest = self._newest(counts)
        self.held = [(tokens[row, newest][:, None], aux[:, row, newest][:, :, None], [1] * len(counts))]

    def _newest(self, counts: list[int]) -> tuple[Tensor, Tensor]:
        newest = torch.tensor(counts, device=self.cache.device) - 1
        return torch.arange(len(counts), device=self.cache.device), newest

    def _pairs(self, last: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """All that wait, `last` being the token of the newest: embeds, features [B,T,C], how many."""
        tokens, aux, counts = self._all_held()
        following = F.pad(tokens[:, 1:], (0, 1))
        following[self._newest(counts)] = last
        self.held = []
        return self.draft.embed(following, self.target), self.draft.fuse(aux), counts

    def _run_pairs(self, last: Tensor) -> Tensor:
        """-> hidden [B,1,C] of each row's newest pair, which says what follows `last`."""
        embeds, features, counts = self._pairs(last)
        step = self.cache.begin(max(counts), counts)
        hidden = self._run(embeds, features, step)
        self.cache.advance(step)
        return hidden[self._newest(counts)][:, None]

    def _run(self, embeds: Tensor, features: Tensor, step: Step) -> Tensor:
        cos, sin = self.draft.rope(step.positions + self.cache.offset)
        window = self.draft.config.sliding_window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            view = self.cache.layers[layer].append(k, v, step)
            return attend_view(q, view, step, window, None, self.scale)

        return self.draft(embeds, features, cos, sin, attend)  # type: ignore[no-any-return]

    # ---- what is guessed -----------------------------------------------------------------------------

    def _chain(self, last: Tensor, hidden: Tensor, depth: int, choice: Choice) -> Proposal:
        verified = list(self.cache.lengths)
        tokens, reach, drawn = [last[:, None]], [torch.ones_like(last, dtype=torch.float32)[:, None]], []
        for at in range(1, depth + 1):
            logits = self.logits(hidden)
            guess, q = choice.tokens(logits, at)
            tokens.append(guess)
            reach.append(reach[-1] * probability(logits, guess))
            drawn.append(q)
            if at < depth:
                step = self.cache.begin(1)
                hidden = self._run(self.draft.embed(guess, self.target), self.draft.feedback(hidden), step)
                self.cache.advance(step)
        self.cache.rewind(verified)
        survival = torch.cat(reach, dim=1)
        return Proposal(torch.cat(tokens, dim=1), [depth + 1] * len(last), q=joined(drawn), survival=survival)

    def _tree(self, last: Tensor, hidden: Tensor, width: int, depth: int, choice: Choice) -> Proposal:
        grown = Growth(last, self.shape.branch)
        for at in range(1, depth + 1):
            frontier = grown.expand(choice.scores(self.logits(hidden), at, level=True))
            if at < depth:
                features = self.draft.feedback(hidden)
                row = torch.arange(len(last), device=last.device)[:, None]
                embeds = self.draft.embed(frontier.tokens, self.target)
                # the forest is never advanced: what it wrote is forgotten
                step = self.cache.begin(embeds.shape[1], tree=grown.forest)
                hidden = self._run(embeds, features[row, frontier.follows], step)
        return grown.proposal(width)

    def _at_once(self, last: Tensor, width: int, depth: int, choice: Choice) -> Proposal:
        """P-EAGLE (arXiv 2602.01469): the newest pair and, behind it, a mask for every further guess."""
        embeds, features, counts = self._pairs(last)
        masks, more = self.draft.masks(self.target), depth - 1
        columns = torch.arange(embeds.shape[1] + more, device=last.device)
        real = (columns < torch.tensor(counts, device=last.device)[:, None])[:, :, None]
        embeds, features = (
            torch.where(real, F.pad(given, (0, 0, 0, more)), mask)
            for given, mask in zip((embeds, features), masks, strict=True)
        )
        step = self.cache.begin(len(columns), [count + more for count in counts])
        hidden = self._run(embeds, features, step)
        self.cache.advance(step)
        self.cache.rewind([n + count for n, count in zip(step.start, counts, strict=True)])
        row, newest = self._newest(counts)
        at = newest[:, None] + torch.arange(depth, device=last.device)
        logits = self.logits(hidden[row[:, None], at])
        if self.shape.branch > 1:
            return best_first(last, choice.scores(logits, 1), width, self.shape.branch)
        guesses, q = choice.tokens(logits, 1)
        reach = F.pad(probability(logits, guesses).cumprod(1), (1, 0), value=1.0)
        tokens = torch.cat((last[:, None], guesses), dim=1)
        q = None if q is None else F.pad(q, (0, 0, 1, 0))
        return Proposal(tokens, [depth + 1] * len(last), q=q, survival=reach)


def probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """[B,n,V] and [B,n] -> [B,n] float32: what the draft gives each token."""
    chosen = logits.float().gather(-1, tokens[..., None]).squeeze(-1)
    return (chosen - logits.float().logsumexp(-1)).exp()


def joined(drawn: list[Tensor | None]) -> Tensor | None:
    """One [B,1,V] per step -> [B,N,V], column 0 unused; None where nothing was drawn."""
    parts = [q for q in drawn if q is not None]
    return F.pad(torch.cat(parts, dim=1), (0, 0, 1, 0)) if parts else None
