"""DSA-lite: an index for each layer, its first weights from the attention's own, and what it misses.

A score is sum_f Re(q_f conj(k_f) e^(i (t - s) theta_f)) over the frequencies f of the rotation, q_f and k_f
one complex number each. What mixes kv heads within a frequency goes through the rotation unharmed, so an
index keeps, of all pairs (frequency, principal component of the heads' keys), those of most weight in scores.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outpace.kv.topk import Index, TopKConfig, reference_scores
from outpace.models.attention import Attention
from outpace.models.decoder import Decoder
from outpace.models.indexer import Indexer, usual_heads
from outpace.models.load import fingerprint
from outpace.ops.norm import rms_norm
from outpace.ops.quant import dense
from outpace.ops.rope import rotate
from outpace.ops.sampling import seeded
from outpace.retrofit.evaluate import evaluate, read_by, states_of, texts_of
from outpace.retrofit.pipeline import RetrofitSettings, open_for, save_retrofit, texts_for
from outpace.retrofit.train import (
    FrozenRecipe,
    learners,
    once,
    publish,
    row_of,
    three_losses,
    train_frozen,
)
from outpace.text.corpus import Document
from outpace.text.template import ChatTemplate
from outpace.train.data import token_stream

SHARES = (0.125, 0.25, 0.5)  # of the context, at which mass is reported
EVERY = 16  # tokens, of which one query is looked at there
TEMPERATURES = tuple(2.0**-n for n in range(9))  # factors on an index's weights, tried on its first texts
LEAST = 1e-12


@dataclass(frozen=True)
class Seen:
    """One layer on one text: x [T,C], what its attention reads; q [T,H,D] and k [T,K,D] before rotation."""

    attention: Attention
    x: Tensor
    q: Tensor
    k: Tensor


@torch.no_grad()
def looked_at(target: Decoder, tokens: Tensor, layers: Sequence[int]) -> dict[int, Seen]:
    """tokens [T] int64 of one text from its beginning, gone over by the target as it is switched."""
    states, values = states_of(target, tokens[None]), {}
    for layer in layers:
        attention, x = target.attentions[layer], read_by(target, layer, states)[0]
        K, D = attention.kv_heads, attention.head_dim
        q, k, _ = (part.unflatten(-1, (-1, D)) for part in _split(attention.qkv_proj(x), attention))
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = (rms_norm(y, n.weight, n.eps) for y, n in ((q, attention.q_norm), (k, attention.k_norm)))
        assert k.shape[1] == K
        values[layer] = Seen(attention, x, q, k)
    return values


def _split(qkv: Tensor, attention: Attention) -> tuple[Tensor, ...]:
    D = attention.head_dim
    return qkv.split((attention.heads * D, attention.kv_heads * D, attention.kv_heads * D), dim=-1)


@dataclass
class Phases:
    """Sums over tokens, float64: keys [F,K,K], k conj(k') of the kv heads at a frequency; queries [F,H],
    |q|^2; inverse [H + K], 1 / rms where heads are normed."""

    keys: Tensor
    queries: Tensor
    inverse: Tensor
    tokens: int = 0

    @classmethod
    def of(cls, seen: Seen) -> "Phases":
        q, k = _complex(seen.q), _complex(seen.k)
        raw = _split(seen.attention.qkv_proj(seen.x), seen.attention)[:2]
        heads = torch.cat([part.unflatten(-1, (-1, seen.attention.head_dim)) for part in raw], 1)
        inverse = torch.ones(heads.shape[1], dtype=torch.float64, device=heads.device) * len(seen.x)
        if seen.attention.q_norm is not None:
            inverse = heads.double().square().mean(-1).rsqrt().sum(0)
        return cls(torch.einsum("tkf,tlf->fkl", k, k.conj()), q.abs().square().sum(0).T, inverse, len(seen.x))

    def __add__(self, other: "Phases") -> "Phases":
        parts = (a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        return Phases(*parts)


def first_weights(attention: Attention, phases: Phases, heads: int, dim: int) -> Indexer:
    """An index of `heads` query heads, each the mean of as many of the attention's as there are for it, and
    one key of `dim` numbers. Raises ValueError for more than the attention has."""
    H, K, D = attention.heads, attention.kv_heads, attention.head_dim
    if not 1 <= heads <= H or H % heads:
        raise ValueError(f"retrofit dsa: index_heads {heads}: it must divide the {H} heads of the attention")
    if dim % 2 or not 2 <= dim <= min(256, K * D):
        raise ValueError(f"retrofit dsa: index_dim {dim}: an even number of up to {min(256, K * D)}")
    W, b = _complex_rows(attention, phases)  # [H + K, F, C + 1] in one
    q, k = torch.cat((W, b[..., None]), -1).split((H, K))
    a = (phases.queries.unflatten(1, (K, -1)).sum(-1) / phases.tokens).sqrt().clamp(min=1e-12)  # [F, K]
    values, U = torch.linalg.eigh(a[:, :, None] * phases.keys / phases.tokens * a[:, None])
    best = values.flatten().argsort(descending=True)[: dim // 2]
    frequency, component = best // K, best % K
    worth, u = values.flatten()[best].clamp(min=1e-12), U[frequency, :, component]  # [n], [n, K]
    root, scale = worth.sqrt()[:, None], a[frequency]
    index_k = torch.einsum("ng,gnc->nc", u.conj() * scale, k[:, frequency]) / root
    of_kv = (u.conj() / scale).repeat_interleave(H // K, 1)  # [n, H]
    each = torch.einsum("nh,hnc->hnc", of_kv, q[:, frequency]) * root
    index_q = each.unflatten(0, (heads, -1)).mean(1)  # [heads, n, C + 1]
    made = Indexer(W.shape[-1], heads, dim)
    rows = [_real(index_q).flatten(0, 1), _real(index_k), torch.zeros(heads, W.shape[-1] + 1)]
    rows[2][:, -1] = (heads * dim) ** 0.5 * attention.scale
    whole = torch.cat([part.float() for part in rows])
    with torch.no_grad():
        made.proj.weight = nn.Parameter(whole[:, :-1].contiguous())
        made.proj.bias = nn.Parameter(whole[:, -1].contiguous())
        made.frequencies.copy_(frequency.float())
    return made.to(attention.qkv_proj.bias.device if attention.qkv_proj.bias is not None else whole.device)


def _complex_rows(attention: Attention, phases: Phases) -> tuple[Tensor, Tensor]:
    """Weights [H + K, F, C] and biases [H + K, F] of queries and keys, complex; of norms the mean."""
    H, K, D = attention.heads, attention.kv_heads, attention.head_dim
    weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    rows = (weight if isinstance(weight, Tensor) else dense(weight)).double()[: (H + K) * D]
    shift = torch.zeros((H + K) * D, dtype=torch.float64) if bias is None else bias.double()[: (H + K) * D]
    factor = torch.ones(H + K, D, dtype=torch.float64, device=rows.device)
    if attention.q_norm is not None and attention.k_norm is not None:
        norms = attention.q_norm.weight.expand(H, -1), attention.k_norm.weight.expand(K, -1)
        factor = torch.cat(norms).double() * (phases.inverse / phases.tokens)[:, None]
    whole = torch.cat((rows, shift.to(rows.device)[:, None]), 1).unflatten(0, (H + K, D)) * factor[..., None]
    turned = torch.complex(*whole.chunk(2, dim=1))
    return turned[..., :-1], turned[..., -1]


def _complex(x: Tensor) -> Tensor:
    """[..., D] -> [..., D/2]"""
    return torch.complex(*x.double().chunk(2, dim=-1))


def _real(x: Tensor) -> Tensor:
    """[..., n, C] complex -> [..., 2n, C]"""
    return torch.cat((x.real, x.imag), -2)


def attach_index(target: Decoder, made: dict[int, Indexer], keep: TopKConfig) -> None:
    """Give these layers of the target their indexes, in place, and switch them on."""
    one = next(iter(made.values()))
    target.config = replace(
        target.config,
        dsa_layers=tuple(sorted(made)),
        dsa_index_dim=one.dim,
        dsa_index_heads=one.heads,
        dsa_keep=keep,
        use_dsa=True,
    )
    for layer, indexer in made.items():
        attention = target.attentions[layer]
        attention.indexer, attention.keep, attention.use_index = indexer.requires_grad_(False), keep, True


def detach_index(target: Decoder) -> None:
    """The target as it was before `attach_index`."""
    none = {
        "dsa_layers": (),
        "dsa_index_dim": 0,
        "dsa_index_heads": 0,
        "dsa_keep": TopKConfig(),
        "use_dsa": False,
    }
    target.config = replace(target.config, **none)  # type: ignore[arg-type]
    for attention in target.attentions:
        attention.indexer, attention.use_index = None, False


@dataclass(frozen=True)
class Mass:
    """What n queries of a text look at. p [n,T]: the attention's weights, sinks left out, summed over heads
    and made one; weight [n]: the heads' mean of what sinks leave; scores [n,T]: I; positions [n]."""

    p: Tensor
    weight: Tensor
    scores: Tensor
    positions: Tensor

    def choice(self, keep: TopKConfig) -> Tensor:
        """[n, T] bool: what the index chooses among."""
        s = torch.arange(self.p.shape[1], device=self.p.device)
        return (s >= keep.sinks) & (s <= self.positions[:, None] - keep.recent)

    def chosen(self, keep: TopKConfig) -> Tensor:
        """[n, T] bool: what it chooses."""
        rest, lengths = self.choice(keep), self.positions + 1
        take = keep.wanted(lengths) - (lengths - rest.sum(-1))
        scores = self.scores.detach().masked_fill(~rest, -torch.inf).flip(-1)  # of equals the later first
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).flip(-1)
        return rest & (rank < take[:, None])

    def kept(self, keep: TopKConfig) -> Tensor:
        """[n]: the share of p that is looked at."""
        return (self.p * (self.chosen(keep) | ~self.choice(keep))).sum(-1)

    def divergence(self, keep: TopKConfig, chosen: bool = False) -> Tensor:
        """KL(p || softmax(I)) over what the index chooses among, or with `chosen` over what it chose: mean
        over queries, weighted by how much of the heads' attention lies there."""
        rest = self.chosen(keep) if chosen else self.choice(keep)
        some = rest.any(-1, keepdim=True)  # a softmax of nothing is NaN, and so is its gradient
        there = (self.p * rest).sum(-1, keepdim=True)
        p = torch.where(rest, self.p / there.clamp(min=LEAST), 0.0)
        q = self.scores.masked_fill(~rest & some, -torch.inf).log_softmax(-1)
        terms = torch.where(rest, p * (p.clamp(min=LEAST).log() - q), 0.0).sum(-1)
        weight = torch.where(some[:, 0], self.weight * there[:, 0], 0.0)
        return (weight * terms).sum() / weight.sum().clamp(min=LEAST)


def mass(target: Decoder, indexer: Indexer, seen: Seen, positions: Tensor) -> Mass:
    """Of the queries at `positions` [n] of a text; gradients reach the indexer alone."""
    attention, T = seen.attention, len(seen.x)
    cos, sin = target.rope(torch.arange(T, device=seen.x.device)[None])
    at = cos[:, positions], sin[:, positions]
    later = torch.arange(T, device=seen.x.device) > positions[:, None]
    with torch.no_grad():
        q = rotate(seen.q[None, positions].contiguous(), *at)[0]
        k = rotate(seen.k[None].contiguous(), cos, sin)[0]
        k = k.repeat_interleave(attention.heads // attention.kv_heads, 1)
        logits = torch.einsum("nhd,thd->hnt", q.float(), k.float()) * attention.scale
        logits = logits.masked_fill(later, -torch.inf)
        sums = logits.logsumexp(-1)  # [H, n]
        total = sums
        if attention.sinks is not None:
            total = torch.logaddexp(sums, attention.sinks.float()[:, None])
        p = torch.einsum("hnt->nt", (logits - total[..., None]).exp())
        left = p.sum(-1, keepdim=True)
    index: Index = indexer(seen.x[None], cos, sin)
    scores = reference_scores(index.q[:, positions], index.w[:, positions], index.k)[0]
    return Mass(p / left, left[:, 0] / attention.heads, scores.masked_fill(later, -torch.inf), positions)


@torch.inference_mode()
def temper(target: Decoder, made: dict[int, Indexer], text: Sequence[int], keep: TopKConfig) -> None:
    """Scale the weights of each index so that its softmax comes nearest to the attention, on a text: an order
    of tokens is all that its first weights know, and learning begins from there."""
    positions = torch.arange(len(text) // 4, len(text), EVERY, device=target.device)
    tokens = torch.tensor(list(text), device=target.device)
    for layer, seen in looked_at(target, tokens, list(made)).items():
        result = mass(target, made[layer], seen, positions)
        tried = {x: float(replace(result, scores=result.scores * x).divergence(keep)) for x in TEMPERATURES}
        heads = made[layer].heads
        for part in (made[layer].proj.weight, made[layer].proj.bias):
            assert isinstance(part, Tensor)
            part[-heads:] *= min(tried, key=tried.__getitem__)


@torch.inference_mode()
def mass_table(
    target: Decoder, texts: Sequence[Sequence[int]], layers: Sequence[int], keep: TopKConfig
) -> list[dict[str, float]]:
    """One row for each layer and share of the context: what the index keeps of the attention's mass, what the
    latest tokens alone would keep, and what the best choice would. Of queries in every text's second half."""
    sums: dict[tuple[int, float], list[Tensor]] = {}
    for text in texts:
        tokens = torch.tensor(list(text), device=target.device)
        positions = torch.arange(len(text) // 2, len(text), EVERY, device=target.device)
        for layer, seen in looked_at(target, tokens, layers).items():
            indexer = seen.attention.indexer
            assert indexer is not None
            ours = mass(target, indexer, seen, positions)
            latest = torch.arange(len(text), device=target.device).float().expand_as(ours.p)
            for share in SHARES:
                bound = replace(keep, top_k=share, min_context=0)
                kept = [replace(ours, scores=x).kept(bound) for x in (ours.scores, latest, ours.p)]
                sums.setdefault((layer, share), []).append(torch.stack(kept))
    return [
        {"layer": layer, "share": share}
        | dict(zip(("index", "recent", "best"), torch.cat(result, 1).mean(1).tolist(), strict=True))
        for (layer, share), result in sums.items()
    ]


REPORT = "dsa.json"


@dataclass(frozen=True, kw_only=True)
class DsaSettings(RetrofitSettings):
    """`index_dim`: numbers of an index's key, 0: half a head's; `index_heads`: 0: `usual_heads`. The others
    as in kv/topk.py: Keep."""

    NAME: ClassVar[str] = "dsa"
    index_dim: int = 0
    index_heads: int = 0
    top_k: float = 1024.0
    top_p: float = 0.0
    least_mass: float = 0.0
    min_context: int = 1024
    sinks: int = 4
    recent: int = 64
    row_tokens: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.keep

    @property
    def keep(self) -> TopKConfig:
        return TopKConfig(**{field.name: getattr(self, field.name) for field in fields(TopKConfig)})


def retrofit_dsa(
    path: str,
    settings: DsaSettings,
    documents: Sequence[Document],
    out: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Write out/, a checkpoint where the original tensors are untouched; -> the report, also out/json.
    Raises ValueError for settings that this target cannot have, and for an `out` that holds something."""
    target, tokenizer = open_for(path, out)
    layers, heads, dim = asked_of(target, settings)
    on_stage("reading text")
    texts, validation = texts_for(tokenizer, documents, settings)
    on_stage(f"going over {settings.rows} texts with {len(layers)} layers")
    made = first_indexes(target, texts, layers, heads, dim)
    temper(target, made, texts[0], settings.keep)
    before = evaluate(target, validation)
    whose = fingerprint(target)
    on_stage("judging on held-out text")
    attach_index(target, made, settings.keep)
    report = {
        "settings": asdict(settings) | {"layers": layers, "index_heads": heads, "index_dim": dim},
        "made_from": whose,
        "calibration_tokens": sum(map(len, texts)),
        "numbers_per_token": numbers_of(target),
        "parameters": sum(p.numel() for indexer in made.values() for p in indexer.parameters()),
        **index_metrics(target, validation, before),
    }
    on_stage("saving")
    save_retrofit(target, tokenizer, path, out, report, REPORT)
    return report


def asked_of(target: Decoder, settings: DsaSettings) -> tuple[list[int], int, int]:
    """-> layers, heads and dimensions of an index."""
    config = target.config
    if config.dsa_layers:
        raise ValueError("retrofit dsa: this target has an index already: start from the one it was made for")
    dim = settings.index_dim or max(8, config.head_dim // 2 // 8 * 8)
    return settings.layers_of(config), settings.index_heads or usual_heads(config.num_heads), dim


def first_indexes(
    target: Decoder, texts: Sequence[Sequence[int]], layers: Sequence[int], heads: int, dim: int
) -> dict[int, Indexer]:
    sums: dict[int, Phases] = {}
    for text in texts:
        tokens = torch.tensor(list(text), device=target.device)
        for layer, seen in looked_at(target, tokens, layers).items():
            result = Phases.of(seen)
            sums[layer] = sums[layer] + result if layer in sums else result
    return {i: first_weights(target.attentions[i], phases, heads, dim) for i, phases in sums.items()}


def numbers_of(target: Decoder) -> dict[str, int]:
    """What the layers with an index remember of a token, and what their queries read of one at most."""
    layers, config = target.config.dsa_layers, target.config
    kept = sum(config.kv_numbers(i) for i in layers)
    return {"before": kept, "after": kept + sum(config.index_numbers(i) for i in layers)}


def index_metrics(target: Decoder, entries: list[list[int]], before: Mapping[str, Any]) -> dict[str, Any]:
    """What the indexes keep of the attention's mass, layer by layer; held-out loss with and without them."""
    after = evaluate(target, entries, before["log_probabilities"])
    plain = {name: value for name, value in before.items() if name != "log_probabilities"}
    del after["log_probabilities"]
    config = target.config
    target.use_dsa(False)  # the states of the target as it was
    table = mass_table(target, entries, config.dsa_layers, config.dsa_keep.by_count)
    target.use_dsa(True)
    return {"mass": table, "held_out": {"texts": len(entries), "before": plain, "after": after}}


@dataclass(frozen=True, kw_only=True)
class DsaRecipe(FrozenRecipe):
    """Fields of recipes/memory/dsa.toml."""

    NAME: ClassVar[str] = "dsa"
    row_tokens: int = 4096  # one row a step
    queries: int = 256  # of a row, looked at
    sparse_share: float = 0.25  # of the steps, the last ones: attention is sparse
    decay: float = 0.5


def train_dsa(
    recipe: DsaRecipe,
    target: Decoder,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    train: list[Document],
    held_out: list[Document],
    folder: Path,
    *,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Train the indexes of `target`, in place, and save folder/model; -> the report, None if stopped early.
    Raises ValueError for a target that has none."""
    config = target.config
    if not config.dsa_layers:
        raise ValueError("train dsa: this target has no index: give it one by outpace retrofit dsa")
    indexers = {i: indexer for i in config.dsa_layers if (indexer := target.attentions[i].indexer)}
    texts = texts_of(tokenizer, held_out, recipe.validation_texts, recipe.row_tokens, recipe.seed)
    keep = config.dsa_keep.by_count
    untrained = once(folder, lambda: _evaluated(target, texts, None))
    stream = token_stream(tokenizer, train, recipe.seed)
    parameters = learners(target, indexers.values())
    sparse_from = round(recipe.steps * (1 - recipe.sparse_share))

    def losses(step: int) -> tuple[Tensor, dict[str, Any]]:
        sparse = step >= sparse_from
        target.use_dsa(sparse)
        row = row_of(stream, recipe.row_tokens, 1, step, recipe.seed)[0].to(target.device)
        result = _losses(target, indexers, row, recipe, keep, sparse, step)
        total = torch.stack([loss for loss, _ in result.values()]).mean()
        kept = {f"kept_{i}": round(kept.item(), 4) for i, (_, kept) in result.items()}
        return total, {"kept": sum(kept.values()) / len(kept), **kept}

    train_frozen(target, parameters, recipe, losses, folder, "index", stop_after)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if len(log) < recipe.steps:
        return None
    fields = _evaluated(target, texts, untrained["held_out"]["after"]) | {"mass_untrained": untrained["mass"]}
    return publish(target, tokenizer, template, folder / "model", REPORT, recipe, log, fields)


def _losses(
    target: Decoder,
    indexers: dict[int, Indexer],
    row: Tensor,
    recipe: DsaRecipe,
    keep: TopKConfig,
    sparse: bool,
    step: int,
) -> dict[int, tuple[Tensor, Tensor]]:
    first = min(keep.sinks + keep.recent + 1, len(row) - 1)
    many = min(recipe.queries, len(row) - first)
    rng = seeded(recipe.seed, 5, step)
    positions = first + torch.randperm(len(row) - first, generator=rng)[:many].sort().values.to(row.device)
    seen = looked_at(target, row, list(indexers))
    fields = {i: mass(target, indexer, seen[i], positions) for i, indexer in indexers.items()}
    return {i: (each.divergence(keep, sparse), each.kept(keep).mean()) for i, each in fields.items()}


def _evaluated(target: Decoder, texts: list[list[int]], untrained: dict[str, Any] | None) -> dict[str, Any]:
    """What the indexes keep of the mass that the target with full attention gives; held-out loss."""
    target.use_dsa(False)
    keep = target.config.dsa_keep.by_count
    table = mass_table(target, texts, target.config.dsa_layers, keep)
    return {"mass": table, "held_out": three_losses(target, texts, target.use_dsa, untrained)}
