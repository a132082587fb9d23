"""The Python API: what `import outpace` offers, on the embedded model and on tiny ones."""

import json
import subprocess
import sys

import pytest
import torch
from questions import PROMPT

import outpace
from outpace.decode.controller import Adaptive
from outpace.decode.generate import generate as decode
from outpace.decode.request import Request


@pytest.fixture(scope="module")
def model():
    return outpace.load("default")


def params(**more):
    return outpace.SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | more))


@pytest.mark.parametrize("draft", [None, "ngram", "eagle3", "dflash"])
def test_a_draft_changes_nothing_but_speed(model, draft):
    want = decode(model.target, [PROMPT], Request(max_new_tokens=40)).tokens[0]
    out = outpace.generate(model, PROMPT, draft=draft, sampling=params())
    assert out.tokens == want and out.finish_reason == "length"
    assert out.text == model.tokenizer.decode(want) and out.prompt_tokens == len(PROMPT)
    assert out.tau >= 1 and out.tokens_per_second > 0
    assert out.tau > 1 or draft is None  # by itself an answer so short is begun without a probe


def test_autoregressive_decoding(model):
    out = outpace.generate(model, PROMPT, draft=False, sampling=params())
    assert out.tau == 1


def test_a_batch_equals_its_rows(model):
    prompts = [PROMPT, "class A:\n", [5, 17, 300]]
    batch = outpace.generate(model, prompts, sampling=params())
    alone = [outpace.generate(model, prompt, sampling=params()) for prompt in prompts]
    assert [out.tokens for out in batch] == [out.tokens for out in alone]  # type: ignore[attr-defined]
    assert [out.text for out in batch] == [out.text for out in alone]  # type: ignore[attr-defined]


def test_a_stream_is_the_output_piece_by_piece(model):
    out = outpace.generate(model, PROMPT, draft="dflash", sampling=params())
    pieces = list(outpace.stream(model, PROMPT, draft="dflash", sampling=params()))
    assert "".join(piece.text for piece in pieces) == out.text
    assert [piece.token for piece in pieces] == out.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * 39 + ["length"]
    accepted = sum(step[0] for step in out.trace.accepted if step[0] >= 0)
    assert 0 < sum(piece.drafted for piece in pieces) <= accepted


def test_a_stream_can_be_left(model):
    stream = outpace.stream(model, PROMPT, sampling=params(max_tokens=1000))
    first = next(iter(stream))
    stream.close()
    assert first.token == outpace.generate(model, PROMPT, sampling=params(max_tokens=1)).tokens[0]


def test_a_stop_string_may_lie_across_tokens_and_steps(model):
    whole = outpace.generate(model, PROMPT, draft=False, sampling=params()).text
    for start in range(4, len(whole) - 7, 5):
        stop = whole[start : start + 6]
        want = whole[: whole.index(stop)]
        for draft in (False, "dflash"):
            out = outpace.generate(model, PROMPT, draft=draft, sampling=params(stop=[stop, "never this"]))
            assert (out.text, out.finish_reason) == (want, "stop"), (stop, draft)
            pieces = list(outpace.stream(model, PROMPT, draft=draft, sampling=params(stop=stop)))
            assert "".join(piece.text for piece in pieces) == want


def test_half_a_stop_string_is_not_lost(model):
    whole = outpace.generate(model, PROMPT, draft=False, sampling=params())
    out = outpace.generate(model, PROMPT, draft=False, sampling=params(stop=whole.text[-3:] + "more"))
    assert out.text == whole.text and out.finish_reason == "length"


def test_one_row_stops_and_the_others_go_on(model):
    whole = outpace.generate(model, [PROMPT, "class A:\n"], draft=False, sampling=params())
    stop = whole[0].text[8:14]
    assert stop not in whole[1].text
    out = outpace.generate(model, [PROMPT, "class A:\n"], sampling=params(stop=stop))
    assert out[0].text == whole[0].text[: whole[0].text.index(stop)] and out[1].tokens == whole[1].tokens


def test_end_tokens(model):
    tokens = outpace.generate(model, PROMPT, draft=False, sampling=params()).tokens
    for draft in (False, "dflash"):
        out = outpace.generate(model, PROMPT, draft=draft, sampling=params(stop_token_ids=[tokens[7]]))
        at = tokens.index(tokens[7])
        assert out.tokens == tokens[: at + 1] and out.finish_reason == "stop"


def test_a_seed_gives_one_text_and_gumbel_gives_it_with_any_draft(model):
    drawn = params(temperature=0.8, seed=3, acceptance="gumbel")
    texts = {
        outpace.generate(model, PROMPT, draft=draft, sampling=drawn).text
        for draft in (False, "eagle3", "dflash")
    }
    assert len(texts) == 1
    fresh = {outpace.generate(model, PROMPT, sampling=params(temperature=9.0)).text for _ in range(3)}
    assert len(fresh) > 1


def test_a_draft_can_be_loaded_once(model):
    draft = outpace.load_draft("dflash", model, num_draft_tokens=12, quantize="q8_0")
    out = outpace.generate(model, PROMPT, draft=draft, sampling=params())
    assert out.tokens == outpace.generate(model, PROMPT, draft=False, sampling=params()).tokens
    assert outpace.load_draft("none", model) is None


def test_messages_need_a_chat_format(model):
    if "<|start|>" in model.tokenizer.get_vocab():
        out = outpace.generate(model, [{"role": "user", "content": "Hi"}], sampling=params(max_tokens=4))
        assert out.prompt_tokens > 10
    else:
        with pytest.raises(ValueError, match="neither Harmony's tokens nor a chat template"):
            outpace.generate(model, [{"role": "user", "content": "Hi"}], sampling=params())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: outpace.load("no/such"), "no/such is not there"),
        (lambda m: outpace.load_draft("no/such", m), "no/such is not there"),
        (lambda m: outpace.generate(m, ""), "the prompt is empty"),
        (lambda m: outpace.generate(m, []), "the prompt is empty"),
        (lambda m: outpace.generate(m, "x", draft=True), "draft=True"),
        (lambda m: outpace.stream(m, ["a", "b"]).__next__(), "stream takes one prompt"),
        (lambda m: outpace.SamplingParams(temperature=-1), "temperature -1 is below 0"),
        (lambda m: outpace.SamplingParams(stop=["a", ""]), "an empty string would end"),
        (lambda m: outpace.SamplingParams(max_tokens=0), "max_new_tokens 0"),
        (lambda m: outpace.SamplingParams(acceptance="typical"), "rule 'typical'"),
        (lambda m: outpace.generate(m, [999_999]), "999999"),
    ],
)
def test_refusals(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_every_request_without_a_draft_has_a_controller_of_its_own(model, few_repeats, monkeypatch):
    """Threads may share a model; a controller counts what one generation accepts."""
    monkeypatch.setattr("outpace.decode.costs.Costs.busy", False)
    seen = []

    def noted(*arguments, controller, **more):
        seen.append(controller)
        return iter(())

    monkeypatch.setattr("outpace.api.steps", noted)
    model._controllers.clear()
    for how in ({}, {}, {"draft": "ngram"}, {"draft": False}):
        outpace.stream(model, "x", **how)
    drawn = {"temperature": 1.0, "acceptance": "rejection", "seed": 3}  # its text depends on the draft length
    outpace.stream(model, "x", sampling=outpace.SamplingParams(**drawn))
    first, second, *others = seen
    assert isinstance(first, Adaptive) and isinstance(second, Adaptive) and first is not second
    assert first.costs is second.costs and others == [None] * 3
    model._controllers.clear()  # of costs that mean nothing


def test_importing_outpace_is_quick_and_names_are_known():
    code = "import sys, json, outpace; print(json.dumps(['torch' in sys.modules, outpace.__version__]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch_loaded, version = json.loads(done.stdout)
    assert not torch_loaded and version.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'genrate'"):
        _ = outpace.genrate
    assert all(hasattr(outpace, name) for name in outpace.__all__)
    assert torch.is_inference_mode_enabled() is False
