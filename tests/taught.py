"""What a teacher cache answers, computed on the spot; and what trainings are given next to it."""

from types import SimpleNamespace
from typing import Any

import torch

TOKENIZER = SimpleNamespace(token_to_id={"<|MASK|>": 4}.get)
PROMPTS = [[7, 8, 9], [11, 12, 13, 14, 15]]


class TrainedSetup:
    """Of `texts` [T] each, states of the layers `held`; it breaks when it is asked so often."""

    def __init__(self, target, texts, held, prompt_length=3, offset=0, breaks_at=None):
        self.meta = SimpleNamespace(target_layer_ids=held, hidden_size=target.config.hidden_size)
        self.samples: list[Any] = []
        for text in texts:
            with torch.no_grad():
                out = target(text[None], aux=held, offset=offset)
            values = {"tokens": text, "prompt_length": prompt_length, "offset": offset}
            self.samples.append(SimpleNamespace(**values, aux=out.aux[:, 0], final=out.hidden[0]))
        self.asked, self.breaks_at = 0, breaks_at

    def __len__(self):
        return len(self.samples)

    def text(self, i):
        return self.samples[i].tokens, self.samples[i].prompt_length

    def sample(self, i):
        self.asked += 1
        if self.asked == self.breaks_at:
            raise KeyboardInterrupt
        return self.samples[i]
