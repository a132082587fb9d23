"""Word problems: amounts that depend on one another, told out of order (after iGSM, arXiv 2407.20311)."""

import random

from outpace.tasks.problem import Problem, lines
from outpace.tasks.vocabulary import NAMES, THINGS

MOST = 99  # that doubling leads to


def derived(rng: random.Random, who: str, other: str, have: int, thing: str) -> tuple[str, str, int]:
    """-> (sentence, step, amount) of a person whose amount is derived from `other`'s."""
    amount = rng.randint(1, 9)
    match rng.choice(["more", "fewer", "times"]):
        case "times" if have * 2 <= MOST:
            start, rest, step, now = f"{who} has twice", f"as many {thing}s as", f"2*{have}", 2 * have
        case "fewer" if have > amount:
            start, rest, step = f"{who} has {amount} fewer", f"{thing}s than", f"{have}-{amount}"
            now = have - amount
        case _:
            start, rest, step = f"{who} has {amount} more", f"{thing}s than", f"{have}+{amount}"
            now = have + amount
    return f"{start} {rest} {other}.", f"{start}: {step}={now}", now


def stories(rng: random.Random, size: int) -> Problem:
    """`size`: people whose amounts lead to the one that is asked for; up to two more do not matter. The
    trace quotes the sentences from who is asked for back to who is known, and then goes forth with the
    amounts."""
    thing = rng.choice(THINGS)
    people = rng.sample(NAMES, size + rng.randint(0, 2))
    have = {people[0]: rng.randint(2, 30)}
    sentences, steps = [f"{people[0]} has {have[people[0]]} {thing}s."], list[str]()
    for i, who in enumerate(people[1:], 1):
        other = people[i - 1] if i < size else rng.choice(people[:i])
        sentence, step, have[who] = derived(rng, who, other, have[other], thing)
        sentences.append(sentence)
        steps += [step] if i < size else []
    way = [sentence.rstrip(".") for sentence in sentences[:size][::-1]]
    rng.shuffle(sentences)
    asked = people[size - 1]
    question = f"{' '.join(sentences)} How many {thing}s does {asked} have?"
    return Problem(question=question, trace=lines(way + steps), answer=str(have[asked]))
