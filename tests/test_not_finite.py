"""Weights that are NaN or Inf: no command ends as if nothing were wrong."""

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from dflash_drafts import random_dflash
from eagle3_drafts import bound_eagle3
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import nn

from outpace.checkpoint.shipped import EMBEDDED
from outpace.cli.main import main
from outpace.decode.controller import Adaptive
from outpace.decode.costs import Costs, Point
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.drafts.eagle3_decode import TreeShape
from outpace.drafts.tree import DDTree, Growth, best_first
from outpace.formats.load import load_draft, save_draft
from outpace.kv.partial import PartialConfig
from outpace.models import load as loading
from outpace.models.load import check_finite, load_target, stored_values
from outpace.models.save import save_target
from outpace.ops.quant import SCALES, Quant
from outpace.ops.sampling import Sampling


def spoil(folder, name, value):
    path = folder / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(path).items()}
    tensors[name].view(-1)[3] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_target_is_refused_with_the_tensors_name(tmp_path, value):
    save_target(tiny.target("qwen3"), tmp_path)
    spoil(tmp_path, "model.layers.1.mlp.down_proj.weight", value)
    with pytest.raises(ValueError, match=r"1\.mlp\.down_proj\.weight holds 1 values that are NaN or Inf"):
        load_target(tmp_path)


def test_a_draft_is_refused_with_the_tensors_name(tmp_path):
    save_draft(random_dflash(tiny.target("qwen3")), tmp_path)
    load_draft(tmp_path)
    spoil(tmp_path, "fc.weight", float("nan"))
    with pytest.raises(ValueError, match=r"fc\.weight holds 1 values that are NaN or Inf"):
        load_draft(tmp_path)


def test_of_a_large_model_small_tensors_are_read(monkeypatch):
    monkeypatch.setattr(loading, "ALL", 1000)
    monkeypatch.setattr(loading, "SMALL", 100)
    broken = torch.tensor([1.0, float("nan")])
    check_finite("it", [("large", broken.repeat(500)), ("numbers", torch.tensor([1]))])
    with pytest.raises(ValueError, match="it: small holds 1 values"):
        check_finite("it", [("large", broken.repeat(500)), ("small", broken)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_the_generation(temperature):
    model = tiny.target("qwen3")
    weight = model.layers[1].mlp.down_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(float("nan"))
        request = Request(max_new_tokens=3, sampling=Sampling(temperature=temperature))
        with pytest.raises(ValueError, match=r"target's logits are not finite: .* inspect MODEL --scan"):
            generate(model, [[1, 2, 3]], request)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@dataclass
class Spoiling:
    """Gives `weight` the value NaN before proposal `step`: of the draft or, since the target's forward comes
    next, of the target."""

    draft: Any
    weight: torch.Tensor
    step: int
    made: int = 0

    def begin(self, *sizes):
        session = self.draft.begin(*sizes)
        propose = session.propose

        def spoiling(last, width, sampler):
            self.made += 1
            if self.made == self.step:
                with torch.no_grad():
                    self.weight.fill_(float("nan"))
            return propose(last, width, sampler)

        session.propose = spoiling
        return session

    def __getattr__(self, name):
        return getattr(self.draft, name)


TREE = {"shape": TreeShape(depth=4, branch=3, nodes=9)}
PARTS = {
    "dflash": {},
    "dflash 2": {"selector_rank": 4, "selector_top_k": 5, "conv_kernel_size": 3, "conv_group_size": 6},
    "dspark": {"markov_rank": 4, "confidence": True, "temperatures": (0.8, 0.9, 1.0, 1.1)},
}
CHAINS = ["eagle3", "p-eagle", *PARTS]
TREES = ["eagle3, tree", "p-eagle, tree", *(f"{name}, tree" for name in PARTS)]
WAYS = {"greedy": ("match", 0.0), "drawn": ("match", 1.0), "gumbel": ("gumbel", 1.0)}
DRAWN = {"rejection": ("rejection", 1.0), "block": ("block", 1.0)}


def draft_of(name, model):
    """-> the draft, bound, and a weight that its logits depend on, and not the target's."""
    kind, _, tree = name.partition(", ")
    if kind in PARTS:
        draft = random_dflash(model, **PARTS[kind])
        weight = draft.norm.weight if kind != "dspark" else draft.markov_head.markov_w2.weight
        return DDTree(draft.bind(model), nodes=7) if tree else draft.bind(model), weight
    changes = {"parallel": True} if kind == "p-eagle" else {}
    bound = bound_eagle3(model, **changes, **(TREE if tree else {}))
    return bound, bound.draft.norm.weight


def spoiled(model, draft_and_weight, way, whole=3, controller=None, partial=None):
    draft, weight = draft_and_weight
    rule, temperature = (WAYS | DRAWN)[way]
    sampling = Sampling(temperature=temperature)
    request = Request(max_new_tokens=40, sampling=sampling, rule=rule)
    prompts = [tiny.tokens(n, seed=n).tolist() for n in (19, 6)]
    rng = torch.Generator().manual_seed(2)
    kept = weight.detach().clone()
    streamed = [[], []]
    try:
        with pytest.raises(ValueError, match="not finite") as ended:
            emit = lambda b, ids: streamed[b].extend(ids)  # noqa: E731
            draft = Spoiling(draft, weight, 4)
            generate(
                model,
                prompts,
                request,
                draft,
                rng=rng,
                on_tokens=emit,
                controller=controller,
                partial=partial,
            )
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert all(len(row) > whole for row in streamed), "the steps before are whole"
    return str(ended.value)


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in (*CHAINS, *TREES) for way in WAYS]
    + [(n, way) for n in CHAINS for way in DRAWN]
    + [(n, "rejection") for n in TREES],
)
def test_a_draft_that_turns_to_nan_is_named_with_the_step(name, way):
    """Under every rule, although under the exact ones a draft cannot change the text: it would be slow, and
    nobody would know why."""
    model = tiny.target("qwen3")
    error = spoiled(model, draft_of(name, model), way)
    assert error.startswith("step 4: the draft's logits are not finite: its weights") and "\n" not in error


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in ("eagle3", "dflash") for way in WAYS | DRAWN]
    + [("eagle3, tree", way) for way in (*WAYS, "rejection")],
)
def test_a_target_that_turns_to_nan_is_named_with_the_step(name, way):
    model = tiny.target("qwen3")
    error = spoiled(model, (draft_of(name, model)[0], model.layers[1].mlp.down_proj.weight), way)
    assert error.startswith("step 4: the target's logits are not finite: its weights") and "\n" not in error


def test_a_controller_does_not_cut_off_what_is_not_finite():
    """It reads the draft's survival, and of NaN it would verify nothing, step after step."""
    model, widths = tiny.target("qwen3"), tuple(range(1, 10))
    cheap = {"draft": (0.0,) + (1e-5,) * 8, "rest": 1e-5, "plain": 1e-3, "show": 0.0, "wake": 0.0}
    point = Point(batch=2, context=256, verify=tuple(1e-3 + 1e-6 * n for n in widths), **cheap)
    costs = Costs(fingerprint="0", widths=widths, points=(point,), acceptance=0.9, described={})
    for name in ("eagle3", "eagle3, tree"):
        controller = Adaptive(costs)
        error = spoiled(model, draft_of(name, model), "greedy", controller=controller)
        assert re.match(r"step \d+: the draft's logits are not finite", error)


@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_a_draft_on_partial_kv_is_named(name):
    model = tiny.target("qwen3")
    few = PartialConfig(
        block_size=2, n_sink_blocks=1, n_retrieval_blocks=1, n_window_blocks=2, n_spec_tokens_buf=6
    )
    error = spoiled(model, draft_of(name, model), "greedy", whole=0, partial=Partial(config=few))
    assert re.match(r"step \d+(, on partial KV)?: the draft's logits are not finite", error)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_level_of_a_tree_is_enough(level, value):
    """Also of a level that the tree would not reach, since others are likelier."""
    torch.manual_seed(0)
    last = torch.tensor([3, 4])
    logits = 9 * torch.randn(3, 2, 3, 11)
    logits[level, 1, 0, 7] = value
    scores = logits.log_softmax(-1)
    grown = Growth(last, 3)
    for at in range(3):
        grown.expand(scores[at, :, : 1 if at == 0 else 3])
    for tree in (grown.proposal(4), best_first(last, scores[:, :, 0].transpose(0, 1), 4, 3)):
        assert tree.survival is not None and tree.survival.isnan().any(1).tolist() == [False, True]


def test_a_training_that_diverges_says_so_and_saves_nothing(tmp_path, monkeypatch, capsys):
    cache, out = tmp_path / "cache", tmp_path / "run"
    small = ["samples=6", "response_tokens=[24,32]", "prompt_tokens=[16,24]"]
    build = ["outpace", "teacher", "build", "--out", str(cache)]
    monkeypatch.setattr("sys.argv", [*build, *(x for s in small for x in ("--set", s))])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    train = ["outpace", "train", "dflash", "--cache", str(cache), "--out", str(out)]
    settings = ["steps=6", "rows=2", "anchors=4", "lr=1e30", "eval_prompts=1", "eval_new_tokens=4"]
    monkeypatch.setattr("sys.argv", [*train, *(x for s in settings for x in ("--set", s))])
    with pytest.raises(SystemExit) as ended:
        main()
    error = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "is not finite. Training has diverged: lower the learning rate" in error
    assert not (out / "draft").exists()
    monkeypatch.setattr("sys.argv", [*train, "--set", "lr=nan"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "`lr` is nan: it must be finite" in " ".join(
        capsys.readouterr().err.split()
    )


def test_what_ships_is_finite():
    assert json.loads((EMBEDDED / "target" / "config.json").read_text())["architectures"]
    load_target(EMBEDDED / "target")
    load_draft(EMBEDDED / "dflash")


def test_a_packed_target_is_refused_for_its_scales(tmp_path):
    save_target(tiny.target("gpt_oss"), tmp_path, pack=True)
    load_target(tmp_path)
    spoil(tmp_path, "model.layers.2.mlp.experts.down_proj_scales", 255)
    with pytest.raises(ValueError, match=r"2\.mlp\.down\.scales holds 1 values that are NaN or Inf"):
        load_target(tmp_path)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"])
def test_scales_of_blocks_are_read(format):
    """One scale of a block at a time is made NaN: the values of that block become NaN or Inf, no others."""
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    weight = Quant(torch.randint(1, 100, (3, 4 * nbytes), dtype=torch.uint8), format)
    check_finite("it", stored_values(nn.ModuleDict({"w": weight})))
    places = range(0 if format != "Q6_K" else 208, SCALES[format].stop, 1 if format == "MXFP4" else 2)
    for at in places:
        broken = weight.data.clone()
        broken[1, 2 * nbytes + at : 2 * nbytes + at + places.step] = 255
        spoiled = Quant(broken, format)
        assert not spoiled.dense()[1, 2 * values : 3 * values].isfinite().all()
        assert spoiled.dense()[0].isfinite().all()
        with pytest.raises(ValueError, match=r"it: w\.scales holds 1 values"):
            check_finite("it", stored_values(nn.ModuleDict({"w": spoiled})))
