"""One round of a chain, of tensors alone: draft, verify, accept, commit."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.decode.acceptance import AcceptanceRule, Gumbel, coupled
from outpace.drafts.sampler import DraftSampler, Greedy, GumbelCoupled
from outpace.kv.metadata import StepMetadata
from outpace.models.decoder import Decoder
from outpace.models.static_step import StaticStep
from outpace.ops.sampling import Sampling, greedy, keys

MODELS = "", "target", "draft"  # of Committed.damaged


class State(nn.Module):
    """What a round finds and leaves, of each of B rows.

    last: the last token of its text, which is not remembered yet. starts: tokens that are. kept: how many of
    the last round's; the draft observes them with `aux` [n,B,N,C], the target's hidden states at them, and
    `following` [B,N], its tokens after them. left: tokens to be written; 0 when the row is done. The host
    knows of stop tokens, a round later. key [], streams, places: of the noise, see `Gumbel`.
    """

    last: Tensor
    starts: Tensor
    kept: Tensor
    left: Tensor
    key: Tensor
    streams: Tensor
    places: Tensor
    following: Tensor
    aux: Tensor

    def __init__(self, target: Decoder, batch: int, width: int, layers: int) -> None:
        super().__init__()
        for name in ("last", "starts", "kept", "left", "streams", "places"):
            self.register_buffer(name, torch.zeros(batch, dtype=torch.int64, device=target.device))
        self.register_buffer("key", torch.zeros((), dtype=torch.int64, device=target.device))
        following = torch.zeros(batch, width, dtype=torch.int64, device=target.device)
        self.register_buffer("following", following)
        size = layers, batch, width, target.config.hidden_size
        self.register_buffer("aux", torch.zeros(size, dtype=target.dtype, device=target.device))

    def begin(self, last: Tensor, starts: list[int], left: list[int], rule: AcceptanceRule) -> None:
        """A generation: `starts` tokens of each row are remembered, its prompt, and `rule` has drawn one."""
        self.last.copy_(last)
        self.starts.copy_(torch.tensor(starts))
        self.left.copy_(torch.tensor(left))
        self.kept.zero_()
        if isinstance(rule, Gumbel):
            self.key.fill_(rule.key)
            self.streams.copy_(torch.tensor(rule.streams))
            self.places.copy_(torch.tensor(rule.places))


class StaticDraft(nn.Module):
    """A draft over what its session remembers, as `StaticStep` is a target over its cache."""

    def begin(self, state: State, last: Tensor) -> None:
        """The session has observed the prompts, after which `last` [B] comes."""

    def forward(self, state: State, n: int, sampler: DraftSampler) -> tuple[Tensor, Tensor]:
        """Observes the last round, and guesses n - 1 tokens after `state.last` -> [B, n - 1] int64, and the
        sum of how sure it is of them."""
        raise NotImplementedError


class Committed(NamedTuple):
    """numbers [B, 2N + 2] int64, of each row: the N verified tokens, the target's token after each, how many
    of the latter continue the text, and the index in `MODELS` of one that is damaged."""

    numbers: Tensor


class Choice(NamedTuple):
    """How the target and the draft choose a token: of the logits and the noise of its place, as `Gumbel`."""

    target: Sampling
    draft: Sampling

    def of(self, state: State, logits: Tensor) -> Tensor:
        """logits [B,N,V] after the last tokens of each row -> the target's tokens [B,N]."""
        ahead = torch.arange(logits.shape[1], device=logits.device)
        places = keys(state.key, state.streams[:, None], state.places[:, None] + ahead)
        return greedy(coupled(logits, self.target, None, places))

    def sampler(self, state: State) -> DraftSampler:
        return GumbelCoupled(self.draft, state.key, state.streams, state.places)


class Round(nn.Module):
    """One round of N positions over the buffers of a target's step, a draft and `state`: no number is read on
    the host. N = 1 is autoregressive decoding. `width`: positions that the target's step is padded to.
    `choice`: None at temperature 0."""

    def __init__(
        self,
        step: StaticStep,
        draft: StaticDraft | None,
        state: State,
        n: int,
        width: int,
        choice: Choice | None = None,
    ) -> None:
        super().__init__()
        self.step, self.draft, self.state = step, draft, state
        self.n, self.width, self.choice = n, width, choice

    def forward(self) -> Committed:
        state, n = self.state, self.n
        tokens, sure = state.last[:, None], torch.zeros((), device=state.last.device)
        if self.draft is not None:
            guesses, sure = self.draft(state, n, self.choice.sampler(state) if self.choice else Greedy())
            tokens = torch.cat((tokens, guesses), 1)
        running = state.left > 0
        padded = F.pad(tokens, (0, self.width - n))
        out = self.step(padded, state.starts, torch.where(running, n, 0))
        scores = out.logits[:, :n]
        best = self.choice.of(state, scores) if self.choice else out.best[:, :n]
        accepted = (tokens[:, 1:] == best[:, :-1]).long().cumprod(1).sum(1)
        kept = torch.where(running, accepted + 1, 0)
        state.last.copy_(torch.where(running, best.gather(1, accepted[:, None])[:, 0], state.last))
        state.starts.add_(kept)
        state.kept.copy_(kept)
        state.places.add_(kept)
        state.following[:, :n] = best
        state.left.copy_((state.left - kept).clamp(min=0))
        if out.aux is not None:
            state.aux[:, :, :n] = out.aux[:, :, :n]
        # as `check_finite`: a NaN or an infinity anywhere
        damaged = torch.where(scores.amax().isfinite(), torch.where(sure.isfinite(), 0, 2), 1)
        return Committed(torch.cat((tokens, best, kept[:, None], damaged.expand(len(kept), 1)), 1))


def step_of(T: int, start: Tensor, counts: Tensor, both_ways: bool = False) -> StepMetadata:
    """T positions after start [B] remembered ones, of which counts [B] are real."""
    return StepMetadata((), (), T, start.device, both_ways, on_device=(start, counts))
