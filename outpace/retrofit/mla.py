"""MLA-lite: keys and values of a layer factored into one latent, three ways; which rank each layer gets.

An error e = y - y^ of y = [k; v] costs e^T M e. With S the covariance of y and M^(1/2) S M^(1/2) = U L U^T,
the best latent of rank R is c = U_R^T M^(1/2) (y - mu), read as y^ = M^(-1/2) U_R c + mu, and its cost
is the sum of the eigenvalues left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outpace.config import Ranges
from outpace.models.attention import Attention
from outpace.models.blocks import Linear
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.latent import Latent
from outpace.ops.norm import rms_norm
from outpace.ops.quant import dense
from outpace.ops.ranks import Mean
from outpace.ops.sampling import shuffled
from outpace.retrofit.evaluate import attention_input, evaluate, residual_states
from outpace.retrofit.pipeline import HELD_OUT_TEXTS, RetrofitSettings, Texts
from outpace.retrofit.train import RetrofitRecipe
from outpace.teacher.store import TeacherCache
from outpace.text.corpus import Document
from outpace.train.data import rows_of_step, token_stream
from outpace.train.losses import block_losses
from outpace.train.trainer import StepLoss

OFFSETS = 512  # distances over which a rotation is averaged


@dataclass(frozen=True)
class Moments:
    """Of one layer, float64. y = [k; v] [2KD], before rotary positions and before any norm.

    mean [2KD] and cov [2KD, 2KD] of y; q [K, D, D]: E[q q^T], summed over the query heads of a kv head and
    averaged over relative rotations, the norm's weight and E[1/rms^2] applied where keys are normed;
    o [K, D, D]: sum over the same heads of W_o^T W_o; stream: E|x|^2 of the residual stream behind the layer.
    """

    mean: Tensor
    cov: Tensor
    q: Tensor
    o: Tensor
    stream: float
    tokens: int


@torch.inference_mode()
def calibrate(target: Decoder, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Moments]:
    """rows of token ids, each a text from its beginning. Raises ValueError where there is no token."""
    if not rows or not all(rows):
        raise ValueError("calibration needs text: give rows of at least one token")
    sums: dict[int, list[Tensor]] = {}
    total = sum(map(len, rows))
    for row in rows:
        states = residual_states(target, torch.tensor([list(row)], device=target.device))
        for layer in layers:
            result = _sums(target.attentions[layer], attention_input(target, layer, states)[0])
            result.append(states[layer + 1].double().square().sum())
            sums[layer] = (
                [a + b for a, b in zip(sums[layer], result, strict=True)] if layer in sums else result
            )
    return {
        layer: _moments(target, target.attentions[layer], [part / total for part in result], total)
        for layer, result in sums.items()
    }


def _sums(attention: Attention, x: Tensor) -> list[Tensor]:
    """x [T, C] -> sums over tokens of y, y y^T, q q^T [K, D, D] and 1/rms^2 [K]."""
    K, D = attention.kv_heads, attention.head_dim
    q, y = attention.qkv_proj(x).split((attention.heads * D, 2 * K * D), dim=-1)
    q = q.unflatten(-1, (-1, D))
    inverse = torch.full((K,), float(len(x)), dtype=torch.float64, device=x.device)
    if attention.q_norm is not None and attention.k_norm is not None:
        q = rms_norm(q, attention.q_norm.weight, attention.q_norm.eps)
        k = y[:, : K * D].double().unflatten(-1, (K, D))
        inverse = (k.square().mean(-1) + attention.k_norm.eps).reciprocal().sum(0)
    q, y = q.double().unflatten(1, (K, -1)), y.double()
    return [y.sum(0), y.T @ y, torch.einsum("tkgd,tkge->kde", q, q), inverse]


def _moments(target: Decoder, attention: Attention, means: list[Tensor], tokens: int) -> Moments:
    mean, outer, q, inverse, stream = means
    K, D = attention.kv_heads, attention.head_dim
    if attention.k_norm is not None:
        weight = attention.k_norm.weight.double()
        q = q * inverse[:, None, None]
        q = averaged(q, target) * weight[:, None] * weight
    else:
        q = averaged(q, target)
    out = attention.o_proj.weight
    assert isinstance(out, Tensor)
    heads = out.double().unflatten(1, (K, -1, D))  # [C, K, G, D]
    o = torch.einsum("ckgd,ckge->kde", heads, heads)
    return Moments(mean, outer - mean[:, None] * mean, q * attention.scale**2, o, float(stream), tokens)


def averaged(q: Tensor, target: Decoder) -> Tensor:
    """q [K, D, D] -> the mean of R^T q R over rotations R by distances 0 .. OFFSETS - 1: a score is
    q^T R_(s-t) k, so this is the cost of an error of k over all distances."""
    half, (cos, sin) = q.shape[-1] // 2, target.rope(torch.arange(OFFSETS, device=q.device))
    R = torch.diag_embed(torch.cat((cos, cos), -1).double())
    at = torch.arange(half, device=q.device)
    R[:, at, at + half], R[:, at + half, at] = -sin.double(), sin.double()
    turned = torch.einsum("nde,kdf,nfg->keg", R, q, R) / OFFSETS
    return turned * target.config.rope.concentration**2  # queries and keys are both multiplied by it


SVD, PCA, LOSS = METHODS = ("svd", "pca", "loss")
BALANCE = 1.0  # of keys against values
DAMPING = 1e-6  # of the mean diagonal: directions that cost nothing stay invertible


@dataclass(frozen=True)
class Basis:
    """Of one layer, float64. down [n, n]: rows by falling worth, c = (down (y - mean))[:R]; up [n, n]:
    y^ = up[:, :R] c + mean; worth [n]: what each direction saves."""

    down: Tensor
    up: Tensor
    mean: Tensor
    worth: Tensor

    def residual(self, moments: Moments, rank: int) -> Tensor:
        """E[(y - y^)(y - y^)^T] [n, n] at a rank."""
        n = len(self.mean)
        kept = torch.eye(n, dtype=torch.float64) - self.up[:, :rank] @ self.down[:rank]
        shift = moments.mean - self.mean
        return kept @ (moments.cov + shift[:, None] * shift) @ kept.T


def projection(attention: Attention) -> tuple[Tensor, Tensor]:
    """W [2KD, C] and b [2KD] of keys and values, float64."""
    q = attention.heads * attention.head_dim
    weight = attention.qkv_proj.weight
    whole = (weight if isinstance(weight, Tensor) else dense(weight)).double()[q:]
    bias = attention.qkv_proj.bias
    return whole, torch.zeros(len(whole), dtype=torch.float64) if bias is None else bias.double()[q:]


def basis(method: str, attention: Attention, moments: Moments, balance: float = BALANCE) -> Basis:
    """svd: of the weights alone, blind to what x is (a baseline). pca: of the outputs, about their mean.
    loss: of the outputs, in the metric of what attention makes of them. Raises ValueError for another."""
    W, b = projection(attention)
    n = len(W)
    eye = torch.eye(n, dtype=torch.float64)
    if method == SVD:
        U, values, _ = torch.linalg.svd(W, full_matrices=True)
        worth = torch.zeros(n, dtype=torch.float64)
        worth[: len(values)] = values.square()
        return Basis(U.T, U, b, worth)
    if method not in (PCA, LOSS):
        raise ValueError(f"method {method!r}: it must be one of {', '.join(METHODS)}")
    root, inverse = (eye, eye) if method == PCA else roots(metric(attention, moments, balance))
    values, U = torch.linalg.eigh(root @ moments.cov @ root)
    U, values = U.flip(1), values.flip(0).clamp(min=0)
    return Basis(U.T @ root, inverse @ U, moments.mean, values / moments.stream)


def metric(attention: Attention, moments: Moments, balance: float = BALANCE) -> Tensor:
    """M [2KD, 2KD], block by kv head. An error of v costs W_o^T W_o times the squared weights of the tokens;
    an error of k changes scores, and a score's error costs the same weights times E|W_o (v - mean)|^2, were
    the values independent of who looks at them: `balance` makes up for it."""
    K, D, G = attention.kv_heads, attention.head_dim, attention.heads // attention.kv_heads
    blocks = moments.cov[K * D :, K * D :].unflatten(0, (K, D)).unflatten(2, (K, D))
    values = torch.stack([blocks[h, :, h] for h in range(K)])  # [K, D, D]
    spread = torch.einsum("kde,ked->k", moments.o, values) / G
    return torch.block_diag(*(moments.q * (balance * spread)[:, None, None]), *moments.o)


def roots(m: Tensor) -> tuple[Tensor, Tensor]:
    """m^(1/2) and its inverse, damped."""
    values, U = torch.linalg.eigh(m)
    values = values.clamp(min=0) + DAMPING * values.mean()
    return (U * values.sqrt()) @ U.T, (U * values.rsqrt()) @ U.T


def ranks_of(bases: Mapping[int, Basis], mean_rank: int) -> dict[int, int]:
    """Ranks of equal marginal loss: of all directions of all layers the worthiest, mean_rank per layer; each
    layer gets at least one."""
    worth = torch.cat([b.worth for b in bases.values()])
    layer = torch.cat([torch.full((len(b.worth),), i) for i, b in bases.items()])
    best = layer[worth.argsort(descending=True)[: mean_rank * len(bases)]]
    return {i: max(1, int((best == i).sum())) for i in bases}


@torch.no_grad()
def attach(target: Decoder, bases: Mapping[int, Basis], ranks: Mapping[int, int]) -> None:
    """Give these layers of the target their latents, in place, and switch them on. Raises ValueError for a
    layer with a sliding window."""
    config = target.config
    ranks_by_layer = tuple(ranks.get(i, 0) for i in range(config.num_layers))
    target.config = replace(config, mla_ranks=ranks_by_layer, use_mla_kv=True)
    for layer, result in bases.items():
        attention, rank = target.attentions[layer], ranks[layer]
        latent = Latent(target.config, rank)
        W, b = projection(attention)
        half = len(W) // 2
        _fill(latent.down, result.down[:rank] @ W, result.down[:rank] @ (b - result.mean))
        for part, rows in ((latent.k_up, slice(half)), (latent.v_up, slice(half, None))):
            _fill(part, result.up[rows, :rank], result.mean[rows])
        attention.latent, attention.use_latent = latent.requires_grad_(False).to(target.device), True


def detach(target: Decoder) -> None:
    """The target as it was before `attach`."""
    target.config = replace(target.config, mla_ranks=(), use_mla_kv=False)
    for attention in target.attentions:
        attention.latent, attention.use_latent = None, False


def _fill(part: Linear, weight: Tensor, bias: Tensor) -> None:
    part.weight = nn.Parameter(weight.float().contiguous())
    part.bias = nn.Parameter(bias.float())


@dataclass(frozen=True)
class Error:
    """Share of the variance of keys and of values that a rank loses, and of what attention makes of them."""

    layer: int
    rank: int
    k: float
    v: float
    loss: float


def errors(
    target: Decoder, bases: Mapping[int, Basis], moments: Mapping[int, Moments], ranks: Mapping[int, int]
) -> list[Error]:
    entries = []
    for layer, made in bases.items():
        of, left = moments[layer], made.residual(moments[layer], ranks[layer])
        M, half = metric(target.attentions[layer], of), len(left) // 2
        parts = slice(half), slice(half, None)
        k, v = (float(left.diagonal()[rows].sum() / of.cov.diagonal()[rows].sum()) for rows in parts)
        cost = float((M * left).sum() / (M * of.cov).sum())
        entries.append(Error(layer, ranks[layer], k, v, cost))
    return entries


ALLOCATIONS = ("marginal", "equal")
BALANCES = (1.0, 0.3, 0.1, 0.03)  # of keys against values, tried on texts apart
FRACTIONS = (0.75, 0.5, 0.25)  # of 2 K D, at which errors are reported

Bases = Mapping[int, Basis]


@dataclass(frozen=True, kw_only=True)
class MlaSettings(RetrofitSettings):
    """`rank`: mean latent dimensions of a layer; 0: half of keys and values. `allocate`: "marginal", ranks of
    equal marginal loss, or "equal". `balance`: weight of keys against values with the method "loss"; 0: the
    best of BALANCES."""

    NAME: ClassVar[str] = "mla"
    method: str = LOSS
    rank: int = 0
    allocate: str = "marginal"
    balance: float = 0.0
    rows: int = 24
    RANGES: ClassVar[Ranges] = RetrofitSettings.RANGES | {"rank": (0, 2**24), "balance": (0, 1e6)}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("method", METHODS), ("allocate", ALLOCATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"retrofit mla: {name} {getattr(self, name)!r}: it must be one of {', '.join(known)}"
                )
        if self.allocate == "marginal" and self.method == SVD:
            raise ValueError("retrofit mla: svd sees no data, so it cannot weigh ranks: allocate = equal")

    @property
    def searches(self) -> bool:
        """Whether a balance is to be found."""
        return self.method == LOSS and not self.balance

    def layers_of(self, config: ModelConfig) -> list[int]:
        if config.mla_ranks:
            raise ValueError("retrofit mla: this target has latents already: start from its original")
        whole = 2 * config.num_kv_heads * config.head_dim
        if self.rank > whole:
            raise ValueError(
                f"retrofit mla: rank {self.rank}: keys and values of a layer have {whole} dimensions"
            )
        return super().layers_of(config)

    def resolve(self, config: ModelConfig) -> tuple[list[int], int]:
        """-> layers and mean rank. Raises ValueError for settings that do not fit."""
        return self.layers_of(config), self.rank or config.num_kv_heads * config.head_dim

    def ranks(self, bases: Bases, rank: int) -> dict[int, int]:
        return ranks_of(bases, rank) if self.allocate == "marginal" else dict.fromkeys(bases, rank)

    @property
    def extra_rows(self) -> int:
        return HELD_OUT_TEXTS if self.searches else 0

    def attach(self, target: Decoder, texts: Texts, validation: Texts) -> dict[str, Any]:
        layers, rank = self.resolve(target.config)
        before, moments = target.config, calibrate(target, texts[: self.rows], layers)
        table = error_table(target, moments)
        balance, tried = chosen_balance(target, moments, rank, self, texts[self.rows :])
        bases = bases_of(target, moments, self.method, balance)
        ranks = self.ranks(bases, rank)
        lost = errors(target, bases, moments, ranks)
        attach(target, bases, ranks)
        numbers = [sum(map(config.kv_numbers, layers)) for config in (before, target.config)]
        latents = [a.latent for a in target.attentions if a.latent is not None]
        return {
            "settings": {"layers": layers},
            "balance": balance if self.method == LOSS else None,
            "balances_tried": tried,
            "ranks": {str(i): r for i, r in ranks.items()},
            "numbers_per_token": dict(zip(("before", "after"), numbers, strict=True)),
            "parameters": sum(p.numel() for latent in latents for p in latent.parameters()),
            "errors": [asdict(e) for e in lost],
            "errors_by_method": table,
        }


def bases_of(target: Decoder, moments: Mapping[int, Moments], method: str, balance: float) -> Bases:
    return {i: basis(method, target.attentions[i], m, balance) for i, m in moments.items()}


def error_table(target: Decoder, moments: Mapping[int, Moments]) -> list[dict[str, Any]]:
    """Every method at every fraction, all layers of one rank."""
    entries = []
    for method in METHODS:
        bases = bases_of(target, moments, method, BALANCE)
        for fraction in FRACTIONS:
            ranks = {i: max(1, round(fraction * len(b.mean))) for i, b in bases.items()}
            lost = [asdict(e) for e in errors(target, bases, moments, ranks)]
            entries.append({"method": method, "fraction": fraction, "layers": lost})
    return entries


def chosen_balance(
    target: Decoder,
    moments: Mapping[int, Moments],
    rank: int,
    settings: MlaSettings,
    texts: list[list[int]],
) -> tuple[float, dict[str, float]]:
    """The one of BALANCES with the least divergence on `texts`; -> it, and all divergences. The target is as
    it was afterwards."""
    if not settings.searches:
        return settings.balance or BALANCE, {}
    tried = {}
    before = evaluate(target, texts)["log_probabilities"]
    for balance in BALANCES:
        bases = bases_of(target, moments, settings.method, balance)
        attach(target, bases, settings.ranks(bases, rank))
        tried[f"{balance:g}"] = evaluate(target, texts, before)["kl"]
        detach(target)
    return min(BALANCES, key=lambda b: tried[f"{b:g}"]), tried


@dataclass(frozen=True, kw_only=True)
class MlaRecipe(RetrofitRecipe):
    """Fields of recipes/memory/mla.toml."""

    NAME: ClassVar[str] = "mla"
    rows: int = 4  # of a step
    layer_share: float = 0.3  # of the steps, the first ones: every layer by itself
    kl: float = 1.0  # weight of the KL of the logits
    mse: float = 1.0  # weight of the error of the last states, relative to their size


class MlaTrainer:
    """With `teacher`, a cache of the original with final states, on its texts: training all layers together
    then needs no forward of the original. Raises ValueError for a target without latents."""

    def __init__(
        self,
        recipe: MlaRecipe,
        target: Decoder,
        tokenizer: Tokenizer,
        train: list[Document],
        teacher: TeacherCache | None = None,
    ) -> None:
        if not target.config.mla_ranks:
            raise ValueError("train mla: this target has no latents: add them by outpace retrofit mla")
        self.recipe, self.target, self.teacher = recipe, target, teacher
        self.stream = None if teacher is not None else token_stream(tokenizer, train, recipe.seed)

    def batches(self, rows: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        """Texts [B, T], each with the original's last states [B * T, C] where they are known."""
        recipe = self.recipe
        if self.teacher is not None:
            return cached_texts(self.teacher, recipe, rows)
        assert self.stream is not None
        texts = [rows_of_step(self.stream, recipe.row_tokens, 1, n, recipe.seed)[0] for n in rows]
        return [(torch.cat(texts), None)]

    @property
    def attentions(self) -> dict[int, Attention]:
        return {i: a for i, a in enumerate(self.target.attentions) if a.latent is not None}

    @property
    def modules(self) -> list[nn.Module]:
        return [a.latent for a in self.attentions.values() if a.latent is not None]

    def switch(self, on: bool) -> None:
        self.target.use_mla_kv(on)

    def metrics(self, texts: Texts) -> dict[str, Any]:
        return {}

    def loss(self, step: int, rows: list[int]) -> StepLoss:
        recipe, device = self.recipe, self.target.device
        batches = [(texts.to(device), final) for texts, final in self.batches(rows)]
        tokens = sum(texts.numel() for texts, _ in batches)
        if step < round(recipe.steps * recipe.layer_share):
            layers = Mean.added([self.layer_loss(texts) for texts, _ in batches])
            terms = [Mean(s / len(layers.sum), w) for s, w in zip(layers.sum, layers.weight, strict=True)]
            return StepLoss(terms, tokens, {"layers": layers})
        losses = [whole_losses(self.target, texts, final) for texts, final in batches]
        kl, mse = (Mean.added(list(part)) for part in zip(*losses, strict=True))
        return StepLoss([kl.times(recipe.kl), mse.times(recipe.mse)], tokens, {"kl": kl, "mse": mse})

    def layer_loss(self, rows: Tensor) -> Mean:
        """rows [B, T] -> the error of each layer's attention output relative to its size."""
        target = self.target
        with torch.no_grad():
            target.use_mla_kv(False)
            states = residual_states(target, rows)
            cos, sin = target.rope(torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1))
        errors = []
        for layer, attention in self.attentions.items():
            x = attention_input(target, layer, states)
            with torch.no_grad():
                original = attention(x, cos, sin, None, None).float()
            attention.use_latent = True
            value = attention(x, cos, sin, None, None).float()
            errors.append(_relative(value, original))
        target.use_mla_kv(True)
        return Mean(*(torch.stack(part) for part in zip(*errors, strict=True)))


def _relative(value: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error, and what it is a share of."""
    return (value - original).square().sum(), original.square().sum()


def cached_texts(
    teacher: TeacherCache, recipe: MlaRecipe, rows: list[int]
) -> list[tuple[Tensor, Tensor | None]]:
    """Texts [1, T] and final states [T, C]. Raises ValueError for a cache without final states, and for texts
    that do not begin at position 0."""
    texts: list[tuple[Tensor, Tensor | None]] = []
    for n in rows:
        (i,) = shuffled(n, 1, len(teacher), recipe.seed, 6)
        sample = teacher.sample(i)
        if sample.final is None or sample.offset:
            raise ValueError(
                "train mla: this cache has no final states, or texts at other positions: build one with "
                "teacher build --final and without --position-offsets"
            )
        texts.append((sample.tokens[None, : recipe.row_tokens].long(), sample.final[: recipe.row_tokens]))
    return texts


def whole_losses(target: Decoder, rows: Tensor, final: Tensor | None = None) -> tuple[Mean, Mean]:
    """rows [B, T] -> KL of the logits, nats per token; error of the last states relative to their size.
    `final` [B * T, C]: the original's, if they are known."""
    with torch.no_grad():
        target.use_mla_kv(False)
        original = target(rows).hidden.flatten(0, 1) if final is None else final.to(rows.device, target.dtype)
        target.use_mla_kv(True)
    value = target(rows).hidden.flatten(0, 1)
    head, labels = target.dense_head, rows.flatten()
    kl = block_losses("kl", value, head, labels, original, head).loss
    return Mean.of(kl, torch.ones_like(kl)), Mean(*_relative(value.float(), original.float()))
