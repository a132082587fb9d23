"""One round of a chain at temperature 0, of tensors alone: draft, verify, accept, commit."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.kv.metadata import StepMetadata
from outpace.models.decoder import Decoder
from outpace.models.static_step import StaticStep

MODELS = "", "target", "draft"  # of Committed.damaged


class State(nn.Module):
    """What a round finds and leaves, of each of B rows.

    last: the last token of its text, which is not remembered yet. starts: tokens that are. kept: how many of
    the last round's; the draft observes them with `aux` [n,B,N,C], the target's hidden states at them, and
    `following` [B,N], its tokens after them. left: tokens to be written; 0 when the row is done. The host
    knows of stop tokens, a round later.
    """

    last: Tensor
    starts: Tensor
    kept: Tensor
    left: Tensor
    following: Tensor
    aux: Tensor

    def __init__(self, target: Decoder, batch: int, width: int, layers: int) -> None:
        super().__init__()
        for name in ("last", "starts", "kept", "left"):
            self.register_buffer(name, torch.zeros(batch, dtype=torch.int64, device=target.device))
        following = torch.zeros(batch, width, dtype=torch.int64, device=target.device)
        self.register_buffer("following", following)
        size = layers, batch, width, target.config.hidden_size
        self.register_buffer("aux", torch.zeros(size, dtype=target.dtype, device=target.device))

    def begin(self, last: Tensor, starts: list[int], left: list[int]) -> None:
        """A generation: `starts` tokens of each row are remembered, its prompt."""
        self.last.copy_(last)
        self.starts.copy_(torch.tensor(starts))
        self.left.copy_(torch.tensor(left))
        self.kept.zero_()


class StaticDraft(nn.Module):
    """A draft over what its session remembers, as `StaticStep` is a target over its cache."""

    def begin(self, state: State, last: Tensor) -> None:
        """The session has observed the prompts, after which `last` [B] comes."""

    def forward(self, state: State, n: int) -> tuple[Tensor, Tensor]:
        """Observes the last round, and guesses n - 1 tokens after `state.last` -> [B, n - 1] int64, and the
        sum of how sure it is of them."""
        raise NotImplementedError


class Committed(NamedTuple):
    """numbers [B, 2N + 2] int64, of each row: the N verified tokens, the target's token after each, how many
    of the latter continue the text, and the index in `MODELS` of one that is damaged."""

    numbers: Tensor


class Round(nn.Module):
    """One round of N positions over the buffers of a target's step, a draft and `state`: no number is read on
    the host. N = 1 is autoregressive decoding. `width`: positions that the target's step is padded to."""

    def __init__(self, step: StaticStep, draft: StaticDraft | None, state: State, n: int, width: int) -> None:
        super().__init__()
        self.step, self.draft, self.state, self.n, self.width = step, draft, state, n, width

    def forward(self) -> Committed:
        state, n = self.state, self.n
        tokens, sure = state.last[:, None], torch.zeros((), device=state.last.device)
        if self.draft is not None:
            guesses, sure = self.draft(state, n)
            tokens = torch.cat((tokens, guesses), 1)
        running = state.left > 0
        padded = F.pad(tokens, (0, self.width - n))
        out = self.step(padded, state.starts, torch.where(running, n, 0))
        best, scores = out.best[:, :n], out.logits[:, :n]
        accepted = (tokens[:, 1:] == best[:, :-1]).long().cumprod(1).sum(1)
        kept = torch.where(running, accepted + 1, 0)
        state.last.copy_(torch.where(running, best.gather(1, accepted[:, None])[:, 0], state.last))
        state.starts.add_(kept)
        state.kept.copy_(kept)
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
