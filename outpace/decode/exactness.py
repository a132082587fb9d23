"""Whether the rows of a verify pass have the bits of one-token steps, which exact speculation rests on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.kv.base import KVCache
from outpace.kv.tree import Tree
from outpace.models.decoder import Target
from outpace.ops.sampling import generator

WIDTHS = tuple(range(1, 33))  # tokens of a pass
BATCHES = (255, 256, 257)  # sequences of one token: the edges of tiles of 256 rows
TEXTS, PROMPT = 3, 21  # texts of random tokens, and how many of them are the prompt

Rows = tuple[Tensor, Tensor]  # hidden [B,n,C] and logits [B,n,V]


def why_inexact(target: Target, sequences: int = 1) -> str | None:
    """Why drafts could change what this target writes for so many sequences at once, for people; None where
    they do not."""
    wrong = check_rows(target, sequences)
    if not wrong:
        return None
    kind, some = str(target.decoder.dtype).removeprefix("torch."), ", ".join(wrong[:3])
    return (
        f"in {kind} on {target.device} the rows of a verify pass differ from one-token steps "
        f"({some}{', ..' if len(wrong) > 3 else ''})"
    )


@torch.inference_mode()
def check_rows(
    target: Target,
    sequences: int = 1,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = (),
    trees: bool = True,
) -> list[str]:
    """Passes of `widths` tokens, as a chain and with `trees` as one of a single path, against one-token steps
    over the same texts of random tokens; and a token of `batches` sequences against the same of one. Hidden
    states and logits are compared in bytes. -> what differs, each in a few words."""
    most, wrong = max(widths), dict[str, None]()
    for seed in range(TEXTS):
        size = sequences, PROMPT + most
        tokens = torch.randint(target.config.vocab_size, size, generator=generator(seed)).to(target.device)
        prompt, rest = tokens[:, :PROMPT], tokens[:, PROMPT:]
        cache = _after(target, prompt, most, 1)
        steps = [_rows(target, rest[:, at : at + 1], cache) for at in range(most)]
        alone = torch.cat([hidden for hidden, _ in steps], 1), torch.cat([logits for _, logits in steps], 1)
        passes = _after(target, prompt, most, most)
        for n in widths:
            path = Tree(torch.tensor([[0, *range(n - 1)]] * sequences, device=target.device))
            for kind, tree in (("a chain", None), ("a tree", path))[: 1 + trees]:
                got = _rows(target, rest[:, :n], passes, tree)
                passes.rewind([PROMPT] * sequences)
                if not _same(got, alone):
                    wrong[f"{kind} of {n}"] = None
        if batches:
            one = _after(target, prompt[:1], most, 1)
        for n in batches:
            hidden, logits = _rows(target, rest[:1, :1].expand(n, -1), _copies(target, one, n))
            if not all(_same((hidden[b : b + 1], logits[b : b + 1]), alone) for b in range(n)):
                wrong[f"a batch of {n}"] = None
    return list(wrong)


def _after(target: Target, prompt: Tensor, most: int, block: int) -> KVCache:
    """A cache with the prompt, made as the loop makes it for drafts of `block` positions, 1 for none."""
    length = prompt.shape[1] + most + (block if block > 1 else 0)
    cache = target.make_cache(len(prompt), length, slack=block)
    target(prompt, cache)
    return cache


def _copies(target: Target, one: KVCache, n: int) -> KVCache:
    """The cache of one sequence, `n` times."""
    many = target.make_cache(n, one.length, slack=1)
    for whole, memory in zip(many.layers, one.layers, strict=True):
        for a, b in zip(whole.parts, memory.parts, strict=True):
            a.copy_(b.expand_as(a))
    many.lengths = one.lengths * n
    return many


def _rows(target: Target, tokens: Tensor, cache: KVCache, tree: Tree | None = None) -> Rows:
    out = target(tokens, cache, tree=tree, logits=True)
    return out.hidden, out.logits


def _same(got: Rows, wanted: Rows) -> bool:
    return all(torch.equal(a, b[: len(a), : a.shape[1]]) for a, b in zip(got, wanted, strict=True))
