"""Operations on words and letters."""

import random

from outpace.tasks.lists import tally
from outpace.tasks.problem import Problem, quoting
from outpace.tasks.vocabulary import THINGS, made_up


def letters(rng: random.Random, size: int) -> str:
    """A made-up word of `size` letters."""
    return made_up(rng, (size + 1) // 2)[:size]


def spelled(word: str) -> str:
    return " ".join(word)


def reverse_word(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    trace = quoting(": ", [word, spelled(word)])
    return Problem(question=f"Spell this word backwards: {word}", trace=trace, answer=spelled(word[::-1]))


def capitals(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    trace = quoting(": ", [word, spelled(word)])
    return Problem(question=f"Write this word in capital letters: {word}", trace=trace, answer=word.upper())


def count_letter(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    wanted = rng.choice(word)
    steps, total = tally(word, wanted)
    question = f'How many times is the letter "{wanted}" in "{word}"?'
    trace = quoting('in "', [f'{word}"', spelled(word), *steps])
    return Problem(question=question, trace=trace, answer=str(total))


def replace_letter(rng: random.Random, size: int) -> Problem:
    word = letters(rng, size)
    old, new = rng.choice(word), rng.choice("abcdefghijklmnopqrstuvwxyz")
    question = f'Spell "{word}" with "{new}" for every "{old}".'
    trace = quoting('Spell "', [f'{word}"', spelled(word)])
    return Problem(question=question, trace=trace, answer=spelled(word.replace(old, new)))


def initials(rng: random.Random, size: int) -> Problem:
    words = rng.sample(THINGS, size)
    steps = [f"{word} {word[0]}" for word in words]
    question = f"Write the first letters of these words: {' '.join(words)}"
    answer = spelled("".join(word[0] for word in words))
    return Problem(question=question, trace=quoting(": ", steps), answer=answer)


def turn_words(rng: random.Random, size: int) -> Problem:
    words = rng.sample(THINGS, max(2, size // 2))
    question = f"Write these words from the last to the first: {' '.join(words)}"
    return Problem(question=question, trace=f"the last is {words[-1]}", answer=" ".join(words[::-1]))


def strings(rng: random.Random, size: int) -> Problem:
    return rng.choice([reverse_word, capitals, count_letter, replace_letter, initials, turn_words])(rng, size)
