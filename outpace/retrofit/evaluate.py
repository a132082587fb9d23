"""Evaluation of a retrofit on real text: held-out loss, KL to the original, same top-1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.models.attention import DecoderBlock
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.text.corpus import Document
from outpace.text.tokenizer import encode

PIECE = 256  # tokens per chunk of logits


def texts_of(
    tokenizer: Any, documents: Sequence[Document], count: int, row_tokens: int, seed: int
) -> list[list[int]]:
    """The first `row_tokens` tokens of `count` documents, at random. Raises ValueError where fewer are long
    enough."""
    order = torch.randperm(len(documents), generator=seeded(seed)).tolist()
    items: list[list[int]] = []
    for i in order:
        if len(items) == count:
            return items
        ids = encode(tokenizer, documents[i].text)
        if len(ids) >= row_tokens:
            items.append(ids[:row_tokens])
    if len(items) < count:
        raise ValueError(
            f"corpus: {len(items)} files have {row_tokens} tokens, and {count} are wanted: "
            "lower rows or row_tokens, or name a larger --corpus"
        )
    return items


@torch.inference_mode()
def evaluate(
    target: Decoder,
    texts: list[list[int]],
    before: list[Tensor] | None = None,
    prompts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Held-out loss in nats per token; and against `before`, the log-probabilities of another target on the
    same texts, the mean KL(before || this) and the share of tokens with the same top-1. `prompts`: how many
    tokens of each text are read and not counted, at least one."""
    kept, nll, kl, same, total = [], 0.0, 0.0, 0, 0
    for n, text in enumerate(texts):
        tokens = torch.tensor([text], device=target.device)
        first = 1 if prompts is None else prompts[n]
        hidden = target(tokens[:, :-1]).hidden[0, first - 1 :]
        chunks = []
        for begin in range(0, len(hidden), PIECE):
            logp = target.logits(hidden[begin : begin + PIECE]).float().log_softmax(-1)
            labels = tokens[0, first + begin : first + begin + len(logp)]
            nll -= float(logp.gather(1, labels[:, None]).sum())
            if before is not None:
                old = before[n][begin : begin + PIECE]
                kl += float((old.exp() * (old - logp)).sum())
                same += int((old.argmax(-1) == logp.argmax(-1)).sum())
            chunks.append(logp)
        kept.append(torch.cat(chunks))
        total += len(hidden)
    values: dict[str, Any] = {"nats_per_token": round(nll / total, 5), "log_probabilities": kept}
    if before is not None:
        values |= {"kl": round(kl / total, 5), "same_likeliest": round(same / total, 5)}
    return values


@torch.no_grad()
def residual_states(target: Decoder, rows: Tensor) -> list[Tensor]:
    """rows [B, T] int64, texts from their beginnings -> the residual stream [B, T, C] before the first
    layer and behind every one; the target runs as it is switched."""
    aux = target(rows, aux=range(target.config.num_layers)).aux
    assert aux is not None
    return [target.embed(rows), *aux]


@torch.no_grad()
def attention_input(target: Decoder, layer: int, states: list[Tensor]) -> Tensor:
    """[B, T, C]: the input of the layer's attention, from `residual_states`."""
    block = target.layers[layer]
    assert isinstance(block, DecoderBlock)
    normed: Tensor = block.input_layernorm(states[layer])
    return normed
