"""Sums, differences, products and comparisons, worked digit by digit from the right, as on paper."""

import random

from outpace.tasks.problem import Problem, lines


def number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def added(a: str, b: str) -> tuple[list[str], str]:
    """Numbers with the last digit first -> the steps, and the sum, written in the same way."""
    steps, result, carry = [], "", 0
    length = max(len(a), len(b))
    for x, y in zip(a.ljust(length, "0"), b.ljust(length, "0"), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        result += str(total % 10)
        carry = total // 10
    return steps, result + ("1" if carry else "")


def add(rng: random.Random, size: int) -> Problem:
    a, b = number(rng, size), number(rng, rng.randint(1, size))
    if rng.random() < 0.5:
        a, b = b, a
    first, second = str(a)[::-1], str(b)[::-1]
    steps, result = added(first, second)
    form = rng.choice(["What is {} + {}?", "Add {} and {}.", "{} + {} = ?"])
    return Problem(
        question=form.format(a, b), trace=lines([first, second, *steps, result]), answer=str(a + b)
    )


def subtract(rng: random.Random, size: int) -> Problem:
    a, b = number(rng, size), number(rng, rng.randint(1, size))
    a, b = max(a, b), min(a, b)
    first, second = str(a)[::-1], str(b)[::-1]
    steps, result, borrow = [], "", 0
    for x, y in zip(first, second.ljust(len(first), "0"), strict=True):
        have = int(x) - borrow
        top = int(x) + (10 if have < int(y) else 0)
        digit = top - borrow - int(y)
        steps.append(f"{top}{'-1' if borrow else ''}-{y}={digit}")
        result += str(digit)
        borrow = int(top >= 10)
    form = rng.choice(["What is {} - {}?", "{} - {} = ?"])
    return Problem(
        question=form.format(a, b), trace=lines([first, second, *steps, result]), answer=str(a - b)
    )


def multiply(rng: random.Random, size: int) -> Problem:
    """`size`: digits of the first number; the second has at most two."""
    a, b = number(rng, size), number(rng, rng.randint(1, 2))
    first = str(a)[::-1]
    steps, total = [first], ""
    for place, factor in enumerate(str(b)[::-1]):
        products, row, carry = [], "0" * place, 0
        for x in first:
            value = int(x) * int(factor) + carry
            products.append(f"{x}*{factor}{f'+{carry}' if carry else ''}={value}")
            row += str(value % 10)
            carry = value // 10
        row += str(carry) if carry else ""
        steps += [*products, row]
        if total:
            sums, total = added(total, row)
            steps += [*sums, total]
        else:
            total = row
    form = rng.choice(["What is {} * {}?", "Multiply {} by {}.", "{} * {} = ?"])
    return Problem(question=form.format(a, b), trace=lines(steps), answer=str(a * b))


def compare(rng: random.Random, size: int) -> Problem:
    a = number(rng, size)
    text = str(a)
    kept = rng.randint(0, size - 1)  # both begin alike, as close numbers do
    b = int(text[:kept] + "".join(rng.choice("0123456789") for _ in text[kept:]))
    if rng.random() < 0.2:
        b = number(rng, rng.randint(1, size))
    if a == b:
        b = a + 1
    larger = rng.random() < 0.5
    steps = [f"{len(str(a))} digits, {len(str(b))} digits"]
    if len(str(a)) == len(str(b)):
        for x, y in zip(str(a), str(b), strict=True):
            steps.append(f"{x}{'=' if x == y else '>' if x > y else '<'}{y}")
            if x != y:
                break
    form = f"Which number is {'larger' if larger else 'smaller'}, {a} or {b}?"
    return Problem(question=form, trace=lines(steps), answer=str(max(a, b) if larger else min(a, b)))
