"""Random trees of new tokens, and what they are taken apart into: ancestors, root-to-leaf paths."""

import random

import torch


def parents_of(shape, N, seed=0):
    """Parents of N positions. shape: "any" (uniform), "deep" (mostly a chain), "wide" (mostly children of the
    root), "chain"."""
    rng, items = random.Random(f"{shape}{N}{seed}"), [0]
    for column in range(1, N):
        low, high = {
            "any": (0, column - 1),
            "deep": (max(0, column - 2), column - 1),
            "wide": (0, min(column - 1, 3)),
            "chain": (column - 1, column - 1),
        }[shape]
        items.append(rng.randint(low, high))
    return items


def ancestors(parents, column):
    """From the root to the position itself."""
    path = [column]
    while parents[path[0]] != path[0]:
        path.insert(0, parents[path[0]])
    return path


def leaf_paths(parents, count):
    """Root to leaf, over the first `count` positions."""
    inner = {parents[c] for c in range(1, count)}
    return [ancestors(parents, c) for c in range(count) if c not in inner or count == 1]


def padded(rows, N):
    """Lists of parents -> [B, N] int64; padding follows itself."""
    return torch.tensor([[*row, *range(len(row), N)] for row in rows])
