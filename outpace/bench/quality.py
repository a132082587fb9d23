"""What a change of the target costs: held-out loss, divergence, its own greedy text, needles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from outpace.bench.prompts import held_out_prompts
from outpace.bench.recall import RecallSettings, long_texts, of_needles
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.retrofit.evaluate import evaluate
from outpace.text.corpus import Document


@dataclass(frozen=True, kw_only=True)
class QualitySettings:
    """`texts` held-out files of `length` tokens; greedy answers of `new_tokens` to `prompts` held-out prompts
    of `prompt_tokens`; `needles` asked for at each of `distances`."""

    texts: int = 4
    length: int = 4096
    prompts: int = 8
    prompt_tokens: int = 2048
    new_tokens: int = 128
    needles: int = 16
    distances: tuple[int, ...] = (256, 2048)
    seed: int = 1

    def __post_init__(self) -> None:
        for name, least in (("texts", 1), ("prompts", 1), ("new_tokens", 1), ("needles", 0), ("length", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"quality: {name} {getattr(self, name)}: it must be at least {least}")
        if self.needles % min(8, self.needles or 1):
            raise ValueError(f"quality: needles {self.needles}: eight are asked for at a time")


class Quality:
    """Judges one target in different states against its first one. What is read is the same for all."""

    def __init__(
        self,
        target: Decoder,
        tokenizer: Tokenizer,
        documents: Sequence[Document],
        settings: QualitySettings,
    ) -> None:
        """The first state is the target's at this call. Raises ValueError where there is too little text."""
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        s = settings
        self.texts = long_texts(tokenizer, documents, s.length, s.texts)
        self.prompts = held_out_prompts(tokenizer, documents, s.prompts, s.prompt_tokens)
        self.first = evaluate(target, self.texts)
        self.answers = self._answers()

    def _answers(self) -> list[list[int]]:
        request = Request(max_new_tokens=self.settings.new_tokens)
        return [generate(self.target, [prompt], request).tokens[0] for prompt in self.prompts]

    def of_first(self) -> dict[str, Any]:
        nats = self.first["nats_per_token"]
        return {"nats": nats, "kl": 0.0, "same_likeliest": 1.0, "agreement": 1.0} | self._needles()

    def now(self) -> dict[str, Any]:
        """nats per token; kl(first || now); same_likeliest token; agreement, the share of greedy answers up
        to their first difference; needles found, all distances together."""
        value = evaluate(self.target, self.texts, self.first["log_probabilities"])
        agreed = [alike(a, b) / len(a) for a, b in zip(self.answers, self._answers(), strict=True)]
        return {
            "nats": value["nats_per_token"],
            "kl": value["kl"],
            "same_likeliest": value["same_likeliest"],
            "agreement": round(sum(agreed) / len(agreed), 4),
        } | self._needles()

    def _needles(self) -> dict[str, Any]:
        s = self.settings
        if not s.needles:
            return {"needles": []}
        asked = RecallSettings(needles=s.needles, distances=s.distances, batch=min(8, s.needles), seed=s.seed)
        return {
            "needles": [of_needles(self.target, self.tokenizer, self.texts, n, asked) for n in s.distances]
        }


def alike(a: list[int], b: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def needle_counts(row: dict[str, Any]) -> str | None:
    """Of a report's row with a "quality": found of how many, at each distance."""
    return ", ".join(f"{n['found']} of {n['of']}" for n in row["quality"]["needles"]) or None


@torch.inference_mode()
def remembered(target: Decoder, length: int) -> dict[str, float]:
    """bytes_per_token: what a token adds to the memory as it is now switched; bytes_read: what the step after
    `length` tokens reads, on the average over these; cache_bytes: of a cache of that length."""
    config = target.config
    full = config.full_layers
    size = torch.empty((), dtype=target.dtype).element_size()
    kept = sum(config.kv_numbers(i) + config.index_numbers(i) for i in full)
    read = 0.0
    for i in full:
        indexed = config.use_dsa and i in config.dsa_layers
        share = config.dsa_keep.most(length) / length if indexed else 1.0
        read += config.index_numbers(i) + share * config.kv_numbers(i)
    cache = target.make_cache(1, length)
    return {"bytes_per_token": size * kept, "bytes_read": size * read, "cache_bytes": cache.nbytes}
