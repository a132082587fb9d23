"""Questions that need a function: call it with the right arguments, and answer with its result."""

import json
import random
from typing import Any

from outpace.tasks.problem import Call, Problem
from outpace.tasks.vocabulary import CITIES, NAMES, THINGS, made_up
from outpace.text.messages import Tool


def tool(name: str, description: str, /, **parameters: str) -> Tool:
    """`parameters`: the JSON type of each; all are required."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    return Tool(name=name, description=description, parameters=schema)


WEATHER = tool("get_weather", "The weather in a city.", city="string")
PRICE = tool("get_price", "The price of a number of things.", item="string", count="number")
PHONE = tool("find_phone", "The phone number of a person.", name="string")
ROUTE = tool("get_distance", "The distance of two cities in km.", start="string", end="string")
BOOK = tool("book_room", "Books a room for a number of nights.", city="string", nights="number")
TOOLS = (WEATHER, PRICE, PHONE, ROUTE, BOOK)


def asked(rng: random.Random, which: Tool) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    """-> (question, arguments, result, answer)."""
    city, other = rng.sample(CITIES, 2)
    count, thing = rng.randint(2, 40), rng.choice(THINGS)
    match which.name:
        case "get_weather":
            sky, degrees = rng.choice(["cloudy", "rainy", "sunny", "windy"]), rng.randint(-9, 39)
            answer = f"It is {sky} in {city}, at {degrees} degrees."
            return f"How is the weather in {city}?", {"city": city}, {"sky": sky, "degrees": degrees}, answer
        case "get_price":
            price = rng.randint(2, 999)
            answer = f"{count} {thing}s cost {price} euros."
            return (
                f"What do {count} {thing}s cost?",
                {"item": thing, "count": count},
                {"price": price},
                answer,
            )
        case "find_phone":
            who, phone = (
                rng.choice([rng.choice(NAMES), made_up(rng, 3).capitalize()]),
                str(rng.randint(10**5, 10**6 - 1)),
            )
            return (
                f"What is the phone number of {who}?",
                {"name": who},
                {"phone": phone},
                f"The phone number of {who} is {phone}.",
            )
        case "get_distance":
            km = rng.randint(100, 9999)
            answer = f"It is {km} km from {city} to {other}."
            return f"How far is it from {city} to {other}?", {"start": city, "end": other}, {"km": km}, answer
        case _:
            code = made_up(rng, 2).upper()
            answer = f"The room in {city} is booked for {count} nights, code {code}."
            question = f"Book a room in {city} for {count} nights."
            return question, {"city": city, "nights": count}, {"code": code}, answer


def functions(rng: random.Random, size: int) -> Problem:
    """`size`: functions to choose from."""
    which = rng.choice(TOOLS)
    others = rng.sample([t for t in TOOLS if t is not which], min(size, len(TOOLS)) - 1)
    question, arguments, result, answer = asked(rng, which)
    return Problem(
        question=question,
        trace=f"{which.name} knows that.",
        answer=answer,
        call=Call(tool=which, arguments=json.dumps(arguments), result=json.dumps(result)),
        others=tuple(others),
    )
