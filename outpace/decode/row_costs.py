"""A cost table for more sequences at once than were measured."""

from dataclasses import replace

from outpace.decode.costs import Costs, Point


def shared(costs: Costs, most: int, *, one_draft: bool = False) -> Costs:
    """`costs` with batches up to twice `most` sequences: the measured ones, then 2, 4, .. times the largest
    of them. They share the target's pass, which costs what as many positions cost of the largest, and no less
    than these in the chunk of a prompt: the few positions of one row say little of hundreds.
    With `one_draft` they share the draft's too, which is taken to grow as the target's does; else drafting
    costs as many times as much."""
    base = max(costs.batches)
    measured = [p for p in costs.points if p.batch == base]
    points, batch = [*costs.points], 2 * base
    while batch <= 2 * most:
        points += [_scaled(costs, p, batch, one_draft) for p in measured]
        batch *= 2
    return replace(costs, points=tuple(points))


def _scaled(costs: Costs, p: Point, batch: int, one_draft: bool) -> Point:
    times = batch / p.batch
    verify = tuple(max(costs.verify_seconds(n, p.context, batch), n * batch * p.prompt) for n in costs.widths)
    grown = [many / one if one_draft else times for many, one in zip(verify, p.verify, strict=True)]
    return replace(
        p,
        batch=batch,
        verify=verify,
        draft=tuple(more * seconds for more, seconds in zip(grown, p.draft, strict=True)),
        rest=times * p.rest,
        idle=None if p.idle is None else times * p.idle,
        lone=None if p.lone is None else p.lone * verify[0] / p.verify[0],
        plain=p.plain * verify[0] / p.verify[0],
        show=grown[0] * p.show,
        wake=grown[0] * p.wake,
        settle=grown[0] * p.settle,
    )
