"""Optional parts of a DFlash: convolutions and a selector (DFlash 2), Markov and confidence heads (DSpark).

Sources: inco.ai/blog/dflash2; DSpark, arXiv 2607.05147.
"""

import torch
from torch import Tensor, nn

from outpace.drafts.dflash_config import DFlashConfig
from outpace.models.blocks import Linear
from outpace.ops.block_conv import block_conv
from outpace.ops.candidates import pair_scores
from outpace.ops.linear import linear

BEFORE, AFTER = 0, 1  # sides of a sublayer


class BlockConv(nn.Module):
    """The convolutions around one sublayer. Both sides' coefficients are read off the sublayer's input:

        delta = kernel_projection(x) [.., 2, taps, G];  y = sublayer(conv(x, base[0], delta[0]));
        out = conv(y, base[1], delta[1])

    At the start base is 1 at tap 0 and everything else 0: the draft computes what it did without.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        C, taps = config.hidden_size, config.conv_kernel_size
        self.groups = C // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, C))
        self.kernel_projection = Linear(C, 2 * taps * self.groups)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., B, C], a block of B rows per leading index -> what the sublayer takes [..., B, C], and
        delta [..., B, 2, taps, G] for `after`."""
        delta = self.kernel_projection(x).unflatten(-1, (2, -1, self.groups))
        return block_conv(x, self.base_kernel[BEFORE], delta, BEFORE), delta

    def after(self, y: Tensor, delta: Tensor) -> Tensor:
        return block_conv(y, self.base_kernel[AFTER], delta, AFTER)

    @torch.no_grad()
    def reset(self) -> None:
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1
        assert isinstance(self.kernel_projection.weight, Tensor)
        self.kernel_projection.weight.zero_()


class Selector(nn.Module):
    """Of the `selector_top_k` most probable tokens of each position, ranks b after predecessor a by

        S_t(a, b) = U_t(b) + <A[a] * (H h_t), B[b]>,  U_t the draft's own logits

    Both codebooks have a row per target token. At the start B is 0 and nothing changes.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        V, r = config.vocab_size, config.selector_rank
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(V, r))  # A
        self.successor_codebook = nn.Parameter(torch.empty(V, r))  # B
        self.hidden_projection = Linear(config.hidden_size, r)  # H

    def scores(self, previous: Tensor, ids: Tensor, values: Tensor, h: Tensor) -> Tensor:
        """previous [...], candidates `ids` and their logits `values` [..., k], h = H hidden [..., r] -> S
        [..., k] float32."""
        books = self.predecessor_codebook, self.successor_codebook
        return pair_scores(previous, ids, values, h, *books)

    @torch.no_grad()
    def reset(self, rng: torch.Generator) -> None:
        A, H = self.predecessor_codebook, self.hidden_projection.weight
        assert isinstance(H, Tensor)
        A.copy_(torch.randn(A.shape, generator=rng) * 0.02)
        H.copy_(torch.randn(H.shape, generator=rng) * H.shape[1] ** -0.5)
        self.successor_codebook.zero_()


class MarkovHead(nn.Module):
    """A bias on the logits from the predecessor: b(a, .) = e W_2^T with e = W_1[a]; gated,
    e = sigmoid(W_g [h; W_1[a]]) * W_1[a]. W_1 has a row per target token, W_2 one per token that the draft
    can say. At the start W_2 is 0 and nothing changes."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        r = config.markov_rank
        self.markov_w1 = nn.Parameter(torch.empty(config.vocab_size, r))
        self.markov_w2 = Linear(r, config.rows)
        self.gate = Linear(config.hidden_size + r, r) if config.markov_gated else None

    def embed(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """previous [...], hidden [..., C] -> e [..., r] in hidden's dtype."""
        e = self.markov_w1[previous].to(hidden.dtype)
        if self.gate is None:
            return e
        return torch.sigmoid(self.gate(torch.cat((hidden, e), dim=-1))) * e

    def bias(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """-> [..., draft vocabulary]."""
        return linear(self.embed(previous, hidden), self.markov_w2.weight, None, self.markov_w2.rounded)

    @torch.no_grad()
    def reset(self, rng: torch.Generator) -> None:
        self.markov_w1.copy_(torch.randn(self.markov_w1.shape, generator=rng) * 0.02)
        for part in (self.markov_w2, self.gate):
            if part is not None:
                assert isinstance(part.weight, Tensor)
                part.weight.zero_()


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w^T [h_k; e]): the chance that the draft token at position k is accepted, the ones
    before it given. e means the predecessor: the row of the Markov head's W_1 or of the selector's A, where
    the draft has one."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size + config.previous_rank, 1, True)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """hidden [..., C], previous [..., r] -> w^T [h; e] [...] float32, before the sigmoid."""
        given = hidden if previous is None else torch.cat((hidden, previous.to(hidden.dtype)), dim=-1)
        return self.proj(given).squeeze(-1).float()

    @torch.no_grad()
    def reset(self) -> None:
        for p in self.parameters():
            p.zero_()
