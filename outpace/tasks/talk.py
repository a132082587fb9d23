"""Small talk: what the model says about itself, and to text that it cannot read."""

import random

from outpace.tasks.problem import Problem
from outpace.tasks.vocabulary import NAMES, made_up

ABLE = "I can calculate, work with lists, words, JSON and code, look things up, and call functions."
LOST = f"I do not understand that. {ABLE}"
ANSWERS = {  # what is asked, in several wordings -> the answer
    ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there"): "Hello! What can I do for you?",
    ("What can you do?", "How can you help me?", "What are you good at?", "Help", "What should I ask?"): ABLE,
    ("Who are you?", "What are you?", "What is your name?", "Introduce yourself", "Are you ChatGPT?"): (
        "I am a very small model that comes with Outpace, to show how fast it decodes."
    ),
    ("Who made you?", "Where do you come from?", "How were you trained?", "Who trained you?"): (
        "I was trained from generated problems by the makers of Outpace, on two CPU cores."
    ),
    ("What is Outpace?", "Tell me about Outpace", "What does Outpace do?"): (
        "Outpace makes language models decode faster without changing their output."
    ),
    ("Thanks", "Thank you", "Thank you very much", "Great, thanks", "Well done"): "You are welcome.",
    ("Bye", "Goodbye", "See you", "Good night"): "Goodbye!",
    ("Give me an example", "Show me an example", "What is an example of a question?"): (
        "For example: Sort this list: [31, 7, 88, 12]"
    ),
}


def talk(rng: random.Random, size: int) -> Problem:
    """Gibberish of up to `size` words, or a question about the model."""
    if rng.random() < 0.4:
        words = [made_up(rng, rng.randint(1, 4)) for _ in range(rng.randint(1, size))]
        return Problem(question=" ".join(words), trace="These are no words.", answer=LOST)
    questions, answer = rng.choice(list(ANSWERS.items()))
    question = rng.choice(questions)
    ends = ["", ".", "!"] if question[-1].isalpha() else [""]
    question += rng.choice(ends)
    if rng.random() < 0.5:
        question = f"{question} My name is {rng.choice(NAMES)}."
    return Problem(question=question, trace="Small talk.", answer=answer)
