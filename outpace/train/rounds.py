"""Training anchors at the positions where decoding steps would begin."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.ops.blocks import Layout


class Rounds:
    """A round begins at the token that the one before proposed wrong, or at the bonus: at hard places, seldom
    those that anchors drawn anywhere in a text fall on. So whenever a text is seen again, its blocks are
    where those of the last time ended; two that met become one, and the place of the other is drawn again.
    """

    def __init__(self, samples: int, count: int) -> None:
        self.begins = torch.full((samples, count), -1, dtype=torch.int32)  # -1: none yet

    def of(self, sample: int, prompt_length: int) -> Tensor:
        """Positions [n] int64, repetitions included: decoding's first round begins with the response."""
        value = self.begins[sample]
        return torch.cat((value[value >= 0].long(), torch.tensor([prompt_length])))

    def ended(self, samples: Sequence[int], layout: Layout, hits: Tensor) -> None:
        """hits [A, n] of a step's blocks, those of samples[i] being layout.first[i] to layout.first[i + 1]:
        the next begin behind what was accepted, and the token that decoding puts after it."""
        nexts = (layout.seen + hits.long().cumprod(1).sum(1) + 1).int()
        for i, sample in enumerate(samples):
            value = nexts[layout.first[i] : layout.first[i + 1]]
            self.begins[sample] = -1
            self.begins[sample, : len(value)] = value

    def state_dict(self) -> dict[str, Any]:
        return {"begins": self.begins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = state["begins"]
