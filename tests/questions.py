"""A question that the embedded model answers right, mostly by copying: every kind of draft has its part."""

from outpace.checkpoint.shipped import target_path
from outpace.tasks.problem import Problem
from outpace.text.harmony import prompt_ids
from outpace.text.tokenizer import read_tokenizer

QUESTION = 'Rename the key "page" of this JSON to "age": {"page": "blue", "unit": "red", "year": "Nairobi"}'
ANSWER = '{"age": "blue", "unit": "red", "year": "Nairobi"}'
CHAT = [{"role": "user", "content": QUESTION}]
PROMPT = prompt_ids(
    Problem(question=QUESTION, trace="", answer=ANSWER).prompt(), read_tokenizer(target_path("default"))
)
