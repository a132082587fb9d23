"""The check that rows of a verify pass are one-token steps: what passes it, what does not, what follows."""

import logging

import pytest
import tiny
import torch
from questions import CHAT

import outpace
from outpace import api, loading
from outpace.decode.exactness import check_rows, why_inexact
from outpace.kernels import bindings
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.load import build, named_tensors

kernels = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")


def model_of(family):
    model = build(tiny.config(family, head_dim=8))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


@pytest.fixture
def products_of_torch(monkeypatch):
    """Without the C kernels, as on a GPU: a product's sums depend on its shape, and experts are gathered."""
    monkeypatch.setattr(bindings, "available", lambda: False)
    monkeypatch.setattr("outpace.ops.moe.captured", lambda x: True)


@kernels
def test_the_kernels_rows_are_exact_and_so_are_graphs_of_them():
    model = model_of("gpt_oss")
    assert why_inexact(model) is None and why_inexact(GraphTarget(model), 2) is None
    assert check_rows(model, widths=(1,), batches=(255, 256, 257)) == []
    assert check_rows(GraphTarget(model), 2, widths=(2,), batches=(5,)) == []
    assert check_rows(GraphTarget(model, deterministic=True), 2, widths=(1, 2, 7)) == []


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_products_of_another_shape_differ_and_one_shape_makes_them_equal(products_of_torch, family):
    model = model_of(family)
    assert {"a chain of 8", "a tree of 8"} <= set(check_rows(model, widths=(1, 8)))
    assert check_rows(GraphTarget(model, deterministic=True), widths=(1, 8)) == []
    if family == "llama":
        assert why_inexact(model).startswith("in float32 on cpu the rows of a verify pass differ from one-to")


class Odd:
    """A target where one row of one kind of pass is off by the least there is."""

    def __init__(self, decoder, width, row, tree, field):
        self.decoder, self.kind, self.row, self.field = decoder, (width, tree), row, field

    def __getattr__(self, name):
        return getattr(self.decoder, name)

    def __call__(self, tokens, cache, *, tree=None, **options):
        out = self.decoder(tokens, cache, tree=tree, **options)
        if (tokens.numel(), tree is not None) == self.kind:
            rows = getattr(out, self.field).flatten(0, 1)
            rows[self.row, 5] = rows[self.row, 5].nextafter(torch.tensor(9e9))
        return out


@kernels
@pytest.mark.parametrize("field", ["hidden", "logits"])
@pytest.mark.parametrize(
    ("width", "row", "tree", "batches", "what"),
    [
        (6, 5, False, (), "a chain of 6"),
        (6, 0, True, (), "a tree of 6"),
        (9, 8, False, (9,), "a batch of 9"),
    ],
)
def test_the_last_bit_of_one_row_is_reported(width, row, tree, batches, what, field):
    target = Odd(model_of("llama"), width, row, tree, field)
    assert check_rows(target, widths=(1, 5, 6, 7), batches=batches) == [what]


def test_a_target_that_fails_it_decodes_without_drafts(monkeypatch, caplog):
    """Of every kind: by name, of the controller, an object; the text is autoregressive decoding's."""
    plain = outpace.load()
    monkeypatch.setattr(api, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: plain.target)
    with pytest.raises(ValueError, match="tensor_parallel_size 2: one process holds a target on a GPU"):
        outpace.load(device="cuda", tensor_parallel_size=2)
    for why in ("rows differ", None):
        monkeypatch.setattr(loading, "why_inexact", lambda *_, why=why: why)
        with caplog.at_level(logging.WARNING):
            model = outpace.load(device="cuda")
        assert ("drafts are not used: rows differ; try deterministic" in caplog.text) == (why is not None)
        assert model.declined == why and model.executor is model.graphs
        draft = outpace.load_draft("ngram", plain)
        for named in ("dflash", draft, None):
            sampling = outpace.SamplingParams(max_tokens=40)
            out = outpace.generate(model, CHAT, draft=named, sampling=sampling)
            want = outpace.generate(plain, CHAT, draft=False, sampling=sampling)
            assert out.tokens == want.tokens
            if why is not None or named is not None:
                assert (out.tau == 1) == (why is not None)
        assert model.graphs.captured
        caplog.clear()
