"""The repetition penalty against transformers' own greedy decoding, plain and with drafts."""

import pytest
import tiny
import torch
from scripted import Scripted
from test_lossless import PROMPTS, random_dflash

from outpace.checkpoint.open import open_checkpoint
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.models.load import load_target
from outpace.ops.sampling import Sampling

NEW, TEXTS, PENALTY = 14, PROMPTS[:2], 1.3


def theirs(twin, prompt):
    ids = torch.tensor([prompt])
    value = twin.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        repetition_penalty=PENALTY,
        eos_token_id=None,
    )
    return value[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_greedy_with_a_penalty_is_what_transformers_says(family, twins):
    folder, twin = twins(family)
    model = load_target(open_checkpoint(folder))
    wanted = [theirs(twin, prompt) for prompt in TEXTS]
    request = Request(max_new_tokens=NEW, sampling=Sampling(repetition_penalty=PENALTY))
    assert generate(model, TEXTS, request).tokens == wanted
    draft = random_dflash(model)
    for each in (draft, DDTree(draft, nodes=8), NGram(longest=2, shortest=1)):
        assert generate(model, TEXTS, request, each).tokens == wanted
    assert generate(model, TEXTS, Request(max_new_tokens=NEW)).tokens != wanted


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": PENALTY},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -0.3},
        {"presence_penalty": 1.5},
    ],
)
def test_penalties_count_the_accepted_draft_tokens(penalty):
    """Drafts that are mostly right: a token accepted within a step is penalized in the rest of that step."""
    model = tiny.target("llama")
    request = Request(max_new_tokens=24, sampling=Sampling(**penalty))
    wanted = generate(model, TEXTS, request).tokens
    assert wanted != generate(model, TEXTS, Request(max_new_tokens=24)).tokens
    draft = Scripted(answers=wanted, prompts=TEXTS, wrong=lambda row, position: (position + row) % 7 == 3)
    out = generate(model, TEXTS, request, draft)
    assert out.tokens == wanted
    assert out.trace.accept_rate > 0.4 and max(out.trace.accept_lens) == 4
