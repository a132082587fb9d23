"""A draft's vocabulary and the target's: what is chosen among the few is named among the many."""

import torch
from torch import Tensor

from outpace.drafts.sampler import DraftSampler, Greedy, Sampled

NAMELESS = (Greedy, Sampled)  # they look at logits alone, so that fewer of them give the same answer


class DraftVocabulary:
    """ids [N] int64: the target's token of each row of the draft's head; None: the same. `size`: V."""

    def __init__(self, ids: Tensor | None, size: int) -> None:
        self.ids, self.size = ids, size
        self.rows = torch.empty(0)
        if ids is not None:
            self.rows = torch.zeros(size, dtype=torch.int64, device=ids.device)
            self.rows[ids] = torch.arange(len(ids), device=ids.device)

    def named(self, rows: Tensor) -> Tensor:
        """Rows of the head -> the target's tokens."""
        return rows if self.ids is None else self.ids[rows]

    def wide(self, narrow: Tensor, rest: float) -> Tensor:
        """[..., N] -> [..., V], `rest` at the tokens that the draft cannot say."""
        if self.ids is None:
            return narrow
        return narrow.new_full((*narrow.shape[:-1], self.size), rest).index_copy_(-1, self.ids, narrow)

    def choose(self, sampler: DraftSampler, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """`DraftSampler.tokens` of logits [B, n, N]: the target's tokens [B, n], and q [B, n, V]."""
        if self.ids is None:
            return sampler.tokens(logits, depth)
        if isinstance(sampler, NAMELESS):
            rows, q = sampler.tokens(logits, depth)
            return self.named(rows), None if q is None else self.wide(q, 0.0)
        return sampler.tokens(self.wide(logits, -torch.inf), depth)

    def log_probabilities(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """logits [B, n, N], the target's tokens [B, n] -> [B, n] float32; -inf where it has no word, NaN in a
        row that holds NaN."""
        logits = logits.float()
        rows = tokens if self.ids is None else self.rows[tokens]
        result = logits.gather(-1, rows[..., None])[..., 0]
        if self.ids is not None:
            result = result.masked_fill(self.named(rows) != tokens, -torch.inf)
        return result - logits.logsumexp(-1)

    def scores(self, sampler: DraftSampler, logits: Tensor, depth: int, *, level: bool = False) -> Tensor:
        """logits [B, n, N] -> `DraftSampler.scores` of the head's rows [B, n, N]."""
        if self.ids is None or isinstance(sampler, NAMELESS):
            return sampler.scores(logits, depth, level=level)
        return sampler.scores(self.wide(logits, -torch.inf), depth, level=level)[..., self.ids]
