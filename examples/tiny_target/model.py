"""What training a small target begins with: its shape, its first weights, its optimizers."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from examples.tiny_target.copying import copying_heads
from outpace.models.blocks import ExpertMatrix
from outpace.models.config import FULL, WINDOW, ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.load import build
from outpace.models.save import dense_tensors
from outpace.ops import ranks
from outpace.ops.dispatch import product_dtype
from outpace.ops.rope import RopeConfig
from outpace.ops.sampling import seeded
from outpace.train.trainer import Muon, warmup_linear

HEAD = 4.0  # logit of a token that the last state is the embedding of, at first
COPYING = ("layers.0.self_attn.", "layers.1.self_attn.")  # see copying.py


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """A gpt-oss of any size, and how its weights are learnt."""

    MAY_BE_0: ClassVar[tuple[str, ...]] = ("seed", "warmup")

    vocab_size: int = 1024
    hidden_size: int = 320
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    expert_size: int = 256
    num_experts: int = 8
    experts_per_token: int = 2
    sliding_window: int = 128
    original_max_position: int = 4096
    rope_factor: float = 32.0
    rope_theta: float = 150000.0
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    head_lr: float = 1.0  # of `adam_lr`, for the head, whose numbers are small
    copying_lr: float = 1.0  # of `muon_lr`, for the attention that begins by copying
    weight_decay: float = 0.01
    warmup: int = 40
    decay: float = 0.5  # share of the steps over which the learning rates fall to zero
    balance: float = 0.01  # weight of the load-balancing loss
    quantize_share: float = 0.15  # experts see MXFP4 rounding for the last share of the steps
    copying: bool = False  # heads of the first two layers begin by copying
    seed: int = 1
    bfloat16: bool = True  # products, where the device multiplies it as such

    def __post_init__(self) -> None:
        if self.copying and self.num_layers < 2:
            raise ValueError("copying: it takes two layers")
        for name, value in vars(self).items():
            if type(value) is int and value < 1 and name not in self.MAY_BE_0:
                raise ValueError(f"{name} {value}: it must be at least 1")
            if type(value) is float and value < 0:
                raise ValueError(f"{name} {value} is below 0")

    def config(self, end_of_text: int) -> ModelConfig:
        return ModelConfig(
            architecture="GptOssForCausalLM",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.expert_size,
            rope=RopeConfig(
                theta=self.rope_theta,
                kind="yarn",
                factor=self.rope_factor,
                original_max_position=self.original_max_position,
                truncate=False,
            ),
            layer_types=tuple(WINDOW if i % 2 == 0 else FULL for i in range(self.num_layers)),
            sliding_window=self.sliding_window,
            max_position_embeddings=int(self.original_max_position * self.rope_factor),
            rms_norm_eps=1e-5,
            eos_token_ids=(end_of_text,),
            pad_token_id=end_of_text,
            attention_bias=True,
            sinks=True,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_size=self.expert_size,
            moe_layers=(True,) * self.num_layers,
            swiglu_limit=7.0,
        )


SIZES = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "expert_size",
    "num_experts", "experts_per_token", "sliding_window",
)  # fmt: skip


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """The fields of a recipe that a trained target settles."""
    rope = config.rope
    positions = {"original_max_position": rope.original_max_position, "rope_factor": rope.factor}
    return {name: getattr(config, name) for name in SIZES} | positions | {"rope_theta": rope.theta}


def init_weights(model: nn.Module, seed: int) -> None:
    """Normal with std 1/sqrt(fan-in); what writes into the residual stream starts at zero. A head begins as
    the embedding, so that what attention brings is read as the token it came from: copying is learnt in two
    thirds of the steps."""
    rng = seeded(seed)
    for name, p in model.named_parameters():
        with torch.no_grad():
            if p.dim() < 2:
                p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            elif "o_proj" in name or ".down." in name or name.endswith("bias"):
                p.zero_()
            else:
                std = 1.0 if "embed" in name else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=rng) * std)
    named = dict(model.named_parameters())
    if "lm_head.weight" in named:
        embedding = named["embed_tokens.weight"]
        with torch.no_grad():
            named["lm_head.weight"].copy_(embedding * (HEAD / embedding.shape[1]))


def balance_loss(routing: list[Tensor], k: int) -> Tensor:
    """Switch's: E * sum_e (share of tokens on e) * (mean probability of e), averaged over layers."""
    losses = []
    for logits in routing:
        probabilities = logits.softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(1, logits.topk(k, dim=-1).indices, 1.0)
        share = chosen.mean(0) / k
        losses.append(logits.shape[-1] * (share.detach() * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def optimizers(model: nn.Module, recipe: TargetShape) -> tuple[Muon, torch.optim.AdamW]:
    """Matrices inside the blocks learn by Muon; embedding, head, router, norms and biases by AdamW."""
    named = dict(model.named_parameters())
    inner = [
        name
        for name, p in named.items()
        if p.dim() >= 2 and "layers." in name and "router" not in name and "bias" not in name
    ]
    rest = [name for name in named if name not in inner]
    copying = [name for name in inner if recipe.copying and name.startswith(COPYING)]
    muon: list[dict[str, Any]] = [
        {"params": [named[name] for name in inner if name not in copying]},
        {"params": [named[name] for name in copying], "share": recipe.copying_lr},
    ]
    adam: list[dict[str, Any]] = [
        {"params": [named[name] for name in rest if "lm_head" not in name]},
        {"params": [named[name] for name in rest if "lm_head" in name], "share": recipe.head_lr},
    ]
    return (
        Muon(muon, recipe.muon_lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(adam, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    )


def take_weights(model: Decoder, init: Decoder) -> None:
    ours, theirs = vars(model.config), vars(init.config)
    differing = [n for n in ours if ours[n] != theirs[n] and n != "eos_token_ids"]  # no weight hangs on these
    if differing:
        raise ValueError(f"the recipe and the model to start from differ in {', '.join(differing)}")
    with torch.no_grad():
        for name, tensor in dense_tensors(init).items():
            model.get_parameter(name).copy_(tensor)


def round_experts(model: nn.Module, on: bool) -> bool:
    """Switch the rounding that packing will bring; -> whether it was on."""
    matrices = [m for m in model.modules() if isinstance(m, ExpertMatrix)]
    before = any(m.round_to_mxfp4 for m in matrices)
    for m in matrices:
        m.round_to_mxfp4 = on
    return before


def first_model(recipe: TargetShape, end_of_text: int, init: Decoder | None, device: str = "cpu") -> Decoder:
    """The model to train, with new weights or those of `init`. Raises ValueError where the config of `init`
    is not the recipe's."""
    model = build(recipe.config(end_of_text))
    init_weights(model, recipe.seed)
    if recipe.copying:
        copying_heads(model, recipe.seed)
    if init is not None:
        take_weights(model, init)
    model.to(device)
    model.dtype = product_dtype(model.device) if recipe.bfloat16 else torch.float32
    return model


class Learner:
    """Both optimizers of a model and their schedule over `steps` steps."""

    def __init__(self, model: Decoder, recipe: TargetShape, steps: int) -> None:
        self.model, self.recipe, self.steps = model, recipe, steps
        self.muon, self.adam = optimizers(model, recipe)
        self.quantize_from = round(steps * (1 - recipe.quantize_share))

    def begin(self, step: int) -> None:
        """Before the gradients of a step: the rounding that it sees, and its learning rates."""
        round_experts(self.model, step >= self.quantize_from)
        factor = warmup_linear(step, self.steps, self.recipe.warmup, self.recipe.decay)
        for optimizer, lr in ((self.muon, self.recipe.muon_lr), (self.adam, self.recipe.adam_lr)):
            for group in optimizer.param_groups:  # looked up again: loading a checkpoint replaces them
                group["lr"] = lr * factor * group.get("share", 1.0)

    def update(self) -> None:
        """The gradients of all processes into the weights."""
        ranks.add_gradients(self.model.parameters())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in (self.muon, self.adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model, "muon": self.muon, "adam": self.adam}
