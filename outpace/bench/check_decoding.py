"""Gates on decoding: gold labels are all accepted, and acceptance does not move with the position."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.bench.check_forwards import CheckResult
from outpace.bench.lossless import LosslessCheck, compare
from outpace.bench.timing import Prompts
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Draft, Proposal
from outpace.drafts.sampler import DraftSampler
from outpace.models.decoder import Decoder


@dataclass(frozen=True)
class OracleDraft:
    """A draft that knows the answers: `texts` are prompts with what autoregressive decoding stated after
    them."""

    texts: list[list[int]]
    block_size: int
    target_layer_ids: tuple[int, ...] = ()

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "OracleSession":
        return OracleSession(self.texts, self.block_size, [0] * batch)


@dataclass
class OracleSession:
    texts: list[list[int]]
    block_size: int
    seen: list[int]  # verified tokens per row, the last one (the next block's anchor) not among them

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        for b, count in enumerate(counts):
            self.seen[b] += count

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        N = width
        rows = [t[n + 1 : n + N] for t, n in zip(self.texts, self.seen, strict=True)]
        counts = [1 + len(row) for row in rows]
        padded = [
            [anchor, *row, *[0] * (N - 1 - len(row))] for anchor, row in zip(last.tolist(), rows, strict=True)
        ]
        return Proposal(torch.tensor(padded, device=last.device), counts)

    def rewind(self, lengths: list[int]) -> None:
        self.seen = list(lengths)

    def select(self, batch_indices: list[int]) -> None:
        self.texts = [self.texts[b] for b in batch_indices]
        self.seen = [self.seen[b] for b in batch_indices]


def oracle_labels(target: Decoder, prompts: Prompts, block: int, new_tokens: int) -> CheckResult:
    """Autoregressive decoding's own tokens as drafts: every round must accept all block - 1 of them, in a
    batch and alone. A row that leaves the answer at a tie is counted and judged up to there."""
    answers = generate(target, prompts, Request(max_new_tokens=new_tokens + 2 * block)).tokens
    texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    total, short, rounds = LosslessCheck(), 0, 0
    for rows in [list(range(len(texts))), [0]] if len(texts) > 1 else [[0]]:
        gold = OracleDraft([texts[i] for i in rows], block)
        out = generate(target, [prompts[i] for i in rows], Request(max_new_tokens=new_tokens), gold)
        for b, i in enumerate(rows):
            check = compare(target, prompts[i], out.tokens[b], answers[i][:new_tokens])
            total += check
            lens = [row[b] for row in out.trace.accepted if row[b] >= 0]
            if check.ties:  # the round that holds the tie cannot accept all, nor can any after it
                lens = lens[: max(0, (check.checked - 2) // block)]
            rounds += len(lens)
            short += sum(n != block - 1 for n in lens)
    figures = {
        "rounds": rounds,
        "rounds_not_all_accepted": short,
        "checked": total.checked,
        "violations": total.violations,
        "ties": total.ties,
    }
    message = (
        f"{rounds - short} of {rounds} rounds accept all {block - 1}; "
        f"{total.violations} of {total.checked} tokens differ, {total.ties} ties"
    )
    passed = short == 0 and total.violations == 0 and rounds > 0
    return CheckResult("gold labels as drafts are all accepted", passed, figures, message)


def position_offsets(
    target: Decoder,
    draft: Draft | None,
    prompts: Prompts,
    offsets: Sequence[int],
    new_tokens: int,
    limit: float,
) -> CheckResult:
    """Decode the same prompts as if they began at each offset. An offset at which the model's positions
    would run out is replaced by the last one that fits."""
    name = "acceptance does not move with the position"
    if draft is None:
        return CheckResult(name, None, message="not run: no draft was given")
    last = target.config.max_position_embeddings - max(len(p) for p in prompts) - new_tokens
    used = sorted({min(offset, last) for offset in offsets} | {0})
    if last < 0 or len(used) < 2:
        return CheckResult(
            name, None, message="not run: the model's positions leave no room for another offset"
        )
    tau = {}
    for offset in used:
        request = Request(max_new_tokens=new_tokens, offset=offset)
        tau[offset] = generate(target, prompts, request, draft).trace.tau
    change = {offset: tau[offset] / tau[0] - 1 for offset in used}
    worst = max((abs(c) for c in change.values()), default=0.0)
    moved = [offset for offset in offsets if offset > last]
    figures = {
        "tau": {str(o): round(t, 4) for o, t in tau.items()},
        "relative_change": {str(o): round(c, 4) for o, c in change.items()},
        "limit": limit,
        "moved": {str(o): last for o in moved},
    }
    text = ", ".join(f"tau {tau[o]:.3f} at {o:,} ({change[o]:+.1%})" for o in used)
    if moved:
        text += f"; {', '.join(f'{o:,}' for o in moved)} became {last:,}, the last offset where the text fits"
    return CheckResult(name, worst <= limit, figures, text)
