"""DFlash against a plain re-implementation, its context-only memory, and its checkpoints."""

import dataclasses
import json
import math
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from outpace.checkpoint.open import LoadError
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig, default_layer_ids
from outpace.drafts.sampler import Greedy
from outpace.formats.load import load_dflash, save_draft
from outpace.models.config import FULL, WINDOW
from outpace.models.load import named_tensors
from outpace.ops.rope import RopeConfig

B, BLOCK = 2, 4
YARN = tiny.GPT_OSS["rope_parameters"]
CONFIG = DFlashConfig(
    hidden_size=96,
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6,
    intermediate_size=28,
    vocab_size=tiny.VOCAB,
    rope=RopeConfig(theta=YARN["rope_theta"], kind="yarn", factor=YARN["factor"], original_max_position=32,
                    truncate=False),
    rms_norm_eps=1e-5,
    block_size=BLOCK,
    target_layer_ids=(0, 2),
    num_target_layers=4,
    mask_token_id=2,
)  # fmt: skip


def random_draft(**changes):
    draft = DFlash(dataclasses.replace(CONFIG, **changes))
    tiny.randomise(named_tensors(draft))
    return draft.eval()


VARIANTS = {
    "plain": {},
    "biases": {"attention_bias": True},
    "mask embedding": {"mask_token_id": None},
    "window": {"layer_types": (WINDOW, FULL, WINDOW), "sliding_window": 5},
    "causal window": {"layer_types": (WINDOW, FULL, WINDOW), "sliding_window": 5, "causal": True},
    "default rope": {"rope": RopeConfig(theta=700.0)},
}


# ---- the oracle: one sequence, one position at a time, no memory ------------------------------------


def norm(x, weight, eps=1e-5):
    return x / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + eps) * weight


def turn(x, position, rope, head_dim):
    """Rotate halves at one position: x [heads, D]."""
    values = YARN if rope.kind == "yarn" else {"rope_type": "default", "rope_theta": rope.theta}
    turns, scale = tiny.exact_frequencies(values, head_dim)
    cos, sin = torch.cos(position * turns) * scale, torch.sin(position * turns) * scale
    a, b = x[:, : head_dim // 2], x[:, head_dim // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def oracle_block(draft, target, features, last, offset=0):
    """features [S, n*C] of the verified tokens, the anchor's id -> hidden [BLOCK, C], in float64.

    Straight from the paper: Q from the block, K and V from the context and the block; a key is seen
    when it lies in the context or in the block, and within the window where the layer has one. A causal
    window also hides the slots behind.
    """
    c = draft.config
    w = {name: t.detach().double() for name, t in named_tensors(draft)}
    H, N, D = c.num_heads, c.num_kv_heads, c.head_dim
    embedding = target.embed_tokens.weight.double()
    mask = embedding[c.mask_token_id] if c.mask_token_id is not None else w["mask_embedding"]
    x = torch.stack([embedding[last], *[mask] * (c.block_size - 1)])
    context = norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    S = len(context)
    for i in range(c.num_layers):
        at = f"layers.{i}."
        zero = torch.zeros(1, dtype=torch.float64)
        qkv, bias = w[at + "qkv_proj.weight"], w.get(at + "qkv_proj.bias", zero)
        h = norm(x, w[at + "input_layernorm.weight"])
        rows = torch.cat((context, h)) @ qkv.T + bias
        keys, values = [], []
        for s, row in enumerate(rows):
            k = row[H * D : (H + N) * D].reshape(N, D)
            keys.append(turn(norm(k, w[at + "k_norm.weight"]), s + offset, c.rope, D))
            values.append(row[(H + N) * D :].reshape(N, D))
        out = []
        for t in range(c.block_size):
            q = norm(rows[S + t][: H * D].reshape(H, D), w[at + "q_norm.weight"])
            q = turn(q, S + t + offset, c.rope, D)
            end = t + 1 if c.window(i) and c.causal else c.block_size
            seen = [s for s in range(S + end) if not c.window(i) or s > S + t - c.window(i)]
            heads = []
            for head in range(H):
                scores = torch.stack([q[head] @ keys[s][head // (H // N)] for s in seen]) / math.sqrt(D)
                p = scores.softmax(0)
                heads.append(sum(p[j] * values[s][head // (H // N)] for j, s in enumerate(seen)))
            out.append(torch.cat(heads))
        x = x + torch.stack(out) @ w[at + "o_proj.weight"].T + w.get(at + "o_proj.bias", zero)
        h = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = (h @ w[at + "mlp.gate_up_proj.weight"].T).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])


def features_of(target, tokens, layers, offset=0):
    with torch.inference_mode():
        return target(tokens, aux=layers, offset=offset).aux


@torch.inference_mode()
@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_against_the_oracle(name):
    target, draft = tiny.target("gpt_oss"), random_draft(**VARIANTS[name])
    tokens, last = tiny.tokens(B, 9), tiny.tokens(B, seed=4)
    aux = features_of(target, tokens, draft.target_layer_ids)
    session = draft.bind(target).begin(B, 30)
    session.observe(tokens, aux, [9, 6])
    hidden = session.block_hidden(last)
    for b, count in enumerate((9, 6)):
        rows = aux[:, b, :count].permute(1, 0, 2).flatten(1)
        assert (hidden[b] - oracle_block(draft, target, rows, int(last[b]))).abs().max() < 1e-3
    proposal = session.propose(last, BLOCK, Greedy())
    assert proposal.counts == [BLOCK] * B and torch.equal(proposal.tokens[:, 0], last)
    assert torch.equal(proposal.tokens[:, 1:], target.logits(hidden[:, 1:]).argmax(-1))  # same position


@torch.inference_mode()
def test_far_positions_against_the_oracle():
    target, draft = tiny.target("gpt_oss"), random_draft()
    tokens, last = tiny.tokens(1, 6), tiny.tokens(1, seed=4)
    aux = features_of(target, tokens, draft.target_layer_ids, 131000)
    session = draft.bind(target).begin(1, 30, offset=131000)
    session.observe(tokens, aux, [6])
    rows = aux[:, 0].permute(1, 0, 2).flatten(1)
    wanted = oracle_block(draft, target, rows, int(last[0]), 131000)
    assert (session.block_hidden(last)[0] - wanted).abs().max() < 1e-3


# ---- who sees whom -------------------------------------------------------------------------------


@torch.inference_mode()
def test_every_row_of_a_block_sees_every_other():
    target, draft = tiny.target("gpt_oss"), random_draft()
    session = draft.bind(target).begin(1, 30)
    tokens = tiny.tokens(1, 5)
    session.observe(tokens, features_of(target, tokens, (0, 2)), [5])
    a, b = (session.block_hidden(torch.tensor([last])) for last in (40, 41))
    assert ((a - b).abs().amax(-1) > 1e-3).all()  # the anchor reaches every MASK
    reach = torch.zeros(BLOCK, BLOCK)
    original = draft.embed_block
    for source in range(BLOCK):

        def nudged(anchors, target, source=source):
            x = original(anchors, target).clone()
            x[:, source] += torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1))
            return x

        draft.embed_block = nudged
        reach[source] = (session.block_hidden(torch.tensor([40])) - a).abs().amax(-1)[0]
    assert (reach > 1e-4).all()


@torch.inference_mode()
def test_the_anchor_has_no_feature_yet():
    """What the target thinks at the anchor and after it cannot reach the block."""
    target, draft = tiny.target("gpt_oss"), random_draft()
    tokens = tiny.tokens(B, 12)
    aux = features_of(target, tokens, (0, 2))
    blocks = []
    for spoiled in (False, True):
        if spoiled:
            aux = aux.clone()
            aux[:, 0, 8:] = 50.0
            aux[:, 1, 3:] = 50.0
        session = draft.bind(target).begin(B, 30)
        session.observe(tokens, aux, [8, 3])
        blocks.append(session.block_hidden(tokens[:, 8]))
    assert torch.equal(*blocks)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["plain", "window", "causal window"])
def test_noise_rows_are_never_remembered(name):
    """A session after many rounds of ragged acceptance equals a fresh one that is fed the same text."""
    target, draft = tiny.target("gpt_oss"), random_draft(**VARIANTS[name])
    bound, tokens = draft.bind(target), tiny.tokens(B, 60)
    aux = features_of(target, tokens, (0, 2))
    session, done = bound.begin(B, 60), [0, 0]
    rng = torch.Generator().manual_seed(3)

    def feed(session, counts, done):
        width = max(counts)
        columns = [torch.arange(d, d + width).clamp(max=59) for d in done]
        part = torch.stack([tokens[b, c] for b, c in enumerate(columns)])
        seen = torch.stack([aux[:, b, c] for b, c in enumerate(columns)], dim=1)
        session.observe(part, seen, counts)

    for i in range(9):
        counts = [17, 15] if i == 0 else torch.randint(0, BLOCK + 1, (B,), generator=rng).tolist()
        if max(d + c for d, c in zip(done, counts, strict=True)) > 59:
            break
        feed(session, counts, done)
        done = [d + c for d, c in zip(done, counts, strict=True)]
        session.propose(tiny.tokens(B, seed=i), BLOCK, Greedy())  # leaves its noise behind
        last = tiny.tokens(B, seed=100 + i)
        fresh = bound.begin(B, 60)
        feed(fresh, done, [0, 0])
        assert (session.block_hidden(last) - fresh.block_hidden(last)).abs().max() < 1e-4
        assert session.cache.lengths == done
    assert min(done) > 25  # the window and its slack, several times over


@torch.inference_mode()
def test_query_and_key_norms_come_before_rotation():
    """A norm after rotation would scale a dimension by another weight; with weights that are all
    alike nobody could tell."""
    target, draft = tiny.target("gpt_oss"), random_draft()
    for layer in draft.layers:
        assert layer.k_norm.weight.std() > 0.05 and layer.q_norm.weight.std() > 0.05
    layer, features = draft.layers[0], torch.randn(1, 3, 96)
    cos, sin = draft.rope(torch.tensor([[3, 50, 1000]]))
    k, _ = layer.context_kv(features, cos, sin)
    size = k.norm(dim=-1) / draft.config.rope.concentration  # rotation keeps lengths of normed keys ..
    still = layer.context_kv(features, torch.ones_like(cos), torch.zeros_like(sin))[0].norm(dim=-1)
    assert torch.allclose(size, still, atol=1e-4)
    assert target.config.hidden_size == 96


# ---- configs and checkpoints ----------------------------------------------------------------------


def test_default_layers():
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(24) == (1, 6, 11, 16, 21)
    assert default_layer_ids(24, 1) == (12,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size 1"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (0, 4)}, r"0\.\.3"),
        ({"target_layer_ids": (-1, 2)}, r"0\.\.3"),
        ({"target_layer_ids": (2, 0)}, "not ascending"),
        ({"target_layer_ids": (2, 2)}, "not ascending"),
        ({"num_heads": 3}, "do not share"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("linear_attention",) * 3}, "linear_attention"),
        ({"layer_types": ("sliding_attention",) * 3}, "sliding_window"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_target_layers": 5}, "num_target_layers 5"), ({"vocab_size": 96}, "vocab_size 96")],
)
def test_a_draft_of_another_target(changes, message):
    with pytest.raises(ValueError, match=message):
        random_draft(**changes).bind(tiny.target("gpt_oss"))
    with pytest.raises(ValueError, match="hidden_size 96"):
        random_draft().bind(tiny.target("qwen3_moe"))


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(name, tmp_path):
    draft = random_draft(**VARIANTS[name])
    save_draft(draft, tmp_path, torch.float32)
    again = load_dflash(tmp_path)
    ours = {k: v for k, v in vars(draft.config).items() if k != "layer_types"}
    assert ours == {k: v for k, v in vars(again.config).items() if k != "layer_types"}
    assert [again.config.window(i) for i in range(3)] == [draft.config.window(i) for i in range(3)]
    for (name, a), (_, b) in zip(named_tensors(draft), named_tensors(again), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture
def folder(tmp_path):
    save_draft(random_draft(), tmp_path / "draft", torch.float32)
    return tmp_path / "draft"


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_inner(folder, **changes):
    if "target_layer_ids" in changes:  # they are in two places
        tiny.write_config(folder, eagle_aux_hidden_state_layer_ids=None)
    value = json.loads((folder / "config.json").read_text())["dflash_config"] | changes
    tiny.write_config(folder, dflash_config={k: v for k, v in value.items() if v is not None})


def test_names_on_disk_are_the_public_ones(folder):
    names = set(load_file(folder / "model.safetensors"))
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer = {f"layers.1.{n}.weight" for n in parts}
    assert {n for n in names if n.startswith("layers.1.")} == layer
    assert {n for n in names if "layers." not in n} == {"fc.weight", "hidden_norm.weight", "norm.weight"}
    data = json.loads((folder / "config.json").read_text())
    assert data["architectures"] == ["DFlashDraftModel"] and data["num_target_layers"] == 4
    assert data["dflash_config"] == {"target_layer_ids": [0, 2], "block_size": 4, "mask_token_id": 2}
    assert data["block_size"] == 4


def test_a_prefix_of_model_is_taken(folder):
    edit(folder, lambda t: [t.update({"model." + k: t.pop(k)}) for k in list(t)])
    load_dflash(folder)


def test_older_files_have_the_block_size_at_the_top(folder):
    edit_inner(folder, block_size=None)
    assert load_dflash(folder).block_size == 4


@pytest.mark.parametrize(("message", "causal"), [(None, True), (True, True), (False, False)])
def test_a_window_is_causal_unless_the_config_says_no(tmp_path, message, causal):
    windows = VARIANTS["window"] | {"layer_types": (WINDOW,) * 3}
    save_draft(random_draft(**windows), tmp_path, torch.float32)
    tiny.write_config(tmp_path, is_causal=message)
    assert load_dflash(tmp_path).config.causal is causal


def test_is_causal_counts_for_every_layer(tmp_path):
    save_draft(random_draft(**VARIANTS["window"]), tmp_path, torch.float32)
    tiny.write_config(tmp_path, is_causal=True)
    config = load_dflash(tmp_path).config
    assert config.causal and config.causal_full and config.one_way


def test_fc_that_does_not_fit_the_layers(folder):
    edit_inner(folder, target_layer_ids=[0, 1, 2])
    with pytest.raises(LoadError, match=r"fc\.in_features must be 3 \(target_layer_ids\) x 96"):
        load_dflash(folder)


@pytest.mark.parametrize("ids", [[2, 0], [0, 9]])
def test_layers_in_another_order_or_beyond_the_target(folder, ids):
    edit_inner(folder, target_layer_ids=ids)
    with pytest.raises(ValueError, match="target_layer_ids"):
        load_dflash(folder)


def test_missing_and_left_over_tensors(folder):
    copy = shutil.copytree(folder, folder.parent / "copy")
    edit(folder, lambda t: t.pop("layers.2.self_attn.q_norm.weight"))
    with pytest.raises(LoadError, match=r"missing in the checkpoint: layers\.2\.self_attn\.q_norm"):
        load_dflash(folder)
    edit(copy, lambda t: t.update({"mask_hidden": torch.zeros(96)}))
    with pytest.raises(LoadError, match="left over in the checkpoint: mask_hidden"):
        load_dflash(copy)


def test_another_architecture(folder):
    tiny.write_config(folder, architectures=["DFlash2DraftModel"])
    with pytest.raises(LoadError, match="DFlash2DraftModel"):
        load_dflash(folder)


def words(*extra):
    return Tokenizer(models.WordLevel({w: i for i, w in enumerate(("a", "b", *extra))}, unk_token="a"))


def test_mask_by_token(folder):
    edit_inner(folder, mask_token_id=None)
    assert load_dflash(folder, words("c", "<|MASK|>")).config.mask_token_id == 3
    edit_inner(folder, mask_token="c")
    assert load_dflash(folder, words("c")).config.mask_token_id == 2
    for tokenizer in (None, words()):
        with pytest.raises(LoadError, match=r"no mask_token_id.*'c'"):
            load_dflash(folder, tokenizer)


def test_a_mask_beyond_the_vocabulary(folder):
    edit_inner(folder, mask_token_id=97)
    with pytest.raises(ValueError, match="mask_token_id 97"):
        load_dflash(folder)
