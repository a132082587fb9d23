"""Decoding with EAGLE-3: verified states into its cache, then a chain, a dynamic tree, or one pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.drafts.base import Proposal
from outpace.drafts.deferred import States, joined, stacked
from outpace.drafts.eagle3 import Attend, Eagle3
from outpace.drafts.eagle3_native import NativeChain, NativeLayers
from outpace.drafts.native import address, native, program_of
from outpace.drafts.rows import CacheRows
from outpace.drafts.sampler import DraftSampler, Greedy
from outpace.drafts.tree import MOST_NODES, Growth, best_first, check_nodes
from outpace.drafts.vocab import DraftVocabulary
from outpace.kv.base import KVCache
from outpace.kv.metadata import StepMetadata
from outpace.models.decoder import Decoder
from outpace.ops.attention import attend_view

MOST_ROWS = 4096  # draft tokens of a step; every one has a place in the cache
MAX_PENDING = 16  # verified tokens pending until the next proposal; more need not run through the last layer


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """What is proposed. branch 1: a chain of `depth` draft tokens. Above: a tree of `nodes` positions, root
    included, of the best among all children seen, `branch` of each of the `branch` nodes that a level runs;
    one pass alone ranks whole paths, by the product of their draft tokens' probabilities."""

    depth: int = 5
    branch: int = 1
    nodes: int = 0  # 0: as many as the chain has

    def __post_init__(self) -> None:
        if self.depth < 1 or self.branch < 1:
            raise ValueError(f"depth {self.depth}, branch {self.branch}: each must be at least 1")
        if self.branch > 1:
            if not self.nodes:
                raise ValueError(f"topk {self.branch} grows a tree: give num_draft_tokens too")
            check_nodes(self.nodes)
        if self.branch == 1 and self.nodes not in (0, self.depth + 1):
            raise ValueError(
                f"branch 1 makes a chain, and one of {self.depth} draft tokens has {self.depth + 1} "
                f"nodes, not "
                f"{self.nodes}"
            )
        if self.depth >= MOST_NODES:
            raise ValueError(f"depth {self.depth}: a round verifies at most {MOST_NODES} nodes")
        if self.depth * self.branch > MOST_ROWS:
            raise ValueError(
                f"depth {self.depth}, branch {self.branch}: a round would run {self.depth * self.branch} "
                f"draft tokens, and {MOST_ROWS} are the most"
            )

    @classmethod
    def of(cls, nodes: int = 0, depth: int = 0, branch: int = 0) -> "TreeShape":
        """From what a person states, 0 being "as usual": a tree of so many nodes, else a chain."""
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
    shape: TreeShape = field(default_factory=TreeShape)

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

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "Eagle3Session":
        return Eagle3Session(self, batch, length, offset, slack)


class Eagle3Session(CacheRows):
    """The cache has one entry for every pair (state of the token at t, token at t + 1) of verified text, at
    index and rotary position t. The pair of the newest state is pending until its token is known, which is
    when the next proposal is requested. Proposed tokens are written behind the verified pairs and never
    committed: the next append overwrites them.
    """

    def __init__(self, bound: BoundEagle3, batch: int, length: int, offset: int, slack: int = 0) -> None:
        self.draft, self.target, self.shape = bound.draft, bound.target, bound.shape
        config, shape = self.draft.config, self.shape
        self.vocab = DraftVocabulary(self.draft.target_ids(), config.vocab_size)
        self.masks = self.draft.masks(self.target) if config.parallel else None
        guessed = shape.depth * (1 if config.parallel else shape.branch)
        self.scale = config.head_dim**-0.5
        self.in_one_piece = self.draft.in_one_piece
        self.cache = KVCache(
            batch,
            length + guessed,
            guessed + slack,
            (config.sliding_window,) * config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            offset=offset,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        self.pending: list[States] = []  # the newest verified tokens, whose pairs are not in the cache
        self.pending_of: dict[int, States] = {}  # the same by row, where texts come and go

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        assert aux is not None, "EAGLE-3 reads the target's hidden states"
        if not max(counts):
            return
        self.pending.append(States(tokens, aux, counts))
        if sum(max(states.counts) for states in self.pending) > MAX_PENDING:
            self.flush()

    def rewind(self, lengths: list[int]) -> None:
        """A row of n observed tokens has n pairs once its next token is known: after a proposal."""
        self.cache.rewind(lengths)
        self.pending = []

    def select(self, batch_indices: list[int]) -> None:
        self.cache.select(batch_indices)
        self.pending = [states.select(batch_indices) for states in self.pending]

    @contextmanager
    def of(self, rows: Sequence[int]) -> Iterator[Self]:
        with super().of(rows) as own:
            kept = [self.pending_of.pop(row, None) for row in rows]
            own.pending = [stacked(kept)] if any(kept) else []
            yield own
            if own.pending:
                states = joined(own.pending)
                self.pending_of |= {row: states.select([b]) for b, row in enumerate(rows)}

    def reuse(self, source: int, row: int, count: int) -> None:
        super().reuse(source, row, count)
        self.pending_of.pop(row, None)

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        depth = min(self.shape.depth, width - 1)
        if self.masks is not None:
            return self._at_once(last, self.masks, width, depth, sampler)
        hidden = self._run_pairs(last)
        if self.shape.branch > 1:
            return self._tree(last, hidden, width, depth, sampler)
        return self._chain(last, hidden, depth, sampler)

    # ---- verified tokens -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Run every pair whose token is known; the newest state of each row stays pending."""
        if not self.pending:
            return
        states = joined(self.pending)
        assert states.aux is not None
        known = [count - 1 for count in states.counts]
        if max(known):
            step = self.cache.begin(max(known), known)
            self.remember(states.tokens[:, 1:], states.aux[:, :, :-1], step)
            self.cache.advance(step)
        self.pending = [states.at([[n] for n in known])]

    def remember(self, following: Tensor, aux: Tensor, step: StepMetadata) -> None:
        """The pairs that `step` appends: the target's states aux [n,B,T,C], the tokens after them [B,T]."""
        embeds, features = self.draft.embed(following, self.target), self.draft.fuse(aux)
        cos, sin = self.draft.rope(step.positions + self.cache.offset)
        layers = self.cache.layers
        self.draft.remember(
            embeds, features, cos, sin, self._attend(step), lambda i, k, v: layers[i].append(k, v, step)
        )

    def _newest(self, counts: list[int]) -> tuple[Tensor, Tensor]:
        newest = torch.tensor(counts, device=self.cache.device) - 1
        return torch.arange(len(counts), device=self.cache.device), newest

    def _pairs(self, last: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """All pending pairs, `last` being the token of the newest: embeds, features [B,T,C], counts."""
        assert self.pending, "a proposal follows an observation"
        states = joined(self.pending)
        assert states.aux is not None
        following = F.pad(states.tokens[:, 1:], (0, 1))
        following[self._newest(states.counts)] = last
        self.pending = []
        return self.draft.embed(following, self.target), self.draft.fuse(states.aux), states.counts

    def _run_pairs(self, last: Tensor) -> Tensor:
        """-> hidden [B,1,C] of each row's newest pair, which predicts what follows `last`."""
        embeds, features, counts = self._pairs(last)
        step = self.cache.begin(max(counts), counts)
        hidden = self._run(embeds, features, step)
        self.cache.advance(step)
        return hidden[self._newest(counts)][:, None]

    def _run(self, embeds: Tensor, features: Tensor, step: StepMetadata) -> Tensor:
        draft, cache = self.draft, self.cache
        if self.in_one_piece and self._fits(step.T, step.held):
            size = cache.offset, cache.batch, step.T, step.held, step.tree is not None
            layers = program_of(draft.native_programs, NativeLayers, (draft,), *size)
            return layers.run(embeds, features, step, cache)
        return self.run(embeds, features, step)

    def run(self, embeds: Tensor, features: Tensor, step: StepMetadata) -> Tensor:
        """[B,T,C] each -> hidden [B,T,C], by the modules."""
        cos, sin = self.draft.rope(step.positions + self.cache.offset)
        return self.draft(embeds, features, cos, sin, self._attend(step))  # type: ignore[no-any-return]

    def _fits(self, T: int, held: int) -> bool:
        """Whether a program takes T new tokens of each row; a ring must keep what the first of them sees."""
        keeps = all(not m.window or held + T <= m.size - m.window + 1 for m in self.cache.layers)
        return keeps and native(self.draft.config.head_dim, self.cache, T)

    def _native_chain(self, depth: int) -> NativeChain:
        draft, target, cache = self.draft, self.target, self.cache
        size = cache.offset, cache.batch, depth
        theirs = address(target.embed_tokens.weight), address(target.head)
        parts = draft, target, self.vocab.ids
        return program_of(draft.native_programs, NativeChain, parts, *size, foreign=theirs)

    def _attend(self, step: StepMetadata) -> Attend:
        """Each layer remembers what it is given, and its queries meet what it remembers."""
        window = self.draft.config.sliding_window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            view = self.cache.layers[layer].append(k, v, step)
            return attend_view(q, view, window, None, self.scale)

        return attend

    # ---- proposals -----------------------------------------------------------------------------------

    def _chain(self, last: Tensor, hidden: Tensor, depth: int, sampler: DraftSampler) -> Proposal:
        verified = list(self.cache.lengths)
        if isinstance(sampler, Greedy) and self.in_one_piece and self._fits(depth, 0):
            return self._line(last, *self._native_chain(depth).run(hidden, verified, self.cache), None)
        logits, guesses, drawn = [], [], []
        for at in range(1, depth + 1):
            logits.append(self.draft.head(hidden, self.target))
            guess, q = self.vocab.choose(sampler, logits[-1], at)
            guesses.append(guess)
            drawn.append(q)
            if at < depth:
                step = self.cache.begin(1)
                hidden = self._run(self.draft.embed(guess, self.target), self.draft.feedback(hidden), step)
                self.cache.advance(step)
        self.cache.rewind(verified)
        qs = [q for q in drawn if q is not None]
        return self._line(last, torch.cat(logits, 1), torch.cat(guesses, 1), torch.cat(qs, 1) if qs else None)

    def _line(self, last: Tensor, logits: Tensor, guesses: Tensor, q: Tensor | None) -> Proposal:
        """logits [B,n,N] and the draft tokens [B,n] chosen of them -> one behind the other."""
        reach = self.vocab.log_probabilities(logits, guesses).cumsum(1).exp()
        tokens = torch.cat((last[:, None], guesses), dim=1)
        q = None if q is None else F.pad(q, (0, 0, 1, 0))
        counts = [tokens.shape[1]] * len(last)
        return Proposal(tokens, counts, q=q, survival=F.pad(reach, (1, 0), value=1.0))

    def _tree(self, last: Tensor, hidden: Tensor, width: int, depth: int, sampler: DraftSampler) -> Proposal:
        grown = Growth(last, self.shape.branch)  # of rows of the head
        for at in range(1, depth + 1):
            logits = self.draft.head(hidden, self.target)
            frontier = grown.expand(self.vocab.scores(sampler, logits, at, level=True))
            if at < depth:
                features = self.draft.feedback(hidden)
                row = torch.arange(len(last), device=last.device)[:, None]
                embeds = self.draft.embed(self.vocab.named(frontier.tokens), self.target)
                # the forest is never advanced: what it wrote is forgotten
                step = self.cache.begin(embeds.shape[1], tree=grown.forest)
                hidden = self._run(embeds, features[row, frontier.follows], step)
        return self._named(last, grown.proposal(width))

    def _named(self, last: Tensor, tree: Proposal) -> Proposal:
        """A tree of rows of the head -> of the target's tokens."""
        guesses = self.vocab.named(tree.tokens[:, 1:])
        tokens = torch.cat((last[:, None], guesses), dim=1)
        return Proposal(tokens, tree.counts, tree.parents, survival=tree.survival)

    def _at_once(
        self, last: Tensor, masks: tuple[Tensor, Tensor], width: int, depth: int, sampler: DraftSampler
    ) -> Proposal:
        """P-EAGLE (arXiv 2602.01469): the newest pair and, behind it, a mask for every further draft
        token."""
        embeds, features, counts = self._pairs(last)
        more = depth - 1
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
        logits = self.draft.head(hidden[row[:, None], at], self.target)
        if self.shape.branch > 1:
            scores = self.vocab.scores(sampler, logits, 1)
            return self._named(last, best_first(last, scores, width, self.shape.branch))
        return self._line(last, logits, *self.vocab.choose(sampler, logits, 1))
