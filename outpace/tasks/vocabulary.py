"""Names, words and random letters that problems are made of."""

import random

NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jada", "Kim", "Leo", "Mia", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tara", "Uma", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip
THINGS = (
    "apple", "bag", "ball", "belt", "book", "card", "chair", "coin", "cup", "desk", "door", "egg", "flag",
    "fork", "hat", "key", "lamp", "lid", "map", "nail", "pear", "pen", "plum", "ring", "rope", "shoe",
    "spoon", "stamp", "stone", "ticket",
)  # fmt: skip
FIELDS = (
    "age", "city", "color", "count", "day", "grade", "group", "height", "id", "kind", "length", "level",
    "month", "name", "number", "owner", "page", "price", "rank", "room", "score", "size", "state", "title",
    "unit", "weight", "width", "year",
)  # fmt: skip
CITIES = (
    "Athens", "Berlin", "Cairo", "Delhi", "Florence", "Geneva", "Hanoi", "Istanbul", "Jakarta", "Kyoto",
    "Lima", "Madrid", "Nairobi", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Tokyo", "Vienna",
)  # fmt: skip
COLORS = (
    "beige", "black", "blue", "brown", "gold", "green", "grey", "pink", "purple", "red", "silver", "white",
)  # fmt: skip
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def made_up(rng: random.Random, syllables: int) -> str:
    """A word that stands in no list, such as "korabi"."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))
