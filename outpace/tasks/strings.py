"""Operations on words and letters."""

import random

from outpace.tasks.lists import tally
from outpace.tasks.problem import Problem, quoting
from outpace.tasks.vocabulary import made_up


def letters(rng: random.Random, size: int) -> str:
    """A made-up word of `size` letters."""
    return made_up(rng, (size + 1) // 2)[:size]


def reverse_word(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    trace = quoting(": ", [word, " ".join(word)])
    return Problem(question=f"Write this word backwards: {word}", trace=trace, answer=word[::-1])


def capitals(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    trace = quoting(": ", [word, " ".join(word)])
    return Problem(question=f"Write this word in capital letters: {word}", trace=trace, answer=word.upper())


def count_letter(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    wanted = rng.choice(word)
    steps, total = tally(word, wanted)
    question = f'How many times is the letter "{wanted}" in "{word}"?'
    return Problem(question=question, trace=quoting('in "', [f'{word}"', *steps]), answer=str(total))


def replace_letter(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    old, new = rng.choice(word), rng.choice("abcdefghijklmnopqrstuvwxyz")
    question = f'Replace every "{old}" in "{word}" with "{new}".'
    trace = quoting('in "', [f'{word}"', " ".join(word)])
    return Problem(question=question, trace=trace, answer=word.replace(old, new))


def initials(rng: random.Random, size: int) -> Problem:
    words = [letters(rng, rng.randint(2, 6)) for _ in range(max(2, size // 2))]
    steps = [f"{word} {word[0]}" for word in words]
    question = f"Join the first letters of these words: {' '.join(words)}"
    return Problem(question=question, trace=quoting(": ", steps), answer="".join(word[0] for word in words))


def turn_words(rng: random.Random, size: int) -> Problem:
    words = [letters(rng, rng.randint(2, 6)) for _ in range(max(2, size // 2))]
    question = f"Write these words from the last to the first: {' '.join(words)}"
    return Problem(question=question, trace=f"the last is {words[-1]}", answer=" ".join(words[::-1]))


def strings(rng: random.Random, size: int) -> Problem:
    return rng.choice([reverse_word, capitals, count_letter, replace_letter, initials, turn_words])(rng, size)
