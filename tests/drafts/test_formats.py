"""Drafts as files: read(write(x)) is x, chains come back, every engine takes the same from what we write."""

import dataclasses
import itertools
import json

import draft_samples as samples
import pytest
import readers
import readers_eagle3 as eagle3
import tiny
import torch

from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.formats.export import export_draft
from outpace.formats.load import FORMATS, build_draft, detect, read_draft
from outpace.formats.spec import DFLASH, EAGLE3

LAST = 77
OF_DFLASH = [name for name, f in FORMATS.items() if f.kind == DFLASH]
OF_EAGLE3 = [name for name, f in FORMATS.items() if f.kind == EAGLE3]
# what a format cannot hold, and reports it; everything else must come back
REFUSED = {
    "biases": ("gguf", "transformers"),
    "causal window": ("transformers",),
    "some causal windows": ("gguf", "transformers"),
    "norm per state": ("gguf-eagle3",),
    "two states": ("gguf-eagle3",),
    "window": ("gguf-eagle3",),
    "two layers": ("gguf-eagle3",),
    "one pass": ("gguf-eagle3", "speculators-eagle3"),
    "one pass, a token": ("gguf-eagle3",),
}
OF_ONE_STEP = [v for v in samples.EAGLE3S if v not in ("two layers", "one pass", "one pass, a token")]


def written(draft, name, folder, target):
    """The draft in a format, or None where it must be refused."""
    out = folder / (f"{name}.gguf" if name.startswith("gguf") else name)
    export_draft(draft, name, out, target, allow_lossy=True)
    assert detect(out) == name
    return out


def formats(variant, names):
    return [name for name in names if name not in REFUSED.get(variant, ())]


@pytest.mark.parametrize("variant", samples.DFLASHES)
def test_a_dflash_comes_back_from_every_format(variant, target, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        draft = samples.dflash(dtype, **samples.DFLASHES[variant])
        comes_back(draft, formats(variant, OF_DFLASH), target, tmp_path)


@pytest.mark.parametrize("variant", samples.EAGLE3S)
def test_an_eagle3_comes_back_from_every_format(variant, target, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        draft = samples.eagle3(dtype, **samples.EAGLE3S[variant])
        comes_back(draft, formats(variant, OF_EAGLE3), target, tmp_path)


def comes_back(draft, names, target, folder):
    """From each format, with the target named and without."""
    for name in names:
        out = written(draft, name, folder, target)
        for known in (target, None):
            samples.same(draft, read_draft(out, known)[1])


@pytest.mark.parametrize("variant", ["yarn", "some windows", "one state", "normed residual", "target's head"])
def test_chains_of_formats_come_back(variant, target, tmp_path):
    of_dflash = variant in samples.DFLASHES
    make, names = (samples.dflash, OF_DFLASH) if of_dflash else (samples.eagle3, OF_EAGLE3)
    draft = make(torch.bfloat16, **(samples.DFLASHES if of_dflash else samples.EAGLE3S)[variant])
    for one, other in itertools.combinations(names, 2):
        there = written(read_draft(written(draft, one, tmp_path, target))[1], other, tmp_path, target)
        samples.same(draft, read_draft(written(read_draft(there)[1], one, tmp_path, target))[1])


@pytest.mark.parametrize(("variant", "names"), REFUSED.items())
def test_what_a_format_cannot_hold_is_refused_by_name(variant, names, target, tmp_path):
    for name in names:
        changes = samples.DFLASHES if FORMATS[name].kind == DFLASH else samples.EAGLE3S
        make = samples.dflash if FORMATS[name].kind == DFLASH else samples.eagle3
        with pytest.raises(
            ValueError, match=f"{name} cannot hold this draft: (llama.cpp|transformers|speculators)"
        ):
            written(make(**changes[variant]), name, tmp_path, target)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["zlab", "speculators", "transformers"])
def test_a_window_narrower_than_the_block_is_refused(name, target, tmp_path):
    """Those engines measure it to both sides, so that it would hide the block's far end."""
    narrow = samples.dflash(layer_types=("sliding_attention",) * 3, sliding_window=4)
    with pytest.raises(ValueError, match="a window of 4 also hides the far end of a block of 5"):
        written(narrow, name, tmp_path, target)
    written(narrow, "gguf", tmp_path, target)


def test_a_learned_mask_is_ours_alone(target, tmp_path):
    """It is kept in z-lab's layout; no engine knows the tensor, so no export of it is made."""
    draft = samples.dflash(mask_token_id=None)
    FORMATS["zlab"].write(draft, tmp_path / "kept")
    samples.same(draft, read_draft(tmp_path / "kept")[1])
    for name in OF_DFLASH:
        with pytest.raises(ValueError, match="learned mask_embedding"):
            export_draft(draft, name, tmp_path / "out", target)


def test_precisions_may_be_mixed(target, tmp_path):
    draft = samples.dflash(torch.bfloat16)
    mixed = {n: t.float() if t.dim() == 1 else t for n, t in draft.tensors.items()}
    comes_back(dataclasses.replace(draft, tensors=mixed), OF_DFLASH, target, tmp_path)


# ---- every engine, by its own rules, from what we write -----------------------------------------------


@torch.inference_mode()
def our_block(draft, hs):
    bound = build_draft(draft).bind(samples.target())
    session = bound.begin(1, 64)
    aux = torch.stack([hs[k + 1] for k in draft.config.target_layer_ids])[:, None]
    session.observe(torch.zeros(1, len(hs[0]), dtype=torch.long), aux, [len(hs[0])])
    return session.block_hidden(torch.tensor([LAST]))[0]


DFLASH_READERS = [
    ("zlab", readers.sglang_dflash),
    ("zlab", readers.vllm_dflash),
    ("speculators", readers.vllm_dflash),
    ("speculators", readers.speculators_dflash),
    ("gguf", readers.llama_cpp_dflash),
]


@pytest.mark.parametrize("variant", samples.DFLASHES)
@pytest.mark.parametrize(("name", "reader"), DFLASH_READERS, ids=lambda x: getattr(x, "__name__", x))
def test_every_engine_takes_the_same_dflash(variant, name, reader, target, tmp_path):
    """The same states and the same hidden rows as ours, past the window."""
    if name in REFUSED.get(variant, ()):
        pytest.skip("the format refuses this draft, which another test shows")
    draft, hs = samples.dflash(**samples.DFLASHES[variant]), samples.hidden_states(13)
    result = reader(written(draft, name, tmp_path, target), hs, samples.embedding(), LAST)
    wanted = torch.cat([hs[k + 1] for k in draft.config.target_layer_ids], -1)
    assert torch.equal(result.states.float(), wanted)
    difference = (result.hidden - our_block(draft, hs)).abs().max()
    if "window" in variant and reader is readers.speculators_dflash:
        assert difference > 1e-2  # anchored at the block's start, one longer: it cannot say ours
    else:
        assert difference < 1e-3


class Listening:
    """The most probable draft token; and what it was chosen from."""

    def __init__(self):
        self.logits = []

    def tokens(self, logits, depth):
        self.logits.append(logits[0, 0])
        return logits.argmax(-1), None


@torch.inference_mode()
def our_chain(draft, hs):
    """Three draft tokens by the module that serves; our layer l is hs[l + 1]."""
    bound = BoundEagle3(build_draft(draft), samples.target(), TreeShape(depth=3))
    session, recorded = bound.begin(1, 64), Listening()
    states = [hs[k + 1] for k in draft.config.layer_ids]
    session.observe(tiny.tokens(1, len(hs[0])), torch.stack(states)[:, None], [len(hs[0])])
    items = session.propose(torch.tensor([LAST]), 4, recorded).tokens[0, 1:].tolist()
    return eagle3.Chain(torch.cat(states, -1).double(), recorded.logits, items)


EAGLE3_READERS = [
    ("sglang-eagle3", eagle3.sglang_eagle3),
    ("sglang-eagle3", eagle3.vllm_eagle3),
    ("speculators-eagle3", eagle3.vllm_eagle3),
    ("speculators-eagle3", eagle3.speculators_eagle3),
    ("gguf-eagle3", eagle3.llama_cpp_eagle3),
]
# (engine, variant) that its remark names: SGLang has no such norm, and its own embedding
MISREAD = {"normed residual", "norm before fc", "own embedding"}


@pytest.mark.parametrize("variant", OF_ONE_STEP)
@pytest.mark.parametrize(("name", "reader"), EAGLE3_READERS, ids=lambda x: getattr(x, "__name__", x))
def test_every_engine_takes_the_same_eagle3(variant, name, reader, target, tmp_path):
    """The same states, the same logits of three draft tokens, the same tokens."""
    if name in REFUSED.get(variant, ()):
        pytest.skip("the format refuses this draft, which another test shows")
    if variant == "narrow" and reader is eagle3.sglang_eagle3:
        pytest.skip("SGLang takes the target's embedding, which is too wide: its remark reports it")
    draft, hs = samples.eagle3(**samples.EAGLE3S[variant]), samples.hidden_states(9)
    out = written(draft, name, tmp_path, target)
    tokens = tiny.tokens(1, 9)[0].tolist()
    more = {"window": 6} if variant == "window" and reader is eagle3.sglang_eagle3 else {}
    result = reader(out, hs, samples.embedding(), samples.head(), tokens, LAST, **more)
    wanted = our_chain(draft, hs)
    assert torch.equal(result.states, wanted.states)
    same = result.tokens == wanted.tokens and all(
        torch.allclose(a.float(), b.float(), atol=1e-3)
        for a, b in zip(result.logits, wanted.logits, strict=True)
    )
    assert same is not (reader is eagle3.sglang_eagle3 and variant in MISREAD)


def specforge_and_ours(folder, draft):
    hs, tokens = samples.hidden_states(9), tiny.tokens(1, 9)[0].tolist()
    theirs = eagle3.specforge_eagle3(folder, hs, samples.embedding(), samples.head(), tokens, LAST)
    pairs = zip(theirs.logits, our_chain(draft, hs).logits, strict=True)
    return [(a[a.isfinite()] - b[b.isfinite()]).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("variant", [*samples.ROPES, "whole vocabulary"])
def test_specforge_reads_the_same_eagle3(variant, target, tmp_path):
    """Its class takes norm_output false as "no norm before the head": the key must not be there."""
    draft = samples.eagle3(**samples.EAGLE3S[variant])
    assert max(specforge_and_ours(written(draft, "sglang-eagle3", tmp_path, target), draft)) < 1e-3
    folder = samples.edited(
        tmp_path, target, draft, "sglang-eagle3", lambda c, t: c.update(norm_output=False)
    )
    assert min(specforge_and_ours(folder, draft)) > 0.1


def test_specforge_differs_at_steps_2_and_3_with_norm_output(target, tmp_path):
    draft = samples.eagle3(fc_norm=True, norm_output=True)
    first, *later = specforge_and_ours(written(draft, "sglang-eagle3", tmp_path, target), draft)
    assert first < 1e-3 and min(later) > 1e-2
    warnings = export_draft(draft, "sglang-eagle3", tmp_path / "again", target)
    assert [(w.engine, w.check) for w in warnings] == [("SpecForge", "norms")]
    assert "steps 2 and 3 differ" in warnings[0].message


def test_what_engines_will_misread_is_remarked(target, tmp_path):
    def notes(draft, name):
        return {
            (r.engine, r.check) for r in export_draft(draft, name, tmp_path / name, target, allow_lossy=True)
        }

    for variant in MISREAD:
        check = "embedding, head" if variant == "own embedding" else "norms"
        assert notes(samples.eagle3(**samples.EAGLE3S[variant]), "sglang-eagle3") == {
            (engine, check) for engine in ("SGLang", "SpecForge")
        }
    window = samples.dflash(**samples.WINDOWS)
    assert notes(window, "speculators") == {("speculators", "window")}
    assert notes(window, "zlab") == set()
    mixed = samples.dflash(**samples.DFLASHES["some causal windows"])
    assert notes(mixed, "speculators") == {("speculators", "window"), ("vLLM", "block sees")}


def test_layer_ids_stand_in_every_place(target, tmp_path):
    """The worked case of a 24-layer target: SGLang's nested k, vLLM's and llama.cpp's k + 1."""
    draft = samples.eagle3(layer_ids=(1, 2, 4))
    data = json.loads((written(draft, "sglang-eagle3", tmp_path, target) / "config.json").read_text())
    key = "eagle_aux_hidden_state_layer_ids"
    assert (data["eagle_config"][key], data[key]) == ([1, 2, 4], [2, 3, 5])
    dflash = samples.dflash()
    data = json.loads((written(dflash, "zlab", tmp_path, target) / "config.json").read_text())
    assert (data["dflash_config"]["target_layer_ids"], data[key]) == ([0, 2, 4], [1, 3, 5])
    data = json.loads((written(dflash, "speculators", tmp_path, target) / "config.json").read_text())
    assert data["aux_hidden_state_layer_ids"] == [1, 3, 5]
