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
    """A table in Markdown: one cell of a row, or the row of a cell. To find the row of a cell, the trace
    reads the table from its top up to that cell; the row of a name it finds at once."""
    names = rng.sample(NAMES, size)
    cities, ages = rng.sample(CITIES, size), rng.sample(range(10, 100), size)
    rows = [f"| {n} | {c} | {a} |" for n, c, a in zip(names, cities, ages, strict=True)]
    text = lines(["| name | city | number |", "|---|---|---|", *rows])
    i = rng.randrange(size)
    up_to_city = lines([*rows[:i], f"| {names[i]} | {cities[i]}"])
    question, answer, trace = rng.choice(
        [
            (f"Which city has {names[i]}?", cities[i], rows[i]),
            (f"Which number has {names[i]}?", str(ages[i]), rows[i]),
            (f"Whose city is {cities[i]}?", names[i], up_to_city),
            (f"Whose number is {ages[i]}?", names[i], f"{up_to_city} | {ages[i]}"),
        ]
    )
    return Problem(question=f"{text}\n{question}", trace=trace, answer=answer)


def sets(rng: random.Random, size: int) -> Problem:
    """Which of some words are in a set, or are not. What follows a word, a comma or another word, says where
    it stands, and the trace writes each as the set does: to look a word up is then one step of copying."""
    words = rng.sample(THINGS, min(len(THINGS), size + 3))
    cut = len(words) // 2
    shared = rng.sample(words, 2)
    asked = [w for w in words[:cut] if w not in shared] + shared
    members = [w for w in words[cut:] if w not in shared] + shared
    rng.shuffle(asked)
    rng.shuffle(members)
    inside = rng.random() < 0.5
    steps = [f"{word} {'yes' if word in members else 'no'}" for word in asked]
    kept = [word for word in asked if (word in members) == inside]
    which = "in the set" if inside else "not in the set"
    question = f"Which of these words are {which}? In this order: {' '.join(asked)}"
    return Problem(
        question=f"Set: {', '.join(members)}.\n{question}",
        trace=quoting(": ", [" ".join(steps)]),
        answer=" ".join(kept),
    )


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


def needle_at(rng: random.Random, size: int, depth: float) -> Problem:
    """The code at this depth, a share of a document of `size` sentences."""
    text, codes = document(rng, size)
    owner = rng.choice(list(codes))
    asked = f"The code of the {owner} is {codes[owner]}"
    sentences = [sentence for sentence in text.removesuffix(".").split(". ") if sentence != asked]
    sentences.insert(round(depth * len(sentences)), asked)
    return asked_for(owner, codes[owner], f"{'. '.join(sentences)}.\n")
