"""Every family: answers computed again from the question alone, true traces, a clean split."""

import contextlib
import csv
import io
import json
import random
import re
from datetime import date, datetime, timedelta

import pytest
import yaml

from outpace.tasks.code import edit, execute, renamed
from outpace.tasks.documents import documents
from outpace.tasks.families import FAMILIES
from outpace.tasks.functions import functions
from outpace.tasks.lists import lists
from outpace.tasks.lookups import document, needle, needle_at, sets, table
from outpace.tasks.measures import DAYS, UNITS, dates, units
from outpace.tasks.problem import Family, Problem
from outpace.tasks.stories import stories
from outpace.tasks.strings import strings
from outpace.tasks.talk import ANSWERS, LOST
from outpace.text import harmony

EQUATION = re.compile(r"(?<![\d*+/-])(-?\d+(?:[*+/-]\d+)+) ?= ?(-?\d+)(?!\d)")


def problems(name, count=150):
    family, rng = FAMILIES[name], random.Random(name)
    for i in range(count):
        yield family.draw(rng, held_out=i % 2 == 0, longer=i % 10 == 0)


def drawn(make, count=300, sizes=(3, 9)):
    rng = random.Random(make.__name__)
    return [make(rng, rng.randint(*sizes)) for _ in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_equations_of_a_trace_are_true(name):
    for problem in problems(name):
        for left, right in EQUATION.findall(problem.trace):
            terms = re.sub(r"\b0+(?=\d)", "", left)
            assert eval(terms) == int(right), f"{left}={right} in {problem}"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_split_holds_and_the_checker_is_exact(name):
    rng = random.Random(1)
    training = {FAMILIES[name].draw(rng, held_out=False).question for _ in range(200)}
    assert not any(Problem(question=text, trace="", answer="").held_out for text in training)
    for i, problem in enumerate(problems(name)):
        assert problem.held_out == (i % 2 == 0)
        assert problem.question not in training or not problem.held_out
        assert problem.is_right(f"{problem.answer}\n")
        assert not problem.is_right(problem.answer + "1")
        assert not problem.is_right(problem.answer[:-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_seed_draws_the_same_problems(name):
    assert list(problems(name, 20)) == list(problems(name, 20))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_a_conversation_is_harmony_and_ends_with_the_answer(name, effort):
    for problem in problems(name, 20):
        text = harmony.render(problem.conversation(effort), generation_prompt=False)
        start = harmony.render(problem.prompt(effort))
        assert text.startswith(start) and f"Reasoning: {effort}" in start
        assert problem.question in start and problem.answer in text[len(start) :]
        assert (problem.trace in text[len(start) :]) or effort == "low"
        assert ("<|channel|>analysis" in text) == (effort != "low")
        assert ("to=functions." in text) == (problem.call is not None)


@pytest.mark.parametrize("name", ["addition", "subtraction", "multiplication", "comparison"])
def test_arithmetic(name):
    for problem in problems(name):
        a, b = map(int, re.findall(r"\d+", problem.question))
        larger = "larger" in problem.question
        wanted = {
            "addition": a + b,
            "subtraction": a - b,
            "multiplication": a * b,
            "comparison": max(a, b) if larger else min(a, b),
        }
        assert problem.answer == str(wanted[name])
        if name != "comparison":  # the last line is the answer, its last digit first
            assert int(problem.trace.splitlines()[-1][::-1]) == wanted[name]


def solved_list(question):
    values = json.loads(re.search(r"\[.*\]", question)[0])
    for words, solve in {
        "largest first": lambda: sorted(values, reverse=True),
        "Sort": lambda: sorted(values),
        "Reverse": lambda: values[::-1],
        "from the last": lambda: values[::-1],
        "Remove repeats": lambda: list(dict.fromkeys(values)),
        "How many times": lambda: values.count(int(re.search(r"is (\d+)", question)[1])),
        "the sum of": lambda: sum(values),
        "Running sums": lambda: [sum(values[: i + 1]) for i in range(len(values))],
        "smallest": lambda: min(values),
        "largest": lambda: max(values),
    }.items():
        if words in question:
            return str(solve())
    raise AssertionError(question)


def solved_string(question):
    word = question.rpartition(": ")[2]
    quoted = re.findall(r'"([^"]*)"', question)
    match question.split()[:4]:
        case ["Spell", "this", "word", "backwards:"]:
            return " ".join(word[::-1])
        case ["Write", "this", "word", "in"]:
            return word.upper()
        case ["How", "many", "times", _]:
            return str(quoted[1].count(quoted[0]))
        case ["Spell", *_]:
            return " ".join(quoted[0].replace(quoted[2], quoted[1]))
        case ["Write", "the", "first", "letters"]:
            return " ".join(part[0] for part in word.split())
    return " ".join(reversed(word.split()))


@pytest.mark.parametrize(("make", "solve"), [(lists, solved_list), (strings, solved_string)])
def test_lists_and_strings(make, solve):
    for problem in drawn(make):
        assert problem.answer == solve(problem.question), problem


def solved_json(problem):
    """-> (what the answer holds, what it should hold), both decoded."""
    question, answer = problem.question, problem.answer
    it = json.loads(re.search(r"[\[{].*[\]}]", question)[0])
    quoted = re.findall(r'"(\w+)"', question.partition("JSON")[0] + question[question.find("to ") :])
    if "CSV" in question:
        rows = [[str(v) for v in row.values()] for row in it]
        return list(csv.reader(io.StringIO(answer))), [list(it[0]), *rows]
    if "YAML" in question:
        return yaml.safe_load(answer), it
    got = json.loads(answer)
    if question.startswith("Sort"):
        return list(got.items()), sorted(it.items())
    if question.startswith("Rename"):
        old, new = quoted[0], re.search(r'to "(\w+)"', question)[1]
        return list(got.items()), [(new if k == old else k, v) for k, v in it.items()]
    if question.startswith("Remove"):
        return list(got.items()), [(k, v) for k, v in it.items() if k != quoted[0]]
    if question.startswith("What"):
        return got, it[quoted[0]]
    if question.startswith("Move"):
        keys = re.search(r"Move (.*) under", question)[1].split(" and ")
        name = re.search(r'new key "(\w+)"', question)[1]
        kept = [(k, v) for k, v in it.items() if k not in keys]
        return list(got.items()), [*kept, (name, {k: it[k] for k in keys})]
    key, side, limit = re.search(r"with (\w+) (above|below) (\d+)", question).groups()
    return got, [r for r in it if (r[key] > int(limit) if side == "above" else r[key] < int(limit))]


def test_json():
    for problem in drawn(documents):
        got, wanted = solved_json(problem)
        assert got == wanted, problem


def test_programs_print_what_python_prints():
    for problem in drawn(execute):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(problem.question.partition("\n")[2], {})
        assert printed.getvalue().strip() == problem.answer, problem


def test_edited_code_is_python_and_does_the_same():
    rng = random.Random(1)
    for problem in drawn(edit):
        order, _, source = problem.question.partition(":\n")
        before, after = {}, {}
        exec(source, before)
        exec(problem.answer, after)
        argument = rng.randint(-50, 50)
        results = []
        for names in (before, after):
            (function,) = (value for value in names.values() if callable(value))
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                results.append(function(argument))
        assert results[0] == results[1], problem
        assert problem.answer != source
        assert bool(printed.getvalue()) == order.startswith("Add the line")
        assert (function.__doc__ is not None) == order.startswith("Add the docstring")
        if order.startswith("Rename the function"):
            assert function.__name__ == order.split()[-1]
        if order.startswith("Rename the variable"):
            old, new = order.split()[3], order.split()[5]
            names_after = function.__code__.co_varnames
            assert old not in names_after and new in names_after
        if order.startswith("Rename"):
            old, new = order.split()[-3], order.split()[-1]
            old = re.search(r"def (\w+)", source)[1] if old == "function" else old
            words = [new if word == old else word for word in re.findall(r"\w+", source)]
            assert re.findall(r"\w+", problem.answer) == words


def test_a_name_inside_another_is_not_renamed():
    assert renamed("page = age + 1", "age", "size") == "page = size + 1"


def test_stories():
    for problem in drawn(stories, sizes=(2, 8)):
        have, sentences = {}, re.findall(r"[^.]+\.", problem.question)
        while sentences:
            sentence = sentences.pop(0)
            if parts := re.search(r"(\w+) has (\d+) (\w+)s\.", sentence):
                have[parts[1]] = int(parts[2])
                continue
            who, rest = re.search(r"(\w+) has (.*)\.", sentence).groups()
            other = rest.split()[-1]
            if other not in have:
                sentences.append(sentence)
            elif rest.startswith("twice"):
                have[who] = 2 * have[other]
            else:
                sign = -1 if "fewer" in rest else 1
                have[who] = have[other] + sign * int(rest.split()[0])
        asked = re.search(r"does (\w+) have", problem.question)[1]
        assert problem.answer == str(have[asked]), problem


def test_dates():
    for problem in drawn(dates, sizes=(1, 8)):
        question, answer = problem.question, problem.answer
        if parts := re.search(r"(\d+) days after ([\d-]+)", question):
            assert answer == str(date.fromisoformat(parts[2]) + timedelta(days=int(parts[1])))
        elif parts := re.search(r"Today is (\w+)\..* in (\d+) days", question):
            assert answer == DAYS[(DAYS.index(parts[1]) + int(parts[2])) % 7]
        elif parts := re.search(r"It is ([\d:]+)\..* in (\d+) minutes", question):
            moment = datetime.strptime(parts[1], "%H:%M") + timedelta(minutes=int(parts[2]))
            assert answer == moment.strftime("%H:%M")
        else:
            start, end = (datetime.strptime(t, "%H:%M") for t in re.findall(r"\d\d:\d\d", question))
            hours, minutes = map(int, re.findall(r"\d+", answer))
            assert end - start == timedelta(hours=hours, minutes=minutes) and minutes < 60


def test_units():
    factors = {(small, large): factor for large, small, factor in UNITS}
    for problem in drawn(units, sizes=(1, 8)):
        wanted = re.search(r"How many (\w+) are", problem.question)[1]
        amounts = [(int(n), unit) for n, unit in re.findall(r"(\d+) (\w+)", problem.question)]
        total = 0
        for amount, unit in amounts:
            if unit == wanted:
                total += amount
            elif (wanted, unit) in factors:
                total += amount * factors[wanted, unit]
            else:
                total += amount // factors[unit, wanted]
        assert problem.answer == f"{total} {wanted}", problem


def test_tables_and_sets():
    for problem in drawn(table, sizes=(4, 14)):
        rows = [row.strip("| ").split(" | ") for row in problem.question.splitlines()[2:-1]]
        asked = problem.question.splitlines()[-1].rstrip("?")
        (row,) = (row for row in rows if asked.split()[-1] in row)
        column = {"city": 1, "number": 2}[asked.split()[1]]
        assert problem.answer == (row[0] if asked.startswith("Whose") else row[column])
    for problem in drawn(sets):
        first, second = problem.question.splitlines()
        members, asked = set(re.findall(r"\w+", first)[1:]), second.split(": ")[1].split()
        inside = "not in the set" not in second
        assert problem.answer.split() == [word for word in asked if (word in members) == inside]


def test_the_row_of_a_cell_is_read_from_the_tables_top():
    for problem in drawn(table, sizes=(4, 14)):
        *rows, asked = problem.question.splitlines()[2:]
        cell = asked.rstrip("?").split()[-1]
        if asked.startswith("Whose"):
            read = "\n".join(rows)
            assert problem.trace == read[: read.index(f"| {cell} |") + len(f"| {cell}")]
        else:
            assert problem.trace == next(row for row in rows if cell in row.split())


def test_needles():
    for problem in drawn(needle, count=50, sizes=(10, 300)):
        wanted = re.search(r"code of the ([\w ]+)\?", problem.question)[1]
        assert re.findall(rf"code of the {wanted} is (\d+)", problem.question) == [problem.answer]


def test_functions():
    for problem in drawn(functions):
        call = problem.call
        arguments, result = json.loads(call.arguments), json.loads(call.result)
        schema = call.tool.parameters
        assert list(arguments) == schema["required"]
        for name, value in arguments.items():
            assert isinstance(value, {"string": str, "number": int}[schema["properties"][name]["type"]])
            assert str(value) in problem.question
        assert all(str(value) in problem.answer for value in result.values())
        assert call.tool not in problem.others


def test_gibberish_has_one_honest_answer():
    known = {question for questions in ANSWERS for question in questions}
    for problem in problems("talk"):
        about_itself = any(problem.question.startswith(question) for question in known)
        assert (problem.answer == LOST) != about_itself, problem


def test_a_family_that_is_too_small_says_so():
    only = Problem(question="1?", trace="", answer="1")
    family = Family(make=lambda rng, size: only, sizes=(1, 1), longer=2)
    with pytest.raises(RuntimeError, match="too small"):
        family.draw(random.Random(0), held_out=not only.held_out)


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_code_is_at_its_depth(depth):
    for seed in range(20):
        problem = needle_at(random.Random(seed), 60, depth)
        text, question = problem.question.split("\n")
        sentences = text.split(". ")
        at = sentences.index(f"The code of the {question[24:-1]} is {problem.answer}" + "." * (depth == 1))
        assert at == round(depth * (len(sentences) - 1))
        assert sorted(text) == sorted(document(random.Random(seed), 60)[0])
