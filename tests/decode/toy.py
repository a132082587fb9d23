"""A target and a draft that are tables over a tiny vocabulary: thousands of rows, every chance known."""

import math

import torch

from outpace.drafts.base import Proposal
from outpace.ops.sampling import IN_PROMPT, OUTPUT, probabilities

V = 4
PROMPT = [2]
# parents by position; the children of a node are drawn alike
SHAPES = {
    "chain": None,
    "wide": [0, 0, 0, 1, 1, 2, 2],
    "woven": [0, 0, 1, 0, 3, 1],
}


class Toy:
    """Logits after each text of 0, 1 or 2 tokens behind PROMPT, for the target and the draft; `apart` states
    how far the draft's are from the target's."""

    def __init__(self, seed=0, apart=1.0):
        rng = torch.Generator().manual_seed(seed)
        self.target = [torch.randn([V] * (n + 1), generator=rng) * 1.3 for n in range(3)]
        self.draft = [t + apart * torch.randn(t.shape, generator=rng) for t in self.target]

    def p(self, how):
        """The exact distribution of the three tokens after PROMPT, [V^3] float64."""
        texts = torch.cartesian_prod(*[torch.arange(V)] * 3)
        total = torch.ones(len(texts), dtype=torch.float64)
        for n in range(3):
            logits = self.target[n][tuple(texts[:, i] for i in range(n))].expand(len(texts), V)
            seen = torch.zeros(len(texts), V, dtype=torch.int32)
            seen[:, PROMPT] = IN_PROMPT
            seen.scatter_add_(1, texts[:, :n], torch.full_like(texts[:, :n], OUTPUT, dtype=torch.int32))
            total *= probabilities(logits, how, seen).gather(1, texts[:, n : n + 1])[:, 0].double()
        return total

    def propose(self, sampler, shape, rows, counts):
        """A chain of two draft tokens, or a tree: drawn node by node, or the best few by their scores."""
        parents = SHAPES[shape] or [0, 0, 1]
        N = len(parents)
        last = torch.full((rows, 1), PROMPT[-1])
        tokens, depth, q = [last[:, 0]], [0], [torch.zeros(rows, V)]
        for c in range(1, N):
            up, siblings = parents[c], parents[1:c].count(parents[c])
            path = []
            while up:
                path, up = [tokens[up], *path], parents[up]
            depth.append(len(path) + 1)
            logits = self.draft[len(path)][tuple(path)].expand(rows, V)[:, None]
            guess, drawn_from = sampler.tokens(logits, depth[-1])
            if drawn_from is not None:
                q.append(drawn_from[:, 0])
            elif SHAPES[shape]:
                guess = sampler.scores(logits, depth[-1]).topk(siblings + 1).indices[..., -1]
            tokens.append(guess[:, 0])
        tree = None if SHAPES[shape] is None else torch.tensor(parents).expand(rows, N)
        drawn = torch.stack(q, dim=1) if len(q) == N else None
        return Proposal(torch.stack(tokens, dim=1), counts or [N] * rows, tree, drawn)

    def verify_logits(self, proposal):
        """[B, N, V], the target's after each position."""
        parents = [0, 0, 1] if proposal.parents is None else proposal.parents[0].tolist()
        rows, items = len(proposal.tokens), []
        for c in range(len(parents)):
            path = []
            while c:
                path, c = [proposal.tokens[:, c], *path], parents[c]
            items.append(self.target[len(path)][tuple(path)].expand(rows, V))
        return torch.stack(items, dim=1)

    def after(self, texts):
        """Logits [B, V] after texts [B, 2] of which -1 means what is not there yet."""
        first, second = texts.clamp(min=0).T
        both = self.target[2][first, second]
        one = torch.where(texts[:, 1:] < 0, self.target[1][first], both)
        return torch.where(texts[:, :1] < 0, self.target[0], one)


def play(toy, judge, shape, rows, counts=None, change=lambda proposal: proposal):
    """One round from PROMPT and plain draws up to three tokens -> texts [rows, 3], mean draft tokens
    accepted."""
    proposal = change(toy.propose(judge.sampler, shape, rows, counts))
    result = judge.verify(proposal, toy.verify_logits(proposal))
    texts = [list(item[:3]) for item in result.tokens]
    while min(map(len, texts)) < 3:
        known = torch.tensor([[*t, -1, -1][:2] for t in texts])
        for text, token in zip(texts, judge.draw(toy.after(known)).tolist(), strict=True):
            if len(text) < 3:
                text.append(token)
    return torch.tensor(texts), sum(len(path) - 1 for path in result.path) / rows


def surprise(draws, p):
    """Chi-square of draws (numbers of cells) against p, as standard deviations (Wilson-Hilferty); rare cells
    are pooled. A draw of what p excludes is infinitely surprising."""
    n = len(draws)
    counts = torch.bincount(draws, minlength=len(p)).double()
    if counts[p < 1e-12].any():
        return math.inf
    expected = p.double() * n
    rare = expected < 8
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if expected[-1] < 1e-9:
        counts, expected = counts[:-1], expected[:-1]
    k = len(counts) - 1
    if not k:
        return 0.0
    x = float(((counts - expected) ** 2 / expected).sum())
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def cells(texts):
    return texts @ torch.tensor([V * V, V, 1])
