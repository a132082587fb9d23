"""The coupled rule: the target's draws are a function of the seed, so every draft leads to the same text."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from outpace.decode.acceptance import VerifyResult, follow
from outpace.decode.sampling_state import SamplingState
from outpace.drafts.base import Proposal
from outpace.drafts.sampler import DraftSampler, GumbelCoupled
from outpace.ops import noise
from outpace.ops.sampling import Sampling, greedy, shaped


def key_of(rng: torch.Generator | None) -> int:
    """One draw: what all noise of a generation comes from."""
    return int(torch.randint(2**63 - 1, (), generator=rng, device="cpu" if rng is None else rng.device))


def coupled(logits: Tensor, how: Sampling, seen: Tensor | None, keys: Tensor) -> Tensor:
    """logits [..., V], keys [...] -> [..., V] float32 of which the target's token is the argmax."""
    return noise.perturbed(shaped(logits, how, seen), keys)


class Gumbel:
    """The token at place k of a row's text is argmax(log p + g), with noise g that depends on the key, the
    row's stream, k and the token alone. Autoregressive decoding and every draft, chain or tree, emit the same
    text; a draft that adds the same noise to its own log q draft tokens it more often (arXiv 2408.07978).

    The key is one draw from `rng`; the streams are the rows' numbers unless the request names them.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        rng: torch.Generator | None,
        streams: Sequence[int] = (),
        draft_temperature: float | None = None,
    ) -> None:
        self.key, self.sampling, self.state = key_of(rng), sampling, SamplingState(sampling, prompts)
        self.draft_sampling = sampling.for_draft(draft_temperature)
        self.streams, self.places = list(streams or range(len(prompts))), [0] * len(prompts)
        self.device = torch.device("cpu")  # of the logits, once some were seen

    @property
    def choice(self) -> DraftSampler:
        return GumbelCoupled(self.draft_sampling, self.key, self._on(self.streams), self._on(self.places))

    def draw(self, logits: Tensor) -> Tensor:
        self.device = logits.device
        keys = noise.keys(self.key, self._on(self.streams), self._on(self.places))
        tokens = greedy(coupled(logits, self.sampling, self.state.seen(logits), keys))
        self.places = [n + 1 for n in self.places]
        self.state.add(tokens[:, None])
        return tokens

    def verdict(self, proposal: Proposal, logits: Tensor) -> VerifyResult:
        tree = proposal.tree
        depth = torch.arange(logits.shape[1], device=logits.device) if tree is None else tree.depth
        keys = noise.keys(self.key, self._on(self.streams)[:, None], self._on(self.places)[:, None] + depth)
        seen = self.state.seen_at(proposal, logits)
        result = follow(proposal, greedy(coupled(logits, self.sampling, seen, keys)))
        self.places = [n + len(value) for n, value in zip(self.places, result.tokens, strict=True)]
        self.state.add(result.tokens)
        return result

    def fork(self) -> "Gumbel":
        forked = copy(self)
        forked.state = self.state.fork()
        return forked

    def select(self, batch_indices: list[int]) -> None:
        self.streams, self.places = (
            [self.streams[b] for b in batch_indices],
            [self.places[b] for b in batch_indices],
        )
        self.state.select(batch_indices)

    def _on(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)
