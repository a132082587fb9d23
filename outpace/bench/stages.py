"""A draft's forward taken apart and laid next to the plain reference: where does it first go wrong?"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from outpace.bench.draft_steps import patched
from outpace.doctor.reference import concentration, frequencies
from outpace.drafts.dflash import DFlash, DFlashSession
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.eagle3 import Eagle3, Eagle3Config
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.formats.spec import EMBEDDING, HEAD, Description, DFlashDraft, Eagle3Draft
from outpace.models.decoder import Decoder
from outpace.ops.attention import attend_view
from outpace.ops.rope import RopeConfig

Tensors = Mapping[str, Tensor]  # a draft's tensors, by the names of z-lab (DFlash) or SGLang (EAGLE-3)
Stages = dict[str, Tensor]  # what is computed on the way, in order


PIECE = 2**24  # weights taken to float64 at a time: a head may have 600 million


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C] @ weight [N, C]^T -> [T, N]."""
    rows = weight.split(max(PIECE // weight.shape[1], 1))
    return torch.cat([x @ part.double().T for part in rows], dim=-1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def mlp(x: Tensor, w: Tensors, at: str) -> Tensor:
    gate = times(x, w[f"{at}mlp.gate_proj.weight"])
    up = times(x, w[f"{at}mlp.up_proj.weight"])
    return times(gate / (1 + torch.exp(-gate)) * up, w[f"{at}mlp.down_proj.weight"])


def turned(x: Tensor, positions: list[int], rope: RopeConfig) -> Tensor:
    """x [T, heads, D], dimension i turned together with i + D/2."""
    angles = torch.tensor(positions, dtype=torch.float64)[:, None, None] * frequencies(rope, x.shape[-1])
    cos, sin = angles.cos() * concentration(rope), angles.sin() * concentration(rope)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """q [T, H, D], k and v [S, K, D], sees [T, S] bool -> [T, H * D]; query head h reads head h // (H/K)."""
    T, H, D = q.shape
    out = torch.empty(T, H, D, dtype=torch.float64)
    for h in range(H):
        kv = h // (H // k.shape[1])
        scores = q[:, h] @ k[:, kv].T / math.sqrt(D)
        out[:, h] = scores.masked_fill(~sees, -math.inf).softmax(-1) @ v[:, kv]
    return out.reshape(T, H * D)


def heads(x: Tensor, w: Tensors, name: str, D: int) -> Tensor:
    projected = times(x, w[f"{name}.weight"])
    if f"{name}.bias" in w:
        projected = projected + w[f"{name}.bias"].double()
    return projected.unflatten(-1, (-1, D))


# ---- EAGLE-3 (arXiv 2503.01840) ------------------------------------------------------------------------


def eagle3_feature(w: Tensors, c: Eagle3Config, states: list[Tensor]) -> Tensor:
    """states: per layer of layer_ids [T, C'] -> f_t = fc([h^a; h^b; h^c]) [T, C]."""
    states = [x.double() for x in states]
    if c.fc_norm:
        states = [norm(x, w[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, x in enumerate(states)]
    joined = torch.cat(states, dim=-1)
    if c.norm_before_fc:
        joined = norm(joined, w["input_norm.weight"], c.rms_norm_eps)
    return times(joined, w["fc.weight"])


def eagle3_stages(
    w: Tensors, c: Eagle3Config, features: Tensor, embeds: Tensor, first: int, head: Tensor
) -> Stages:
    """Row t: feature [T, C] of the token at t and embedding [T, C] of the token after it, at rotary position
    first + t; it sees the rows up to its own. head [draft_vocab, C].

    "hidden" is what is fed back before any norm.
    """
    T, D, eps = len(features), c.head_dim, c.rms_norm_eps
    positions = list(range(first, first + T))
    behind = torch.arange(T)[:, None] - torch.arange(T)
    sees = (behind >= 0) & (behind < (c.sliding_window or T))
    values: Stages = {"fc": features}
    x = features
    for i in range(c.num_layers):
        at = f"layers.{i}." if i else "midlayer."
        residual, read = x, norm(x, w[f"{at}input_layernorm.weight"], eps)
        if i == 0:
            normed = norm(x, w[f"{at}hidden_norm.weight"], eps)
            residual = normed if c.norm_before_residual else x
            token = norm(embeds.double(), w[f"{at}input_layernorm.weight"], eps)
            read = torch.cat((token, normed), dim=-1)
        q, k, v = (heads(read, w, f"{at}self_attn.{name}_proj", D) for name in "qkv")
        mixed = attention(turned(q, positions, c.rope), turned(k, positions, c.rope), v, sees)
        values[f"attention {i}"] = times(mixed, w[f"{at}self_attn.o_proj.weight"])
        x = residual + values[f"attention {i}"]
        values[f"mlp {i}"] = mlp(norm(x, w[f"{at}post_attention_layernorm.weight"], eps), w, at)
        x = x + values[f"mlp {i}"]
    values["hidden"] = x
    values["before the head"] = norm(x, w["norm.weight"], eps)
    values["logits"] = times(values["before the head"], head)
    return values


# ---- DFlash (arXiv 2602.06036; its convolutions: inco.ai/blog/dflash2) -----------------------------------


def dflash_stages(
    w: Tensors, c: DFlashConfig, states: list[Tensor], block: Tensor, first: int, head: Tensor
) -> Stages:
    """states: per layer of target_layer_ids [S, C], of the verified tokens; block [B, C]: the embeddings of
    the anchor and its MASKs, which follow them. The verified text begins at rotary position first.
    head [N, C]."""
    S, B, D, eps = len(states[0]), len(block), c.head_dim, c.rms_norm_eps
    positions = list(range(first, first + S + B))
    values: Stages = {"fc": times(torch.cat([x.double() for x in states], dim=-1), w["fc.weight"])}
    context = norm(values["fc"], w["hidden_norm.weight"], eps)
    x = block.double()
    key, query = torch.arange(S + B), torch.arange(S, S + B)[:, None]
    for i in range(c.num_layers):
        at, window = f"layers.{i}.", c.window(i)
        sees = (key <= query if c.hides(i) else key >= 0) & (key > query - (window or S + B))
        normed = norm(x, w[f"{at}input_layernorm.weight"], eps)
        read = convolved(normed, normed, w, f"{at}attention_conv", 0)
        rows = torch.cat((context, read))
        q = norm(heads(read, w, f"{at}self_attn.q_proj", D), w[f"{at}self_attn.q_norm.weight"], eps)
        k = norm(heads(rows, w, f"{at}self_attn.k_proj", D), w[f"{at}self_attn.k_norm.weight"], eps)
        v = heads(rows, w, f"{at}self_attn.v_proj", D)
        mixed = attention(turned(q, positions[S:], c.rope), turned(k, positions, c.rope), v, sees)
        out = times(mixed, w[f"{at}self_attn.o_proj.weight"])
        if f"{at}self_attn.o_proj.bias" in w:
            out = out + w[f"{at}self_attn.o_proj.bias"].double()
        values[f"attention {i}"] = convolved(out, normed, w, f"{at}attention_conv", 1)
        x = x + values[f"attention {i}"]
        normed = norm(x, w[f"{at}post_attention_layernorm.weight"], eps)
        out = mlp(convolved(normed, normed, w, f"{at}mlp_conv", 0), w, at)
        values[f"mlp {i}"] = convolved(out, normed, w, f"{at}mlp_conv", 1)
        x = x + values[f"mlp {i}"]
    values["before the head"] = norm(x, w["norm.weight"], eps)
    values["logits"] = times(values["before the head"], head)
    return values


def convolved(x: Tensor, read: Tensor, w: Tensors, name: str, side: int) -> Tensor:
    """x [B, C]; the coefficients are read off `read` [B, C]. As it is where the draft has no convolutions."""
    if f"{name}.base_kernel" not in w:
        return x
    base = w[f"{name}.base_kernel"][side].double()  # [taps, C]
    delta = times(read, w[f"{name}.kernel_projection.weight"]).unflatten(-1, (2, len(base), -1))[:, side]
    each = x.shape[1] // delta.shape[-1]  # channels of a group
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for t in range(min(len(base), i + 1)):
            out[i] += (base[t] + delta[i, t].repeat_interleave(each)) * x[i - t]
    return out


TIE = 1e-4  # of the largest logit: two that lie closer may change places by rounding
TOP = 5
GUESSES = 4  # of a draft that makes them in one pass
# the least cosine that is no mistake, in each precision of the activations
LEAST = {torch.float32: 1 - 1e-6, torch.bfloat16: 0.995, torch.float16: 0.9995}


@dataclass(frozen=True)
class Stage:
    """cosine: the least of any row. error: the largest difference; size: the largest number there."""

    name: str
    cosine: float
    error: float
    size: float


@dataclass(frozen=True, kw_only=True)
class Staged:
    """argmax: share of the rows with the same most probable token, or a tie; ties: rows where it was one;
    top: mean share of the reference's 5 most probable that are among ours."""

    kind: str
    rows: int
    stages: list[Stage]
    argmax: float
    ties: int
    top: float
    least: float  # the least cosine that passes

    @property
    def passed(self) -> bool:
        return self.argmax == 1 and all(stage.cosine >= self.least for stage in self.stages)

    @property
    def first_wrong(self) -> str | None:
        return next((stage.name for stage in self.stages if stage.cosine < self.least), None)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "first_wrong": self.first_wrong}


@torch.inference_mode()
def compare_stages(
    draft: DFlash | Eagle3,
    files: Description,
    target: Decoder,
    texts: Sequence[Sequence[int]],
    offset: int = 0,
) -> Staged:
    """The draft's own forward, as it serves, on the target's states of each text, against the reference on
    the same states, in float64 and from what the draft's files hold. All of a text but its last token is
    verified; rotary positions begin at `offset`.

    Raises ValueError for texts of fewer than two tokens, and without any.
    """
    if not texts or min(len(text) for text in texts) < 2:
        raise ValueError("a draft is taken apart on texts of at least two tokens")
    pairs = [_stages(draft, files, target, list(text), offset) for text in texts]
    ours, theirs = (
        {name: torch.cat([side[which][name].double() for side in pairs]) for name in pairs[0][0]}
        for which in (0, 1)
    )
    stages = [
        Stage(
            name,
            float(torch.cosine_similarity(ours[name], theirs[name], dim=-1).min()),
            float((ours[name] - theirs[name]).abs().max()),
            float(theirs[name].abs().max()),
        )
        for name in ours
    ]
    value, right = ours["logits"], theirs["logits"]
    best = right.amax(-1)
    chosen = right.gather(-1, value.argmax(-1, keepdim=True))[:, 0]
    differ = value.argmax(-1) != right.argmax(-1)
    tied = differ & (best - chosen < TIE * right.abs().amax(-1))
    k = min(TOP, right.shape[-1])
    mine, wanted = value.topk(k).indices, right.topk(k).indices
    return Staged(
        kind="DFlash" if isinstance(draft, DFlash) else "EAGLE-3",
        rows=len(value),
        stages=stages,
        argmax=float((~differ | tied).double().mean()),
        ties=int(tied.sum()),
        top=float((mine[:, :, None] == wanted[:, None]).any(1).double().mean()),
        least=LEAST.get(target.dtype, 0.995),
    )


def _stages(
    draft: DFlash | Eagle3, files: Description, target: Decoder, text: list[int], offset: int
) -> tuple[Stages, Stages]:
    """(ours, the reference's), by the same names, each [rows, ...]."""
    tokens = torch.tensor([text], device=target.device)
    aux = target(tokens[:, :-1], aux=draft.target_layer_ids, offset=offset).aux
    assert aux is not None
    given = target, tokens, aux, offset
    if isinstance(draft, DFlash):
        assert isinstance(files, DFlashDraft)
        return _dflash(draft, files, *given)
    assert isinstance(files, Eagle3Draft)
    return _eagle3(draft, files, *given)


@contextmanager
def recorded(layers: nn.ModuleList, stages: Stages) -> Iterator[None]:
    """Inside, `stages` is told what attention and MLP of every layer add to the residual stream."""

    def kept(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            stages[name] = function(*inputs)
            return stages[name]

        return run

    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            for part, module in (("attention", layer.o_proj), ("mlp", layer.mlp)):
                conv = getattr(layer, f"{part}_conv", None)
                owner, method = (module, "forward") if conv is None else (conv, "after")
                stack.enter_context(patched(owner, method, kept(f"{part} {i}", getattr(owner, method))))
        yield


def _cpu(x: Tensor) -> Tensor:
    return x.detach().cpu()


# ---- EAGLE-3 -----------------------------------------------------------------------------------------


def _eagle3(
    draft: Eagle3, files: Eagle3Draft, target: Decoder, text: Tensor, aux: Tensor, offset: int
) -> tuple[Stages, Stages]:
    """Every pair of the text, and after them, if the draft proposes in one pass, its masks."""
    config, following = draft.config, text[:, 1:]
    embeds, features = draft.embed(following, target), draft.fuse(aux)
    more = GUESSES - 1 if config.parallel else 0
    if more:
        masks = (mask.expand(1, more, -1) for mask in draft.masks(target))
        embeds, features = (torch.cat(both, dim=1) for both in zip((embeds, features), masks, strict=True))
    T = features.shape[1]
    cache = BoundEagle3(draft, target, TreeShape()).begin(1, T, offset).cache
    step, ours = cache.begin(T), {"fc": features}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        view = cache.layers[layer].append(k, v, step)
        return attend_view(q, view, config.sliding_window, None, config.head_dim**-0.5)

    with recorded(draft.layers, ours):
        hidden = draft(embeds, features, *draft.rope(step.positions + offset), attend)
    ours |= {"hidden": hidden, "fed back": draft.feedback(hidden), "before the head": draft.norm(hidden)}
    ours["logits"] = draft.head(hidden, target)

    w, config = files.tensors, files.config
    feature = eagle3_feature(w, config, [_cpu(x) for x in aux[:, 0]])
    if more:
        states = w["mask_hidden"].view(len(config.layer_ids), 1, -1)
        feature = torch.cat((feature, eagle3_feature(w, config, list(states)).expand(more, -1)))
    ids = following[0].tolist() + [config.mask_token_id or 0] * more
    tokens = w[EMBEDDING][ids] if files.own_embedding else _cpu(target.embed(following.new_tensor(ids)))
    if "mask_embedding" in w:
        tokens = torch.cat((tokens[: T - more], w["mask_embedding"].expand(more, -1)))
    head = w[HEAD] if files.own_head else _cpu(target.dense_head)
    theirs = eagle3_stages(w, config, feature, tokens, offset, head)
    theirs["fed back"] = theirs["before the head"] if config.norm_output else theirs["hidden"]
    return {name: _cpu(x[0]) for name, x in ours.items()}, {name: theirs[name] for name in ours}


# ---- DFlash ------------------------------------------------------------------------------------------


def _dflash(
    draft: DFlash, files: DFlashDraft, target: Decoder, text: Tensor, aux: Tensor, offset: int
) -> tuple[Stages, Stages]:
    """One block behind the text; its context's states after fc, and every stage of its rows."""
    verified, anchor = text[:, :-1], text[:, -1]
    S = verified.shape[1]
    session = DFlashSession(draft, target, 1, S, offset)
    session.observe(verified, aux, [S])
    session.in_one_piece = False  # the block's rows pass through the modules
    ours = {"fc": draft.fc(aux.permute(1, 2, 0, 3).flatten(2))}
    with recorded(draft.layers, ours):
        hidden = session.block_hidden(anchor)
    ours |= {"before the head": hidden, "logits": session.head.logits(hidden)}

    w, head = files.tensors, _cpu(target.dense_head)
    if "d2t" in w:
        head = head[w["d2t"] + torch.arange(len(w["d2t"]))]
    states = [_cpu(x) for x in aux[:, 0]]
    theirs = dflash_stages(w, files.config, states, _cpu(draft.embed_block(anchor, target)[0]), offset, head)
    return {name: _cpu(x[0]) for name, x in ours.items()}, theirs


def show_stages(result: Staged, console: Console) -> None:
    table = Table("stage", "least cosine", "max error", "max size", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for stage in result.stages:
        style = "" if stage.cosine >= result.least else "bold red"
        # 9 digits: the difference to 1 is what is looked at
        table.add_row(
            stage.name, f"{stage.cosine:.9f}", f"{stage.error:.2e}", f"{stage.size:.3g}", style=style
        )
    console.print(
        f"[bold]{result.kind}[/bold], {result.rows} rows of logits, against float64", highlight=False
    )
    console.print(table)
    message = f"top-1 token: {result.argmax:.2%} the same ({result.ties} ties); "
    console.print(f"{message}of the top {TOP}: {result.top:.2%}", highlight=False)
    if result.passed:
        console.print("every stage is the reference's", style="green")
    else:
        wrong = f"it first goes wrong at {result.first_wrong}" if result.first_wrong else "other tokens win"
        console.print(wrong, style="bold red")
