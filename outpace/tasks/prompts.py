"""Problems as token ids: prompts that end where the answer begins, and conversations with their answers."""

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from outpace.tasks.families import FAMILIES
from outpace.tasks.problem import Problem
from outpace.text.harmony import HarmonyTokens, prompt_ids

# of problems that are drawn, as many as are wanted each, until enough are short; seeds of the parts lie
# apart, since those of other texts count up
PARTS, APART = 8, 1009


def harmony_of(tokenizer: Tokenizer) -> HarmonyTokens | None:
    """None for a tokenizer without Harmony's tokens."""
    try:
        return HarmonyTokens(tokenizer)
    except ValueError:
        return None


def draw(family: str, count: int, seed: int, longer: bool = False, held_out: bool = True) -> list[Problem]:
    """Problems of a family, held out from training or not; the same ones with the same seed."""
    rng = random.Random(f"{seed} {family} {longer}")
    return [FAMILIES[family].draw(rng, held_out=held_out, longer=longer) for _ in range(count)]


def draw_mixed(
    count: int, seed: int, families: Sequence[str] = tuple(FAMILIES), held_out: bool = True
) -> list[Problem]:
    """Problems of each family in turn, the families in random order."""
    order = random.Random(seed).sample(families, len(families))
    each = [draw(family, -(-count // len(order)), seed, held_out=held_out) for family in order]
    return [problem for turn in zip(*each, strict=True) for problem in turn][:count]


def draw_short(tokens: HarmonyTokens, count: int, seed: int, longest: int) -> list[Problem]:
    """`count` held-out problems of all families, with prompts of at most `longest` tokens. Raises ValueError
    where that is too short for problems."""
    short: list[Problem] = []
    for part in range(PARTS):
        drawn = draw_mixed(count, seed + APART * part)
        short += [p for p in drawn if len(prompt_ids(p.prompt(), tokens)) <= longest]
        if len(short) >= count:
            return short[:count]
    raise ValueError(
        f"{PARTS * count} problems have {len(short)} prompts of at most {longest} tokens, not {count}: ask "
        "for fewer or longer ones"
    )


def problem_prompts(tokens: HarmonyTokens, count: int, seed: int, longest: int) -> list[list[int]]:
    """The prompts of `draw_short`."""
    return [prompt_ids(p.prompt(), tokens) for p in draw_short(tokens, count, seed, longest)]


def problem_text(
    tokens: HarmonyTokens,
    length: int,
    seed: int,
    effort: str = "medium",
    families: Sequence[str] = tuple(FAMILIES),
) -> list[int]:
    """`length` tokens of conversations with the working and the answer, one after the other."""
    ids: list[int] = []
    while len(ids) < length:
        for problem in draw_mixed(len(families), seed, families):
            ids += prompt_ids(problem.conversation(effort), tokens, generation_prompt=False)
        seed += 1
    return ids[:length]
