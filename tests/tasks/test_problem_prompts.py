"""Problems as token ids: held out, short enough, the same with the same seed, and of every family."""

import pytest
from tokenizers import Tokenizer

from outpace.checkpoint.shipped import target_path
from outpace.tasks.families import FAMILIES
from outpace.tasks.prompts import draw, draw_mixed, draw_short, harmony_of, problem_prompts, problem_text
from outpace.text.harmony import HarmonyTokens, Mark, prompt_ids
from outpace.text.tokenizer import read_tokenizer

TOKENS = HarmonyTokens(read_tokenizer(target_path("default")))


def test_only_harmonys_tokenizers_are_taken():
    assert isinstance(harmony_of(TOKENS.tokenizer), HarmonyTokens)
    other = Tokenizer.from_str(TOKENS.tokenizer.to_str().replace(Mark.START, "<|turn|>"))
    assert harmony_of(other) is None


def test_problems_are_held_out_and_of_every_family():
    mixed = draw_mixed(2 * len(FAMILIES), 7)
    assert all(problem.held_out for problem in mixed) and len(mixed) == 2 * len(FAMILIES)
    assert mixed == draw_mixed(2 * len(FAMILIES), 7) != draw_mixed(2 * len(FAMILIES), 8)
    for family in FAMILIES:
        assert sum(problem in draw(family, 2, 7) for problem in mixed) == 2
    assert not any(problem.held_out for problem in draw_mixed(9, 7, held_out=False))


def test_prompts_are_as_short_as_asked():
    prompts = problem_prompts(TOKENS, 20, 3, 100)
    assert len(prompts) == 20 and max(map(len, prompts)) <= 100
    assert prompts == [prompt_ids(problem.prompt(), TOKENS) for problem in draw_short(TOKENS, 20, 3, 100)]
    with pytest.raises(ValueError, match=r"24 problems have 0 prompts of at most 9 tokens, not 3"):
        problem_prompts(TOKENS, 3, 3, 9)


def test_a_text_is_conversations_with_their_answers():
    ids = problem_text(TOKENS, 900, 3, families=("addition", "units"))
    assert len(ids) == 900 and ids == problem_text(TOKENS, 2000, 3, families=("addition", "units"))[:900]
    text = TOKENS.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.count("<|channel|>analysis") > 5 and text.count("<|channel|>final") > 5
