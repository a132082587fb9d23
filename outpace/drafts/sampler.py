"""Draft samplers: greedy, sampled, or coupled with the target's Gumbel noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.ops import sampling as noise
from outpace.ops.sampling import Sampling, draw, greedy, probabilities


class DraftSampler(Protocol):
    """`depth` is how many tokens after the last verified one a draft token is (>= 1). V is the target's
    vocabulary; a token that is not offered has the logit -inf. `scores` divides logits by `temperature`."""

    @property
    def temperature(self) -> float | Tensor: ...

    def tokens(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """logits [B, n, V] of draft tokens at depth .. depth + n - 1 -> tokens [B, n] int64, and q [B, n, V]
        float32 where they were drawn from it: each independently, and all of them must be proposed."""
        ...

    def scores(self, logits: Tensor, depth: int, *, level: bool = False) -> Tensor:
        """[B, n, V] of depth .. depth + n - 1, or with `level` all of that depth, -> [B, n, V] float32 by
        which a tree ranks the followers of a node: log-probabilities, or what means them. At most 0;
        -inf where a token is not offered."""
        ...


@dataclass(frozen=True)
class Greedy:
    """The argmax. `temperature` is the target's, as far as scores go: it decides how flat the followers
    are."""

    temperature: float = 1.0

    def tokens(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        return greedy(logits), None

    def scores(self, logits: Tensor, depth: int, *, level: bool = False) -> Tensor:
        return (logits.float() / self.temperature).log_softmax(-1)


@dataclass(frozen=True)
class Sampled:
    """A draw from the draft's own distribution, and that distribution, cut as it was when it was drawn from.

    `sampling` is the target's without the repetition penalty, perhaps with a temperature of the draft's own.
    A tree that ranks followers by `scores` draws nothing, and must not say that it did (q None).
    """

    sampling: Sampling
    rng: torch.Generator | None

    def tokens(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        q = probabilities(logits, self.sampling)
        # a draw from NaN is past the last token: some token, until the loop refuses the proposal for its q
        return draw(q, self.rng).clamp_(max=q.shape[-1] - 1), q

    def scores(self, logits: Tensor, depth: int, *, level: bool = False) -> Tensor:
        return (logits.float() / self.temperature).log_softmax(-1)

    @property
    def temperature(self) -> float:
        return self.sampling.temperature


@dataclass(frozen=True)
class GumbelCoupled:
    """The argmax of log q plus the noise that the target will add to log p at the same place (arXiv
    2408.07978): the draft token is the target's token with probability (1 - TV) / (1 + TV) or more.

    `streams` [B] and `places` [B] int64: the noise of each row, and where its next token is in its text.
    """

    sampling: Sampling
    key: int | Tensor
    streams: Tensor
    places: Tensor

    def tokens(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        return noise.sample(logits, self.sampling, self.keys(logits.shape[1], depth)), None

    def scores(self, logits: Tensor, depth: int, *, level: bool = False) -> Tensor:
        """Normalised, so that a child stays below its parent: with equal noise on both sides, the logits of
        who wins. Nothing is cut: a tree has room for what the draft alone would leave out, and keeps more."""
        return self._perturbed(logits.float() / self.temperature, depth, level).log_softmax(-1)

    @property
    def temperature(self) -> float:
        return self.sampling.temperature

    def keys(self, n: int, depth: int = 1) -> Tensor:
        """[B, n] int64: of the noise of tokens depth .. depth + n - 1 places ahead."""
        return self._keys(torch.arange(depth - 1, depth - 1 + n, device=self.places.device))

    def _keys(self, ahead: Tensor) -> Tensor:
        return noise.keys(self.key, self.streams[:, None], self.places[:, None] + ahead)

    def noise(self, ids: Tensor, vocab_size: int) -> Tensor:
        """ids [B, n, k] of tokens 1 .. n places ahead -> the noise of each there [B, n, k] float32: for a
        draft that chooses among a few, as `tokens` would among all."""
        still = torch.zeros(*ids.shape[:2], vocab_size, device=ids.device)
        return self._perturbed(still, 1).gather(-1, ids)

    def _perturbed(self, scaled: Tensor, depth: int, level: bool = False) -> Tensor:
        n = scaled.shape[1]
        ahead = depth - 1 + (torch.arange(n, device=scaled.device) * (not level))
        return noise.perturbed(scaled, self._keys(ahead))


@dataclass(frozen=True)
class RowSamplers:
    """Every row by its own; none of them may say what it drew from."""

    samplers: tuple[DraftSampler, ...]

    @staticmethod
    def of(samplers: Sequence[DraftSampler]) -> DraftSampler:
        """One for all rows where they are alike."""
        first = samplers[0]
        alike = len(samplers) == 1 or (isinstance(first, Greedy) and all(s == first for s in samplers))
        return first if alike else RowSamplers(tuple(samplers))

    def tokens(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        chosen = [s.tokens(logits[b : b + 1], depth) for b, s in enumerate(self.samplers)]
        assert all(q is None for _, q in chosen)
        return torch.cat([tokens for tokens, _ in chosen]), None

    def scores(self, logits: Tensor, depth: int, *, level: bool = False) -> Tensor:
        return torch.cat(
            [s.scores(logits[b : b + 1], depth, level=level) for b, s in enumerate(self.samplers)]
        )

    @property
    def temperature(self) -> Tensor:
        """[B, 1, 1, 1]."""
        return torch.tensor([s.temperature for s in self.samplers])[:, None, None, None]


def coupling(sampler: DraftSampler, rows: int, n: int) -> tuple[list[float], Tensor | None] | None:
    """How each row's next n draft tokens are chosen: its temperature, 0 for the most probable ones, and the
    keys of the noise [rows, n] int64, None where no row has any. None where some are chosen otherwise."""
    if isinstance(sampler, Greedy):
        return [0.0] * rows, None
    if isinstance(sampler, GumbelCoupled) and sampler.sampling.is_softmax:
        return [sampler.temperature] * rows, sampler.keys(n)
    if not isinstance(sampler, RowSamplers):
        return None
    temperatures, parts = list[float](), list[Tensor]()
    for own in sampler.samplers:
        row = coupling(own, 1, n)
        if row is None:
            return None
        temperatures += row[0]
        parts.append(torch.zeros(1, n, dtype=torch.int64) if row[1] is None else row[1])
    return temperatures, torch.cat(parts)
