"""DSA-lite: an index for each layer, its first weights from the attention's own, and what it misses.

A score is sum_f Re(q_f conj(k_f) e^(i (t - s) theta_f)) over the frequencies f of the rotation, q_f and k_f
one complex number each. What mixes kv heads within a frequency goes through the rotation unharmed, so an
index keeps, of all pairs (frequency, principal component of the heads' keys), those of most weight in scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outpace.config import Ranges
from outpace.kv.topk import Index, TopKConfig, reference_scores
from outpace.models.attention import Attention
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.indexer import Indexer, usual_heads
from outpace.ops.norm import rms_norm
from outpace.ops.quant import dense
from outpace.ops.ranks import Mean
from outpace.ops.rope import rotate
from outpace.ops.sampling import seeded
from outpace.retrofit.evaluate import attention_input, residual_states
from outpace.retrofit.pipeline import RetrofitSettings, Texts
from outpace.retrofit.train import RetrofitRecipe
from outpace.text.corpus import Document
from outpace.train.data import rows_of_step, token_stream
from outpace.train.trainer import StepLoss

SHARES = (0.125, 0.25, 0.5)  # of the context, at which mass is reported
EVERY = 16  # tokens per evaluated query
TEMPERATURES = tuple(2.0**-n for n in range(9))  # factors on an index's weights, tried on its first texts
LEAST = 1e-12


@dataclass(frozen=True)
class AttentionInputs:
    """One layer on one text: x [T,C], the input of its attention; q [T,H,D] and k [T,K,D] before rotation."""

    attention: Attention
    x: Tensor
    q: Tensor
    k: Tensor


@torch.no_grad()
def attention_inputs(target: Decoder, tokens: Tensor, layers: Sequence[int]) -> dict[int, AttentionInputs]:
    """tokens [T] int64 of one text from its beginning -> by layer; the target runs as it is switched."""
    states, values = residual_states(target, tokens[None]), {}
    for layer in layers:
        attention, x = target.attentions[layer], attention_input(target, layer, states)[0]
        K, D = attention.kv_heads, attention.head_dim
        q, k, _ = (part.unflatten(-1, (-1, D)) for part in _split(attention.qkv_proj(x), attention))
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = (rms_norm(y, n.weight, n.eps) for y, n in ((q, attention.q_norm), (k, attention.k_norm)))
        assert k.shape[1] == K
        values[layer] = AttentionInputs(attention, x, q, k)
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
    def of(cls, seen: AttentionInputs) -> "Phases":
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
    """Attention of n queries of a text. p [n,T]: weights summed over heads without sinks, normalized to 1;
    weight [n]: the heads' mean of the mass that sinks leave; scores [n,T]: I of the index; positions [n]."""

    p: Tensor
    weight: Tensor
    scores: Tensor
    positions: Tensor

    def candidates(self, keep: TopKConfig) -> Tensor:
        """[n, T] bool: the tokens that the index ranks."""
        s = torch.arange(self.p.shape[1], device=self.p.device)
        return (s >= keep.sinks) & (s <= self.positions[:, None] - keep.recent)

    def chosen(self, keep: TopKConfig) -> Tensor:
        """[n, T] bool: the candidates with the highest scores."""
        rest, lengths = self.candidates(keep), self.positions + 1
        take = keep.wanted(lengths) - (lengths - rest.sum(-1))
        scores = self.scores.detach().masked_fill(~rest, -torch.inf).flip(-1)  # of equals the later first
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).flip(-1)
        return rest & (rank < take[:, None])

    def kept(self, keep: TopKConfig) -> Tensor:
        """[n]: the share of p on attended tokens."""
        return (self.p * (self.chosen(keep) | ~self.candidates(keep))).sum(-1)

    def divergence(self, keep: TopKConfig, chosen: bool = False) -> Mean:
        """KL(p || softmax(I)) over the candidates, or over the `chosen` ones: mean over queries, weighted
        by the share of the heads' attention there."""
        rest = self.chosen(keep) if chosen else self.candidates(keep)
        some = rest.any(-1, keepdim=True)  # a softmax of nothing is NaN, and so is its gradient
        there = (self.p * rest).sum(-1, keepdim=True)
        p = torch.where(rest, self.p / there.clamp(min=LEAST), 0.0)
        q = self.scores.masked_fill(~rest & some, -torch.inf).log_softmax(-1)
        terms = torch.where(rest, p * (p.clamp(min=LEAST).log() - q), 0.0).sum(-1)
        weight = torch.where(some[:, 0], self.weight * there[:, 0], 0.0)
        return Mean.of(terms, weight)


def mass(target: Decoder, indexer: Indexer, seen: AttentionInputs, positions: Tensor) -> Mass:
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
def fit_temperature(target: Decoder, made: dict[int, Indexer], text: Sequence[int], keep: TopKConfig) -> None:
    """Scale the weights of each index so that its softmax is nearest to the attention, on a text: its first
    weights only rank tokens, and training starts from a softmax."""
    positions = torch.arange(len(text) // 4, len(text), EVERY, device=target.device)
    tokens = torch.tensor(list(text), device=target.device)
    for layer, seen in attention_inputs(target, tokens, list(made)).items():
        result = mass(target, made[layer], seen, positions)
        tried = {
            x: float(replace(result, scores=result.scores * x).divergence(keep).value) for x in TEMPERATURES
        }
        heads = made[layer].heads
        for part in (made[layer].proj.weight, made[layer].proj.bias):
            assert isinstance(part, Tensor)
            part[-heads:] *= min(tried, key=tried.__getitem__)


@torch.inference_mode()
def mass_table(
    target: Decoder, texts: Sequence[Sequence[int]], layers: Sequence[int], keep: TopKConfig
) -> list[dict[str, float]]:
    """One row for each layer and share of the context: the share of the attention's mass that the index
    keeps, that the latest tokens alone keep, and the maximum. Queries are of every text's second half."""
    sums: dict[tuple[int, float], list[Tensor]] = {}
    for text in texts:
        tokens = torch.tensor(list(text), device=target.device)
        positions = torch.arange(len(text) // 2, len(text), EVERY, device=target.device)
        for layer, seen in attention_inputs(target, tokens, layers).items():
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


@dataclass(frozen=True, kw_only=True)
class DsaSettings(RetrofitSettings):
    """`index_dim`: dimensions of an index's key, 0: half a head's; `index_heads`: 0: `usual_heads`.
    The others as in kv/topk.py: TopKConfig."""

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

    RANGES: ClassVar[Ranges] = RetrofitSettings.RANGES | {"index_dim": (0, 2**16), "index_heads": (0, 2**16)}

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.keep  # raises

    def layers_of(self, config: ModelConfig) -> list[int]:
        if config.dsa_layers:
            raise ValueError("retrofit dsa: this target has an index already: start from its original")
        return super().layers_of(config)

    def resolve(self, config: ModelConfig) -> tuple[list[int], int, int]:
        """-> layers, heads and dimensions of an index. Raises ValueError for layers that do not fit."""
        dim = self.index_dim or max(8, config.head_dim // 2 // 8 * 8)
        return self.layers_of(config), self.index_heads or usual_heads(config.num_heads), dim

    @property
    def keep(self) -> TopKConfig:
        return TopKConfig(**{field.name: getattr(self, field.name) for field in fields(TopKConfig)})

    def attach(self, target: Decoder, texts: Texts, validation: Texts) -> dict[str, Any]:
        layers, heads, dim = self.resolve(target.config)
        indexers = initial_indexers(target, texts, layers, heads, dim)
        fit_temperature(target, indexers, texts[0], self.keep)
        attach_index(target, indexers, self.keep)
        target.use_dsa(False)  # the states of the original
        table = mass_table(target, validation, layers, self.keep.by_count)
        target.use_dsa(True)
        return {
            "settings": {"layers": layers, "index_heads": heads, "index_dim": dim},
            "numbers_per_token": numbers_per_token(target),
            "parameters": sum(p.numel() for indexer in indexers.values() for p in indexer.parameters()),
            "mass": table,
        }


def initial_indexers(
    target: Decoder, texts: Sequence[Sequence[int]], layers: Sequence[int], heads: int, dim: int
) -> dict[int, Indexer]:
    sums: dict[int, Phases] = {}
    for text in texts:
        tokens = torch.tensor(list(text), device=target.device)
        for layer, inputs in attention_inputs(target, tokens, layers).items():
            phases = Phases.of(inputs)
            sums[layer] = sums[layer] + phases if layer in sums else phases
    return {i: first_weights(target.attentions[i], phases, heads, dim) for i, phases in sums.items()}


def numbers_per_token(target: Decoder) -> dict[str, int]:
    """Cached numbers per token of the layers with an index, without and with it."""
    layers, config = target.config.dsa_layers, target.config
    kv = sum(config.kv_numbers(i) for i in layers)
    return {"before": kv, "after": kv + sum(config.index_numbers(i) for i in layers)}


@dataclass(frozen=True, kw_only=True)
class DsaRecipe(RetrofitRecipe):
    """Fields of recipes/memory/dsa.toml."""

    NAME: ClassVar[str] = "dsa"
    row_tokens: int = 4096
    queries: int = 256  # of a row, in the loss
    sparse_share: float = 0.25  # of the steps, the last ones: attention is sparse
    decay: float = 0.5


class DsaTrainer:
    """Raises ValueError for a target without an index."""

    def __init__(
        self, recipe: DsaRecipe, target: Decoder, tokenizer: Tokenizer, train: list[Document]
    ) -> None:
        if not target.config.dsa_layers:
            raise ValueError("train dsa: this target has no index: add one by outpace retrofit dsa")
        self.recipe, self.target = recipe, target
        self.stream = token_stream(tokenizer, train, recipe.seed)

    @property
    def indexers(self) -> dict[int, Indexer]:
        attentions = self.target.attentions
        return {i: indexer for i in self.target.config.dsa_layers if (indexer := attentions[i].indexer)}

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.indexers.values())

    def switch(self, on: bool) -> None:
        self.target.use_dsa(on)

    def metrics(self, texts: Texts) -> dict[str, Any]:
        config = self.target.config
        return {"mass": mass_table(self.target, texts, config.dsa_layers, config.dsa_keep.by_count)}

    def loss(self, step: int, rows: list[int]) -> StepLoss:
        recipe, target, keep = self.recipe, self.target, self.target.config.dsa_keep.by_count
        sparse = step >= round(recipe.steps * (1 - recipe.sparse_share))
        target.use_dsa(sparse)
        losses: dict[int, list[Mean]] = {i: [] for i in self.indexers}
        kept: dict[int, list[Mean]] = {i: [] for i in self.indexers}
        for n in rows:
            row = rows_of_step(self.stream, recipe.row_tokens, 1, n, recipe.seed)[0][0].to(target.device)
            first = min(keep.sinks + keep.recent + 1, len(row) - 1)
            order = torch.randperm(len(row) - first, generator=seeded(recipe.seed, 5, n))
            positions = first + order[: recipe.queries].sort().values.to(row.device)
            inputs = attention_inputs(target, row, list(self.indexers))
            for i, indexer in self.indexers.items():
                result = mass(target, indexer, inputs[i], positions)
                losses[i].append(result.divergence(keep, sparse))
                shares = result.kept(keep)
                kept[i].append(Mean.of(shares, torch.ones_like(shares)))
        terms = [Mean.added(parts).times(1 / len(losses)) for parts in losses.values()]
        each = {f"kept_{i}": Mean.added(parts) for i, parts in kept.items()}
        return StepLoss(terms, len(rows) * recipe.row_tokens, {"kept": Mean.added([*each.values()]), **each})
