"""Look-ups: in tables, in sets, and of one sentence in a long document."""

import random

from outpace.tasks.problem import Problem, lines, quoting
from outpace.tasks.vocabulary import CITIES, COLORS, NAMES, THINGS

FILLERS = (
    "{} went to {} with a {} {}.", "In {1}, {0} sold a {2} {3}.", "{} wrote from {} about a {} {}.",
    "{0} lost a {2} {3} near {1}.", "Everybody in {1} knows the {2} {3} of {0}.",
    "{0} came back from {1} without the {2} {3}.", "{} bought in {} what was needed: a {} {}.",
)  # fmt: skip


def table(rng: random.Random, size: int) -> Problem:
    """A table in Markdown: one cell of a row, or the row of a cell."""
    names = rng.sample(NAMES, size)
    cities, ages = rng.sample(CITIES, size), rng.sample(range(10, 100), size)
    rows = [f"| {n} | {c} | {a} |" for n, c, a in zip(names, cities, ages, strict=True)]
    text = lines(["| name | city | number |", "|---|---|---|", *rows])
    i = rng.randrange(size)
    question, answer = rng.choice(
        [
            (f"Which city has {names[i]}?", cities[i]),
            (f"Which number has {names[i]}?", str(ages[i])),
            (f"Whose city is {cities[i]}?", names[i]),
            (f"Whose number is {ages[i]}?", names[i]),
        ]
    )
    return Problem(question=f"{text}\n{question}", trace=rows[i], answer=answer)


def sets(rng: random.Random, size: int) -> Problem:
    words = rng.sample(THINGS, min(len(THINGS), size + 3))
    cut = len(words) // 2
    shared = rng.sample(words, 2)
    first = [w for w in words[:cut] if w not in shared] + shared
    second = [w for w in words[cut:] if w not in shared] + shared
    rng.shuffle(first)
    rng.shuffle(second)
    both = rng.random() < 0.5
    steps = [f"{word} {'yes' if word in second else 'no'}" for word in first]
    kept = [word for word in first if (word in second) == both]
    which = "in both sets" if both else "in A and not in B"
    question = f"A: {' '.join(first)}\nB: {' '.join(second)}\nWhich words are {which}? In the order of A."
    return Problem(question=question, trace=quoting("A: ", steps), answer=" ".join(kept))


def tables(rng: random.Random, size: int) -> Problem:
    return rng.choice([table, sets])(rng, size)


def document(rng: random.Random, size: int) -> tuple[str, dict[str, str]]:
    """-> (`size` sentences and among them some that give a code, the code of each thing)."""
    text = [
        rng.choice(FILLERS).format(
            rng.choice(NAMES), rng.choice(CITIES), rng.choice(COLORS), rng.choice(THINGS)
        )
        for _ in range(size)
    ]
    owners = rng.sample([f"{color} {thing}" for color in COLORS for thing in THINGS], 3 + size // 40)
    codes = {owner: str(rng.randint(1000, 9999)) for owner in owners}
    for owner, code in codes.items():
        text.insert(rng.randint(0, len(text)), f"The code of the {owner} is {code}.")
    return " ".join(text), codes


def asked_for(owner: str, code: str, before: str = "") -> Problem:
    question = f"{before}What is the code of the {owner}?"
    return Problem(question=question, trace=f"The code of the {owner} is {code}.", answer=code)


def needle(rng: random.Random, size: int) -> Problem:
    """One of the codes in a document of `size` sentences."""
    text, codes = document(rng, size)
    owner = rng.choice(list(codes))
    return asked_for(owner, codes[owner], f"{text}\n")
