"""One timed generation, and our own methods as functions from prompts to one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outpace.decode.generate import generate
from outpace.decode.request import Generation, OnTokens, Request
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft
from outpace.drafts.dflash import DFlash
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.models.decoder import Decoder
from outpace.ops.sampling import Sampling

Prompts = Sequence[Sequence[int]]
TREE = 16  # nodes of the draft tree that `dflash-tree` proposes, root included


@dataclass(frozen=True, kw_only=True)
class Timed:
    """`first_s` runs from the call to the first token of all rows, `decode_s` from there to the return:
    the same two clocks for every method, ours or another library's."""

    tokens: list[list[int]]
    first_s: float
    decode_s: float
    trace: Trace

    @property
    def decoded(self) -> int:
        """Tokens emitted within decode_s: all but the first of each row."""
        return sum(len(row) - 1 for row in self.tokens)


Method = Callable[[Prompts, int, int], Timed]  # prompts of equal length, new tokens, seed


def timed(generate: Callable[[OnTokens], Generation]) -> Timed:
    first = 0.0

    def on_tokens(row: int, tokens: list[int]) -> None:
        nonlocal first
        first = first or time.perf_counter()

    began = time.perf_counter()
    out = generate(on_tokens)
    ended = time.perf_counter()
    return Timed(tokens=out.tokens, first_s=first - began, decode_s=ended - first, trace=out.trace)


def our_methods(
    target: Decoder, draft: DFlash | None, suffix: Draft | None, temperature: float, ngram_block: int
) -> dict[str, Method]:
    """`plain`, `ngram`, `suffix` with an index, `dflash` and `dflash-tree` with a DFlash. No stop tokens: all
    methods generate equally many."""
    drafts: dict[str, Draft] = {"ngram": NGram(block_size=ngram_block)}
    if draft is not None:
        drafts["dflash"] = draft.bind(target)
        drafts["dflash-tree"] = DDTree(draft.bind(target), TREE)
    if suffix is not None:
        drafts["suffix"] = suffix
    sampling = Sampling(temperature=temperature)

    def run_plain(prompts: Prompts, new_tokens: int, seed: int) -> Timed:
        request = Request(max_new_tokens=new_tokens, sampling=sampling)
        rng = torch.Generator(target.device).manual_seed(seed)
        return timed(lambda note: generate(target, prompts, request, rng=rng, on_tokens=note))

    def with_draft(chosen: Draft) -> Method:
        def run(prompts: Prompts, new_tokens: int, seed: int) -> Timed:
            request = Request(max_new_tokens=new_tokens, sampling=sampling)
            rng = torch.Generator(target.device).manual_seed(seed)
            return timed(lambda note: generate(target, prompts, request, chosen, rng=rng, on_tokens=note))

        return run

    return {"plain": run_plain} | {name: with_draft(d) for name, d in drafts.items()}
