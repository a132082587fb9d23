"""Python: edits applied to a function, and small programs executed line by line."""

import random
import re

from outpace.tasks.problem import Problem, lines
from outpace.tasks.vocabulary import FIELDS, made_up

VERBS = ("add", "check", "compute", "count", "find", "get", "make", "read", "update", "write")
VARIABLES = "abcdefghkmnpqrstuvwxyz"


def function(rng: random.Random, size: int) -> tuple[str, str, list[str]]:
    """-> (source of `size` statements and a return, its name, its variables)."""
    name = f"{rng.choice(VERBS)}_{rng.choice(FIELDS)}"
    names = rng.sample([*FIELDS, *(made_up(rng, 2) for _ in range(8))], min(size, 6) + 1)
    body, known = [], [names[0]]
    for i in range(size):
        left, right = rng.choice(known), rng.choice([rng.choice(known), str(rng.randint(2, 99))])
        operation = f"{left} {rng.choice('+-*')} {right}"
        wanted = names[i + 1] if i + 1 < len(names) else rng.choice(known)
        if rng.random() < 0.25:
            body += [f"    if {left} > {rng.randint(2, 99)}:", f"        {left} = {operation}"]
        else:
            body.append(f"    {wanted} = {operation}")
            known += [] if wanted in known else [wanted]
    return lines([f"def {name}({names[0]}):", *body, f"    return {known[-1]}"]), name, known


def renamed(source: str, old: str, new: str) -> str:
    return re.sub(rf"\b{re.escape(old)}\b", new, source)


def edit(rng: random.Random, size: int) -> Problem:
    source, name, known = function(rng, size)
    match rng.randrange(4):
        case 0:
            old = rng.choice(known)
            new = rng.choice([word for word in FIELDS if word not in source])
            order, result = f"Rename the variable {old} to {new}", renamed(source, old, new)
        case 1:
            new = f"{rng.choice(VERBS)}_{made_up(rng, 2)}"
            order, result = f"Rename the function to {new}", renamed(source, name, new)
        case 2:
            line = f"    print({rng.choice(known)})"
            order = f"Add the line {line.strip()} before the return"
            head, _, last = source.rpartition("\n")
            result = lines([head, line, last])
        case _:
            text = f"{rng.choice(VERBS).capitalize()} the {rng.choice(FIELDS)}."
            order = f'Add the docstring """{text}"""'
            head, _, rest = source.partition("\n")
            result = lines([head, f'    """{text}"""', rest])
    return Problem(question=f"{order}:\n{source}", trace=order, answer=result)


def execute(rng: random.Random, size: int) -> Problem:
    """Straight-line programs and loops over small numbers. A step of the trace is a statement that is
    executed, and behind it the values of its variables, before and after."""
    values: dict[str, int] = {}
    source, steps = [], []

    def assign(statement: str, name: str, left: str, change: int, where: str = "") -> None:
        before = values[left]
        values[name] = before + change
        steps.append(f"{where}{statement}: {left}={before} {name}={values[name]}")

    names = rng.sample(VARIABLES, 3)
    for name in names[:2]:
        values[name] = rng.randint(10, 50)
        source.append(f"{name} = {values[name]}")
        steps.append(f"{source[-1]}: {name}={values[name]}")
    for _ in range(size):
        left, amount = rng.choice(list(values)), rng.randint(1, 9)
        match rng.randrange(3):
            case 0:
                sign = "+" if values[left] < 20 else rng.choice("+-")
                name = rng.choice(names)
                source.append(f"{name} = {left} {sign} {amount}")
                assign(source[-1], name, left, amount if sign == "+" else -amount)
            case 1:
                limit = rng.randint(10, 60)
                condition, body = f"if {left} > {limit}:", f"{left} = {left} - {amount}"
                source += [condition, f"    {body}"]
                steps.append(f"{condition} {left}={values[left]} {'yes' if values[left] > limit else 'no'}")
                if values[left] > limit:
                    assign(body, left, left, -amount)
            case _:
                times, amount = rng.randint(2, 3), rng.randint(1, 5)
                body = f"{left} = {left} + {amount}"
                source += [f"for i in range({times}):", f"    {body}"]
                for i in range(times):
                    assign(body, left, left, amount, f"i={i} ")
    shown = rng.choice(list(values))
    source.append(f"print({shown})")
    steps.append(f"{source[-1]}: {shown}={values[shown]}")
    question = f"What does this program print?\n{lines(source)}"
    return Problem(question=question, trace=lines(steps), answer=str(values[shown]))
