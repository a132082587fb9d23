"""Tensor parallel: a target over several processes, each with some kv heads, MLP columns and experts.

Embedding, norms, routers and head are whole in every process, so that all see the same hidden states and the
same logits, to the bit. Each computes what its heads, columns and experts add to a layer's output, and the
parts are added up (`ops.ranks.Group.sum`): twice a layer. As in Megatron-LM (arXiv 1909.08053, section 3), q,
k, v, gates and ups are divided by rows, o and down by columns; experts are divided whole.
"""

from dataclasses import replace

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn

from outpace.checkpoint.open import Checkpoint, LoadError
from outpace.models.attention import DecoderBlock
from outpace.models.blocks import MLP, Experts, Linear
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.weights import Entry
from outpace.ops.quant import Quant
from outpace.ops.ranks import Group


class RowParallel(Linear):
    """The columns of a weight that read what this process computes; the first process has the bias."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.sum(super().forward(x))


class ExpertParallel(Experts):
    """The router of all experts, and the matrices of this process's share of them."""

    group: Group

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `Experts.run`: x has a row for every (token, choice) of this process's experts."""
        count = (self.down.scales if self.down.weight is None else self.down.weight).shape[0]
        own = chosen - self.group.rank * count
        token, choice = ((own >= 0) & (own < count)).nonzero(as_tuple=True)
        y = x.new_zeros(x.shape)
        if len(token):
            picked = own[token, choice, None], weights[token, choice, None]
            y.index_add_(0, token, super().run(x[token], *picked))
        return self.group.sum(y)


def part_config(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes of one of `size` parts. Raises ValueError, naming what cannot be divided."""
    for name, used in (("latent KV", config.mla_ranks), ("an index", config.dsa_layers)):
        if used:
            raise ValueError(
                f"tensor_parallel_size {size}: this target has {name}, which is not divided; run it in one "
                "process, or take the target that it was retrofitted from"
            )
    counts = {"num_key_value_heads": config.num_kv_heads}
    if config.num_experts:
        counts["num_experts"] = config.num_experts
    if not config.num_experts or not all(config.moe_layers):
        counts["intermediate_size"] = config.intermediate_size
    for name, count in counts.items():
        if count % size:
            fits = [str(n) for n in range(2, count + 1) if all(c % n == 0 for c in counts.values())]
            usable = f"it can be {', '.join(fits)}" if fits else "run the target in one process"
            raise ValueError(
                f"tensor_parallel_size {size}: this target's {name} {count} is not a multiple of it; {usable}"
            )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        num_experts=config.num_experts // size,
        experts_per_token=min(config.experts_per_token, config.num_experts // size),
    )


def share(model: Decoder, whole: ModelConfig, group: Group) -> None:
    """Turn a model of the `part_config` of `whole` into this process's part of the target."""
    model.config, model.group = whole, group
    for block in model.layers:
        assert isinstance(block, DecoderBlock)
        _sum(block.self_attn.o_proj, group)
        if isinstance(block.mlp, MLP):
            _sum(block.mlp.down_proj, group)
        else:
            biased = block.mlp.router.bias is not None
            block.mlp.router = Linear(whole.hidden_size, whole.num_experts, biased)
            block.mlp.per_token = whole.experts_per_token
            _become(block.mlp, ExpertParallel, group)


def _sum(layer: Linear, group: Group) -> None:
    _become(layer, RowParallel, group)
    if group.rank:
        layer.bias = None


def _become(module: nn.Module, kind: type[RowParallel] | type[ExpertParallel], group: Group) -> None:
    """The module as one of `kind`, as torch's `fully_shard` does it: its weights keep their names."""
    module.__class__ = kind
    assert isinstance(module, kind)
    module.group = group


def own_parts(entry: Entry, checkpoint: Checkpoint, group: Group | None) -> list[Tensor | Quant]:
    """The tensors of an entry, of each what this process's parameter holds; views of the file where rows are
    divided. Raises LoadError for blocks that end within a part."""
    names = entry.names
    owner, leaf = entry.param.split(".")[-2:]
    if group is None:
        return [checkpoint.get(name) for name in names]
    if owner in ("gate", "up", "down") and len(names) > 1:  # a tensor, or two, for each expert
        return [checkpoint.get(name) for name in names[_own(len(names), group)]]
    if owner in ("gate", "up", "down", "qkv_proj", "gate_up_proj") or leaf == "sinks":
        wholes = [checkpoint.get(name) for name in names]
        return [whole[_own(whole.shape[0], group)] for whole in wholes]
    if owner in ("o_proj", "down_proj") and leaf == "weight":
        return [_columns(name, checkpoint.get(name), group) for name in names]
    return [checkpoint.get(name) for name in names]


def _own(count: int, group: Group) -> slice:
    return slice(group.rank * count // group.size, (group.rank + 1) * count // group.size)


def _columns(name: str, weight: Tensor | Quant, group: Group) -> Tensor | Quant:
    if isinstance(weight, Tensor):
        return weight[:, _own(weight.shape[1], group)].contiguous()
    values, _ = GGML_QUANT_SIZES[GGMLQuantizationType[weight.format]]
    columns = weight.shape[1]
    if columns % (values * group.size):
        raise LoadError(
            f"{name}: rows of {columns:,} values in blocks of {values} ({weight.format}) cannot be divided "
            f"by {group.size}: take a file in Q8_0, whose blocks have 32 values, or safetensors"
        )
    return Quant(weight.data[:, _own(weight.data.shape[1], group)].contiguous(), weight.format)
