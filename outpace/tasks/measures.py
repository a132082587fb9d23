"""Dates, times of day and units."""

import random
from calendar import monthrange
from datetime import date, timedelta

from outpace.tasks.problem import Problem, lines

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MINUTES = 24 * 60
UNITS = (
    ("km", "m", 1000), ("m", "cm", 100), ("cm", "mm", 10), ("kg", "g", 1000), ("l", "ml", 1000),
    ("t", "kg", 1000), ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24),
    ("weeks", "days", 7), ("years", "months", 12), ("feet", "inches", 12), ("yards", "feet", 3),
    ("dozen", "pieces", 12),
)  # fmt: skip


def clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def later_date(rng: random.Random, size: int) -> Problem:
    """`size`: months that the days may cross, roughly. The trace counts days from the start of the first
    month and takes off the length of one month a line."""
    start = date(2000, 1, 1) + timedelta(days=rng.randrange(40 * 365))
    days = rng.randint(1, 28 * size)
    month, count = start, start.day + days
    steps = [f"{month:%Y-%m}: {start.day}+{days}={count}"]
    while count > (length := monthrange(month.year, month.month)[1]):
        month = (month.replace(day=1) + timedelta(days=32)).replace(day=1)
        steps.append(f"{month:%Y-%m}: {count}-{length}={count - length}")
        count -= length
    form = rng.choice(["What date is {} days after {}?", "Which day comes {} days after {}?"])
    answer = str(month.replace(day=count))
    return Problem(question=form.format(days, start), trace=lines(steps), answer=answer)


def weekday(rng: random.Random, size: int) -> Problem:
    start, days = rng.randrange(7), rng.randint(1, 20 * size)
    rest = days % 7
    steps = [f"{days}-{days - rest}={rest}", DAYS[start]]
    steps += [f"{i} {DAYS[(start + i) % 7]}" for i in range(1, rest + 1)]
    question = f"Today is {DAYS[start]}. Which day of the week is it in {days} days?"
    return Problem(question=question, trace=lines(steps), answer=DAYS[(start + days) % 7])


def later_time(rng: random.Random, size: int) -> Problem:
    start, more = rng.randrange(MINUTES), rng.randint(1, 40 * size)
    hours, minutes = divmod(start, 60)
    plus_hours, plus_minutes = divmod(more, 60)
    total = minutes + plus_minutes
    carry = total // 60
    steps = [f"{more} minutes = {plus_hours} hours {plus_minutes} minutes"]
    steps.append(f"{minutes}+{plus_minutes}={total}{f', {total}-60={total - 60}' if carry else ''}")
    late = hours + plus_hours + carry
    steps.append(
        f"{hours}+{plus_hours}{'+1' if carry else ''}={late}{f', {late}-24={late - 24}' if late > 23 else ''}"
    )
    question = f"It is {clock(start)}. What time is it in {more} minutes?"
    return Problem(question=question, trace=lines(steps), answer=clock((start + more) % MINUTES))


def between(rng: random.Random, size: int) -> Problem:
    start = rng.randrange(MINUTES - 40 * size)
    end = start + rng.randint(1, 40 * size)
    first, last = divmod(start, 60), divmod(end, 60)
    borrow = int(last[1] < first[1])
    minutes = last[1] + 60 * borrow - first[1]
    hours = last[0] - borrow - first[0]
    steps = [
        f"{last[1]}{f'+60={last[1] + 60}, {last[1] + 60}' if borrow else ''}-{first[1]}={minutes}",
        f"{last[0]}{'-1' if borrow else ''}-{first[0]}={hours}",
    ]
    question = f"How long is it from {clock(start)} to {clock(end)}?"
    return Problem(question=question, trace=lines(steps), answer=f"{hours} hours and {minutes} minutes")


def dates(rng: random.Random, size: int) -> Problem:
    return rng.choice([later_date, weekday, later_time, between])(rng, size)


def units(rng: random.Random, size: int) -> Problem:
    """`size`: the largest number of the larger unit, times three."""
    large, small, factor = rng.choice(UNITS)
    count = rng.randint(2, 3 * size + 1)
    total = count * factor
    to_small = rng.random() < 0.6
    if to_small:
        question, step = f"How many {small} are {count} {large}?", f"{count}*{factor}={total}"
        answer = f"{total} {small}"
    else:
        question, step = f"How many {large} are {total} {small}?", f"{total}/{factor}={count}"
        answer = f"{count} {large}"
    extra = rng.randint(1, factor - 1)
    if to_small and rng.random() < 0.4:
        question = f"How many {small} are {count} {large} and {extra} {small}?"
        step = f"{step}\n{total}+{extra}={total + extra}"
        answer = f"{total + extra} {small}"
    return Problem(question=question, trace=f"1 {large} = {factor} {small}\n{step}", answer=answer)
