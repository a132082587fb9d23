"""The EAGLE-3 module against its plain reference, stage by stage; how it is started, kept and opened."""

import dataclasses
import json

import draft_samples as samples
import pytest
import tiny
import torch
from eagle3_drafts import IDS, VARIANTS, Oracle, bound_eagle3, over_all, random_eagle3
from safetensors.torch import load_file

from outpace.checkpoint.open import LoadError
from outpace.drafts.eagle3 import init_eagle3
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.drafts.lookup import NGram
from outpace.drafts.sampler import Greedy
from outpace.drafts.tree import DDTree
from outpace.formats.export import export_draft
from outpace.formats.load import build_draft, describe_draft, detect, load_draft, save_draft
from outpace.formats.preflight import PreflightCell, preflight
from outpace.loading import loaded_files, open_draft, open_target
from outpace.models.load import named_tensors
from outpace.ops.attention import attend, causal, causal_attend
from outpace.text.tokenizer import read_tokenizer

B, T = 2, 13


def forward(draft, target, tokens, following, attend_by=None):
    """Whole sequences -> features, hidden, logits; the way training runs it."""
    c = draft.config
    features = draft.fuse(target(tokens, aux=draft.target_layer_ids).aux)

    def by_flash(layer, q, k, v):
        return causal_attend(q, k, v, c.sliding_window, None, c.head_dim**-0.5)

    embeds = draft.embed(following, target)
    cos, sin = draft.rope(torch.arange(tokens.shape[1]).expand(len(tokens), -1))
    hidden = draft(embeds, features, cos, sin, attend_by or by_flash)
    return features, hidden, draft.head(hidden, target)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("serving", [True, False])
def test_the_module_is_the_equations(variant, serving):
    """With gradients (training) and without (the CPU's kernels): the numbers of the plain reference."""
    target = tiny.target("gpt_oss")
    draft = random_eagle3(target, **VARIANTS[variant])
    text = tiny.tokens(B, T + 1)
    with torch.inference_mode(serving):
        features, hidden, logits = forward(draft, target, text[:, :-1], text[:, 1:])
    aux = target(text[:, :-1], aux=draft.target_layer_ids).aux.detach()
    for b in range(B):
        oracle = Oracle(BoundEagle3(draft, target), aux[:, b], text[b, :-1].tolist(), int(text[b, -1]))
        with torch.no_grad():
            wanted = oracle.stages(text[b, 1:].tolist(), oracle.features)
        for got, stage in ((features, "fc"), (hidden, "hidden"), (logits, "logits")):
            torch.testing.assert_close(got[b].double(), wanted[stage], atol=2e-4, rtol=2e-4)
    wide = over_all(draft, logits)
    assert wide.shape == (B, T, tiny.VOCAB)
    if draft.d2t is not None:
        assert torch.equal(wide.isfinite().any(0).any(0).nonzero()[:, 0], IDS)
        assert torch.equal(wide[..., IDS], logits)


def test_what_comes_later_changes_nothing():
    target, draft = tiny.target("gpt_oss"), random_eagle3(tiny.target("gpt_oss"))
    text = tiny.tokens(1, T + 1)
    other = torch.cat((text[:, :8], tiny.tokens(1, T - 7, seed=3)), dim=1)
    with torch.no_grad():
        a, b = (forward(draft, target, x[:, :-1], x[:, 1:])[2] for x in (text, other))
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.allclose(a[:, 7], b[:, 7])


def test_training_and_the_reference_attention_agree():
    """`attend` is the caller's: the reference with a mask gives what the flash kernel gives."""
    target, draft = tiny.target("gpt_oss"), random_eagle3(tiny.target("gpt_oss"), sliding_window=5)
    text = tiny.tokens(B, T + 1)
    allowed = causal(T, 5, torch.device("cpu")).expand(B, -1, -1)

    def plain(layer, q, k, v):
        return attend(q, k, v, allowed, None, 8**-0.5)

    result = forward(draft, target, text[:, :-1], text[:, 1:])
    wanted = forward(draft, target, text[:, :-1], text[:, 1:], plain)
    torch.testing.assert_close(result[2], wanted[2], atol=1e-4, rtol=1e-4)


def test_every_parameter_learns():
    target = tiny.target("gpt_oss")
    changes = {"fc_norm": True, "norm_before_fc": True, "parallel": True, "num_layers": 2}
    draft = random_eagle3(target, own_embedding=True, **changes).train()
    text = tiny.tokens(B, T + 1)
    _, hidden, logits = forward(draft, target, text[:, :-1], text[:, 1:])
    embeds, feature = draft.masks(target)
    (logits.logsumexp(-1).sum() + hidden.sum() + embeds.sum() + (feature**3).sum()).backward()
    still = [n for n, p in draft.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert still == []


# ---- started -------------------------------------------------------------------------------------------


def test_a_draft_begins_from_the_targets_head():
    target = tiny.target("gpt_oss")
    config = random_eagle3(target).config
    draft = init_eagle3(config, 3, ids=IDS, head=target.dense_head)
    assert torch.equal(draft.lm_head.weight, target.dense_head[IDS])
    assert torch.equal(draft.target_ids(), IDS)
    again, other = (init_eagle3(config, seed, ids=IDS) for seed in (3, 4))
    assert torch.equal(draft.fc.weight, again.fc.weight) and not torch.equal(again.fc.weight, other.fc.weight)
    assert draft.norm.weight.eq(1).all() and 0.015 < draft.fc.weight.std() < 0.025


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "give `ids`"),
        (IDS[:-1], "32 .draft_vocab_size. ascending"),
        (IDS.flip(0), "ascending"),
        (IDS + 40, "below 97"),
    ],
)
def test_words_that_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        init_eagle3(random_eagle3(tiny.target("gpt_oss")).config, 0, ids=ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "at least one"),
        ({"mask_token_id": 3}, "a parallel EAGLE-3 alone has one"),
        ({"parallel": True, "mask_token_id": 97}, "below 97"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(random_eagle3(tiny.target("gpt_oss")).config, **changes)


# ---- kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", samples.EAGLE3S)
def test_what_is_described_is_what_was_built(variant):
    described = samples.eagle3(torch.bfloat16, **samples.EAGLE3S[variant])
    draft = build_draft(described)
    samples.same(described, describe_draft(draft))
    assert {n for n, _ in named_tensors(draft) if n.startswith("layers.")} == {
        f"layers.{i}.{n}.weight"
        for i in range(described.config.num_layers)
        for n in ("input_layernorm", "qkv_proj", "o_proj", "post_attention_layernorm", "mlp.gate_up_proj",
                  "mlp.down_proj", *(() if i else ("hidden_norm",)))
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"parallel": True, "num_layers": 2}])
def test_save_and_load_come_back(changes, tmp_path):
    target = tiny.target("gpt_oss")
    draft = random_eagle3(target, **changes)
    save_draft(draft, tmp_path / "draft", torch.float32)
    assert detect(tmp_path / "draft") == "sglang-eagle3"
    again = load_draft(tmp_path / "draft")
    samples.same(describe_draft(draft), describe_draft(again))
    session = [BoundEagle3(d, target, TreeShape(depth=3)).begin(1, 20) for d in (draft, again)]
    text = tiny.tokens(1, 9)
    with torch.inference_mode():
        aux = target(text, aux=draft.target_layer_ids).aux
        for one in session:
            one.observe(text, aux, [9])
        a, b = (one.propose(torch.tensor([8]), 4, Greedy()) for one in session)
    assert torch.equal(a.tokens, b.tokens)
    save_draft(draft, tmp_path / "draft")
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16 and stored["d2t"].dtype == torch.int64


def test_what_engines_make_of_more_than_eagle3(tmp_path):
    """Layers after the first and draft tokens in one pass: who runs less of it is named, and nothing fixes
    it."""
    files = samples.target_files(tmp_path / "target")
    draft = samples.eagle3(num_layers=2, parallel=True, mask_token_id=samples.MASK)
    export_draft(draft, "sglang-eagle3", tmp_path / "draft", files)
    rows = {row.check: row for row in preflight(tmp_path / "draft", files).rows}
    states = {
        check: {e: c.state for e, c in rows[check].cells.items()}
        for check in ("layers", "one pass", "layer ids")
    }
    for check, theirs in (("layers", "1"), ("one pass", "no, step by step")):
        assert rows[check].cells["SGLang"] == PreflightCell("differs", theirs) and rows[check].fix == ""
        assert (states[check]["vLLM"], states[check]["llama.cpp"]) == ("same", "refuses")
    assert states["layer ids"]["SGLang"] == "same"
    learnt = samples.eagle3(parallel=True)
    export_draft(learnt, "sglang-eagle3", tmp_path / "learnt", files)
    result = preflight(tmp_path / "learnt", files)
    assert next(r for r in result.rows if r.check == "one pass").cells["vLLM"].state == "refuses"


def test_a_one_pass_draft_of_speculators_needs_its_mask(tmp_path):
    files = samples.target_files(tmp_path / "target")
    draft = samples.eagle3(parallel=True, mask_token_id=samples.MASK)
    out = samples.edited(tmp_path, files, draft, "speculators-eagle3", lambda config, tensors: None)
    data = json.loads((out / "config.json").read_text())
    assert (data["speculators_model_type"], data["mask_token_id"]) == ("peagle", samples.MASK)
    assert load_file(out / "model.safetensors")["mask_hidden"].shape == (1, 1, 3 * 96)
    wanted = {"vLLM": "same", "speculators": "same", "llama.cpp": "refuses"}
    row = next(r for r in preflight(out, files).rows if r.check == "one pass")
    assert {engine: row.cells[engine].state for engine in wanted} == wanted
    for edit, note in (
        (lambda c, t: c.pop("mask_token_id"), "mask_token_id is missing"),
        (lambda c, t: c.update(speculators_model_type="eagle3"), "left over in the checkpoint: mask_hidden"),
        (lambda c, t: c.update(speculators_model_type=["peagle"]), "neither a DFlash nor an EAGLE-3"),
    ):
        out = samples.edited(tmp_path, files, draft, "speculators-eagle3", edit)
        with pytest.raises(LoadError, match=note):
            load_draft(out)


# ---- opened ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = samples.target_folder(tmp_path_factory.mktemp("target"))
    return folder, *open_target(str(folder))


@pytest.mark.parametrize("name", ["sglang-eagle3", "speculators-eagle3", "gguf-eagle3"])
def test_every_format_opens_and_drafts(name, opened, tmp_path):
    folder, target, tokenizer = opened
    described = samples.eagle3()
    out = tmp_path / ("draft.gguf" if name.startswith("gguf") else "draft")
    files = samples.open_target_files(str(folder))
    export_draft(described, name, out, files)
    bound = open_draft(str(out), target, tokenizer)
    assert isinstance(bound, BoundEagle3) and bound.block_size == 6
    samples.same(described, describe_draft(bound.draft))


def test_layers_that_follow_from_the_targets_depth(opened, tmp_path):
    """EAGLE's own files name no layers: every engine takes them by the target's depth."""
    export_draft(samples.eagle3(layer_ids=(1, 3, 4)), "sglang-eagle3", tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    data = json.loads(path.read_text())
    del data["eagle_config"], data["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(data))
    files = loaded_files(*opened[1:])
    deeper = dataclasses.replace(files.config, num_layers=8, layer_types=files.config.layer_types[:2] * 4)
    deep = dataclasses.replace(files, config=deeper)
    assert load_draft(tmp_path / "draft", target=deep).target_layer_ids == (1, 3, 4)
    with pytest.raises(LoadError, match="Name it"):
        load_draft(tmp_path / "draft")


def test_a_copy_of_the_targets_embedding_is_not_kept(opened, tmp_path):
    _, target, tokenizer = opened
    described = samples.eagle3(own_embedding=True)
    for copy, own in ((target.embed_tokens.weight.detach().clone(), False), (None, True)):
        if copy is not None:
            described = dataclasses.replace(
                described, tensors={**described.tensors, "embed_tokens.weight": copy}
            )
        else:
            described = samples.eagle3(own_embedding=True)
        out = tmp_path / f"own-{own}"
        export_draft(described, "sglang-eagle3", out)
        assert (open_draft(str(out), target, tokenizer).draft.embed_tokens is not None) is own


def test_shapes_a_person_may_ask_for(opened, tmp_path):
    folder, target, tokenizer = opened
    save_draft(build_draft(samples.eagle3()), tmp_path / "e")
    export_draft(samples.dflash(), "zlab", tmp_path / "d")
    eagle, dflash = str(tmp_path / "e"), str(tmp_path / "d")

    def ask(path, **message):
        return open_draft(path, target, tokenizer, **message)

    assert ask(eagle).shape == TreeShape(depth=5)
    assert ask(eagle, num_steps=3).shape == TreeShape(depth=3)
    assert ask(eagle, num_draft_tokens=20).shape == TreeShape(depth=5, branch=8, nodes=20)
    assert ask(eagle, num_draft_tokens=20, num_steps=7, topk=4).shape == TreeShape(
        depth=7, branch=4, nodes=20
    )
    tree = ask(dflash, num_draft_tokens=11, topk=3)
    assert isinstance(tree, DDTree) and (tree.nodes, tree.branch) == (11, 3)
    assert isinstance(ask("ngram"), NGram) and ask("none") is None
    for path, value, note in (
        (dflash, {"num_steps": 3}, "only an EAGLE-3 has it"),
        (dflash, {"topk": 3}, "give num_draft_tokens too"),
        ("ngram", {"num_draft_tokens": 9}, "'ngram' proposes no trees"),
        ("none", {"num_draft_tokens": 9}, "'none' proposes no trees"),
        (eagle, {"topk": 3}, "topk 3 grows a tree"),
        (eagle, {"num_draft_tokens": -2}, "of -2 nodes"),
    ):
        with pytest.raises(ValueError, match=note):
            ask(path, **value)
    with pytest.raises(ValueError, match="hidden_size"):
        open_draft(eagle, tiny.target("llama"), read_tokenizer(folder))


def test_memory_of_a_session_is_one_layers():
    bound = bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=4))
    session = bound.begin(2, 100)
    assert session.cache.nbytes == 2 * 2 * (100 + 4 + 1) * 2 * 8 * 4  # k and v, B, S, K, D, float32
