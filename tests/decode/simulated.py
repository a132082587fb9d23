"""Decoding by dice: a cost table given by hand, draft tokens accepted by chance, a clock that adds up."""

import random

import torch

from outpace.decode.controller import Fixed
from outpace.decode.costs import Costs, Point
from outpace.drafts.base import Proposal


def table(verify, draft, rest=0.05e-3, acceptance=0.5, batch=1, show=0.0, wake=0.0, settle=0.0):
    """verify[n - 1], draft[n - 1]: seconds of n positions, at every context."""
    parts = {
        "verify": tuple(verify),
        "draft": (0.0, *draft[1:]),
        "rest": rest,
        "plain": verify[0],
        "show": show,
        "wake": wake,
        "settle": settle,
    }
    point = Point(batch=batch, context=256, **parts)
    widths = tuple(range(1, len(verify) + 1))
    return Costs(fingerprint="0", widths=widths, points=(point,), acceptance=acceptance, described={})


def embedded(acceptance=0.5, **changes):
    """About what the embedded model takes on two cores: 1.5 ms per token, 2.5 for eight, 1.1 for the
    draft."""
    return table([1.45e-3 + 0.15e-3 * n for n in range(8)], [1.1e-3] * 8, acceptance=acceptance, **changes)


def experts(acceptance=0.5):
    """About what reading gpt-oss-20b's weights takes: eight cost 2.5 tokens, their draft three quarters."""
    verify = [0.1 * x for x in (1.0, 1.3, 1.55, 1.79, 2.0, 2.17, 2.32, 2.46)]
    return table(verify, [0.074] * 8, rest=1e-4, acceptance=acceptance)


def walker(acceptance=0.5):
    """A draft that goes step by step, and costs little a step."""
    return table(
        [1e-3 + 4e-5 * n for n in range(8)], [8e-5 * (n + 1) for n in range(8)], acceptance=acceptance
    )


def chain(survival=None, width=8, rows=1):
    """Survival, if given, is of every position but the root."""
    tokens = torch.zeros(rows, width, dtype=torch.int64)
    value = None if survival is None else torch.tensor([[1.0, *row] for row in survival])
    return Proposal(tokens, [width] * rows, survival=value)


def decode(controller, costs, streams, tokens, speaks=False, seed=0, block=8, fade=1.0):
    """`tokens` tokens per row in the mean, on a clock that takes what the table states. streams: one a row,
    f(place, dice) -> how likely each of the block's draft tokens is right where the one before it is.
    `speaks`: the draft knows that, and states it to the power of `fade`. -> seconds, rounds of draft
    tokens."""
    dice = random.Random(seed)
    controller.begin(block, tokens)
    rows, at = len(streams), [0] * len(streams)
    seconds, drafted, unseen, verified = 0.0, 0, 0, 1
    while sum(at) < tokens * rows:
        lengths = [256 + n for n in at]
        width = controller.width(lengths)
        context = sum(lengths) / rows
        seconds += costs.rest_seconds(width, rows) + costs.draft_seconds(width, context, rows)
        if width == 1:
            seconds += costs.verify_seconds(1, context, rows)
            at = [n + 1 for n in at]
            controller.learn(chain(width=1, rows=rows), [[0]] * rows)
            unseen, verified = unseen + 1, 1
            continue
        drafted += 1
        if unseen:
            seconds += unseen * costs.show_seconds(rows) + costs.wake_seconds(rows)
        unseen = 0
        chances = [stream(n, dice)[: width - 1] for stream, n in zip(streams, at, strict=True)]
        items = [running([c**fade for c in row]) for row in chances]
        proposal = controller.cut(chain(items if speaks else None, width, rows))
        n = proposal.tokens.shape[1]
        seconds += costs.verify_seconds(n, context, rows)
        seconds += costs.settle_seconds(rows) if n > 1 == verified else 0.0
        verified = n
        path = []
        for row in chances:
            taken = 0
            for chance in row:  # the dice are thrown for all draft tokens, however many are verified
                if dice.random() >= chance:
                    break
                taken += 1
            path.append(list(range(1 + min(taken, n - 1))))
        controller.learn(proposal, path)
        at = [a + len(p) for a, p in zip(at, path, strict=True)]
    return seconds, drafted


def decode_on_device(controller, costs, streams, tokens, seed=0, block=8):
    """The same of rounds that a device runs: proposals are verified whole, and the controller is asked for
    the next one before it hears of them."""
    dice, rows, at, seconds, last = random.Random(seed), len(streams), [0] * len(streams), 0.0, None
    controller.begin(block, tokens)
    while sum(at) < tokens * rows:
        n = controller.width([256 + place for place in at])
        if last is not None:
            controller.learn_chain(*last)
        context = sum(at) / rows + 256
        seconds += costs.rest_seconds(n, rows) + costs.draft_seconds(n, context, rows)
        seconds += costs.verify_seconds(n, context, rows)
        kept = []
        for stream, place in zip(streams, at, strict=True):
            right = [dice.random() < chance for chance in stream(place, dice)[: n - 1]]
            kept.append(1 + [*right, False].index(False))
        at = [place + count for place, count in zip(at, kept, strict=True)]
        last = n, kept
    return seconds


def running(chances):
    items, product = [], 1.0
    for chance in chances:
        product *= chance
        items.append(product)
    return items


def speed(controller, costs, streams, tokens=4096, **how):
    """Tokens/s of one row, over those of autoregressive decoding."""
    plain = decode(Fixed(1), costs, streams, tokens)[0]
    return plain / decode(controller, costs, streams, tokens, **how)[0]


def best_fixed(costs, *texts, context=512):
    """The same of the best fixed width, by arithmetic. A text is a list of moods, the chance of a draft
    token where the one before it is right; in each round one of them, all equally likely. The texts share
    the tokens."""
    items = []
    for n in range(1, 9):
        seconds = 0.0  # of a token
        for moods in texts:
            tokens = sum(sum(chance**i for i in range(n)) for chance in moods) / len(moods)
            seconds += costs.round_seconds(n, context) / tokens / len(texts)
        items.append(costs.round_seconds(1, context) / seconds)
    return max(items)


def steady(*chances):
    """The same chances everywhere; the last one goes on."""
    return lambda place, dice: [*chances, *[chances[-1]] * (8 - len(chances))]


def switching(one, other, every):
    return lambda place, dice: (one if place // every % 2 == 0 else other)(place, dice)


def moody(low, high):
    """Some places are easy, some are not, and a draft that speaks knows which."""
    return lambda place, dice: [high if dice.random() < 0.5 else low] * 8
