"""The synthetic draft: it is accepted as often as it is told, changes no text, and runs the draft it has."""

from itertools import accumulate
from operator import mul

import pytest
import tiny
import torch

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.lookup import NGram
from outpace.drafts.synthetic import Synthetic, rates_of, tau_of
from outpace.ops.sampling import Sampling

PROMPTS = [tiny.tokens(9, seed=1).tolist(), tiny.tokens(14, seed=2).tolist()]
NEW = 400


def decoded(prompts, rates, rule="match", temperature=0.0, inner=None, family="gpt_oss"):
    """-> tokens of plain decoding, and the generation with a synthetic draft."""
    target = tiny.target(family)
    request = Request(max_new_tokens=NEW, sampling=Sampling(temperature=temperature), rule=rule)

    def rng():
        return torch.Generator().manual_seed(3)

    plain = generate(target, prompts, request, rng=rng()).tokens
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]
    draft = Synthetic(texts, rates, target.config.vocab_size, 5, inner)
    return plain, generate(target, prompts, request, draft, rng=rng())


@pytest.mark.parametrize("rates", [(0.9, 0.5, 0.2), (1.0,) * 5, (0.0, 1.0)])
def test_as_many_are_accepted_as_the_rates_say(rates):
    plain, out = decoded(PROMPTS, rates)
    assert out.tokens == plain
    wanted = list(accumulate(rates, mul))
    measured = out.trace.accept_by_position()
    steps = len(out.trace.accept_lens)
    assert [x for x in wanted if x] == pytest.approx(measured[: sum(map(bool, wanted))], abs=2.5 / steps**0.5)
    assert not any(measured[sum(map(bool, wanted)) :])


def test_with_noise_of_their_own_all_say_the_same_above_temperature_0():
    plain, out = decoded(PROMPTS[:1], (0.8, 0.8), rule="gumbel", temperature=1.0)
    assert out.tokens == plain and len(set(plain[0])) > 20
    assert 1.5 < out.trace.tau < 2.9


class Counting(NGram):
    """Counts what is asked of it."""

    asked = 0

    def begin(self, *sizes):
        session = super().begin(*sizes)
        propose = session.propose

        def counted(*arguments):
            Counting.asked += 1
            return propose(*arguments)

        session.propose = counted
        return session


def test_the_draft_that_runs_is_asked_at_every_step_and_changes_nothing():
    _, alone = decoded(PROMPTS[:1], (0.7,) * 3)
    plain, out = decoded(PROMPTS[:1], (0.7,) * 3, inner=Counting(block_size=4))
    assert out.tokens == plain == alone.tokens
    assert Counting.asked == len(out.trace.accept_lens) == len(alone.trace.accept_lens)


def test_a_text_that_the_target_does_not_say_is_noticed():
    target = tiny.target("gpt_oss")
    texts = [[*PROMPTS[0], *range(5, 40)]]
    draft = Synthetic(texts, (0.5,), target.config.vocab_size)
    with pytest.raises(ValueError, match="row 0 says another token at"):
        generate(target, PROMPTS[:1], Request(max_new_tokens=30), draft)


@pytest.mark.parametrize(("tau", "block"), [(5.1, 8), (6.5, 16), (1.0, 4), (7.0, 7)])
def test_one_rate_for_a_tau(tau, block):
    rates = rates_of(tau, block)
    assert len(set(rates)) == 1 and len(rates) == block - 1
    assert tau_of(rates) == pytest.approx(tau, abs=1e-9)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="tau 9: a step in blocks of 8 gives 1 to 8"):
        rates_of(9, 8)
    for rates in ((), (1.2,)):
        with pytest.raises(ValueError, match="one of each draft token, each from 0 to 1"):
            Synthetic([[1]], rates, 10)
    with pytest.raises(ValueError, match=r"2 rates are of blocks of 3, .* blocks of 4"):
        Synthetic([[1]], (0.5, 0.5), 10, inner=NGram(block_size=4))
