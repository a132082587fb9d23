"""Size of a model from its config alone: parameters, bytes of weights, of the KV cache, of a step."""

from dataclasses import dataclass, replace
from functools import cache
from math import comb, floor
from typing import Any

from outpace.kv.topk import TopKConfig
from outpace.models.blocks import Layout
from outpace.models.config import ModelConfig
from outpace.models.load import parse_config, wanted_tensors
from outpace.models.tensor_parallel import part_config
from outpace.models.weights import count

BITS = {"bf16": 16.0, "fp8": 8.0, "q8": 8.5}  # of a weight that is not MXFP4; q8: GGUF's Q8_0
DENSE = {"attention", "mlp", "router", "head", "norms", "retrofit"}  # read whole for every token


@dataclass(frozen=True)
class Sizes:
    """`parts`: parameters and bytes of embedding, head, attention, router, experts, mlp, norms, retrofit.
    `ranks`: processes that hold the target together; parts and KV are one's, `config` is the whole's."""

    name: str
    config: ModelConfig
    parts: dict[str, tuple[int, float]]
    ranks: int = 1

    @property
    def parameters(self) -> int:
        return sum(n for n, _ in self.parts.values())

    @property
    def nbytes(self) -> float:
        return sum(b for _, b in self.parts.values())

    @property
    def active(self) -> float:
        """Parameters that a token's forward multiplies: no embedding row, but a tied head. Of several ranks,
        their mean."""
        E, K = self.config.num_experts, self.config.experts_per_token
        return self._read(0, K / E if E else 0.0)

    @property
    def full_layers(self) -> list[int]:
        return self.config.full_layers

    def experts_touched(self, tokens: int, rho: float = 1.0) -> float:
        """Per layer, by n tokens of one sequence: K + rho (E (1 - (1 - K/E)^n) - K). With rho 1, each chooses
        independently (MoESD, arXiv 2505.19645); neighbouring tokens share experts."""
        E, K = self.config.num_experts, self.config.experts_per_token
        if not E:
            return 0.0
        alone = E * (1 - (1 - K / E) ** tokens)
        return K + rho * (alone - K)

    def weights_read(self, tokens: int = 1, rho: float = 1.0) -> float:
        """Bytes of weights that a forward over `tokens` of one sequence reads; of several ranks, the one with
        most of the chosen experts, which the others wait for."""
        E = self.config.num_experts
        if not E:
            return self._read(1, 0.0)
        return self._read(1, busiest(self.experts_touched(tokens, rho), E, self.ranks) * self.ranks / E)

    def _read(self, kind: int, experts: float) -> float:
        """kind: 0 counts parameters, 1 bytes; experts: the share of them that is read."""
        whole = DENSE | ({"embedding"} if self.config.tie_word_embeddings else set())
        share = dict.fromkeys(whole, 1.0) | {"experts": experts}
        return sum(numbers[kind] * share.get(part, 0.0) for part, numbers in self.parts.items())

    def kv_growing(self, number: float = 2.0) -> float:
        """Bytes that a token adds to the KV cache of full-attention layers; `number`: bytes of one."""
        config = self.config
        numbers = sum(config.kv_numbers(i) + config.index_numbers(i) for i in self.full_layers)
        return number * numbers / self.ranks

    def kv_bytes(self, context: int, number: float = 2.0) -> float:
        """Of one sequence; layers with a sliding window cache no more than it."""
        config, full = self.config, set(self.full_layers)
        windows = [i for i in range(config.num_layers) if i not in full]
        windowed = sum(config.kv_numbers(i) * min(context, config.window(i)) for i in windows)
        return self.kv_growing(number) * context + number * windowed / self.ranks

    def kv_read(self, context: int, number: float = 2.0) -> float:
        """Bytes of KV cache that one token's step reads; with an index, its keys and the chosen tokens."""
        config, total = self.config, 0.0
        for i in range(config.num_layers):
            seen = min(context, config.window(i) or context)
            if i in config.dsa_layers and config.use_dsa:
                total += config.dsa_index_dim * context
                seen = config.dsa_keep.most(context)
            total += config.kv_numbers(i) * seen
        return number * total / self.ranks


def sizes_of(name: str, hf: dict[str, Any], dense: str = "bf16") -> Sizes:
    """hf: a config.json. Experts of a gpt-oss are MXFP4 if it has a quantization_config, all else is
    stored as BITS[dense]. Raises ValueError for another `dense`."""
    if dense not in BITS:
        raise ValueError(f"weights {dense!r}: it must be one of {', '.join(BITS)}")
    config = parse_config(hf)
    packed = (hf.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    parts = _counted(config, "mxfp4" if packed else "dense")
    scale = BITS[dense] / 16
    scaled = {p: (n, b if packed and p == "experts" else b * scale) for p, (n, b) in parts.items()}
    return Sizes(name, config, scaled)


@cache
def _counted(config: ModelConfig, layout: Layout) -> dict[str, tuple[int, int]]:
    """Parameters and bytes of each part, in bfloat16 or MXFP4."""
    wanted = wanted_tensors(config, layout)
    specs = [(n, tuple(t.shape), "U8" if t.dtype.itemsize == 1 else "BF16") for n, t in wanted.items()]
    return count(specs)[0]


def retrofitted(sizes: Sizes, rank: int, index_dim: int, index_heads: int, keep: TopKConfig | None) -> Sizes:
    """The same with latents of `rank` and an index (0: none) in every layer with full attention. Raises
    ValueError for what cannot be."""
    full = sizes.full_layers
    changed: dict[str, Any] = {}
    if rank:
        ranks = tuple(rank if i in full else 0 for i in range(sizes.config.num_layers))
        changed |= {"mla_ranks": ranks, "use_mla_kv": True}
    if index_dim:
        changed |= {"dsa_layers": tuple(full), "dsa_index_dim": index_dim, "dsa_index_heads": index_heads}
        changed |= {"use_dsa": True, "dsa_keep": keep or TopKConfig()}
    config = replace(sizes.config, **changed)
    extra = trainable(config)
    return Sizes(sizes.name, config, {**sizes.parts, "retrofit": (extra, 2.0 * extra)})


def divided(sizes: Sizes, ranks: int) -> Sizes:
    """What the first of `ranks` processes holds (models/tensor_parallel.py): its kv heads, MLP columns and
    experts, and the rest whole. Raises ValueError for what cannot be divided."""
    if ranks == 1:
        return sizes
    whole, part = (_counted(config, "dense") for config in (sizes.config, part_config(sizes.config, ranks)))
    parts = dict(sizes.parts)
    for name in parts.keys() & {"attention", "mlp", "experts"}:
        share = part[name][0] / whole[name][0]
        parts[name] = part[name][0], parts[name][1] * share
    return replace(sizes, parts=parts, ranks=ranks)


def busiest(touched: float, experts: int, ranks: int) -> float:
    """The mean of the most experts that one of the ranks runs, where each holds experts / ranks and all sets
    of `touched` are as likely; between whole numbers, on the line."""
    low = floor(touched)
    below, above = (_busiest(n, experts, ranks) for n in (low, min(low + 1, experts)))
    return below + (touched - low) * (above - below)


@cache
def _busiest(touched: int, experts: int, ranks: int) -> float:
    """Sum over k of P(most > k); the sets with no more than k in a rank are counted by the power of a
    polynomial."""
    own, mean = experts // ranks, 0.0
    for k in range(own):
        one, ways = [comb(own, j) for j in range(k + 1)], [1]
        for _ in range(ranks):
            ways = [
                sum(one[j] * ways[i - j] for j in range(k + 1) if 0 <= i - j < len(ways))
                for i in range(min(len(ways) + k, touched + 1))
            ]
        mean += 1 - (ways[touched] if len(ways) > touched else 0) / comb(experts, touched)
    return mean


def trainable(config: ModelConfig) -> int:
    """Parameters of the latents and indexes: W_c, W_k_lat and W_v_lat with their biases; q, k and w of an
    index with theirs."""
    C, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    latents = sum(C * r + r + 2 * (r * kv + kv) for r in config.mla_ranks if r)
    rows = config.dsa_index_heads * config.dsa_index_dim + config.dsa_index_dim + config.dsa_index_heads
    return latents + len(config.dsa_layers) * rows * (C + 1)
