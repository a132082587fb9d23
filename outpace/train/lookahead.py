"""Multi-token prediction as an auxiliary loss, so that the states of a layer say more than the next token."""

import torch
from torch import Tensor, nn

from outpace.models.blocks import RMSNorm
from outpace.ops.linear import linear
from outpace.train.losses import chunked_nll
from outpace.train.splice import UNTAUGHT


class Lookahead(nn.Module):
    """A matrix for each token after the next, between a layer's output and the target's own head: Gloeckle et
    al. 2024 (arXiv 2404.19737), with matrices for their layers. It is left behind after training; what drafts
    read is the states that it has formed."""

    def __init__(self, hidden_size: int, tokens: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, 1e-5)
        self.matrices = nn.Parameter(torch.eye(hidden_size).repeat(tokens, 1, 1))

    def forward(self, x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        """x [B,T,C], head [V,C], labels [B,T] of the next token at each place -> [tokens]: the mean negative
        log-likelihood of the 2nd, 3rd .. token from there.

        A place counts where both its next token and the one predicted are taught: before a splice nothing
        tells where it will be.
        """
        normed, found = self.norm(x), []
        for further, matrix in enumerate(self.matrices, start=1):
            later = labels[:, further:]
            taught = (labels[:, :-further] != UNTAUGHT) & (later != UNTAUGHT)
            states = linear(normed[:, :-further][taught], matrix)
            found.append(chunked_nll(states, head, later[taught]).mean())
        return torch.stack(found)
