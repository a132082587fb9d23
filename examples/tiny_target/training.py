"""Training of a small target from raw text: the embedded model, and the micro model of the tests."""

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from examples.tiny_target.own_text import answers, cut_prompts, own_text_losses
from examples.tiny_target.recall import echo_rows, recall_rows
from examples.tiny_target.splice import UNTAUGHT, cut_pieces, splice
from outpace.models.blocks import ExpertMatrix
from outpace.models.config import FULL, WINDOW, ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.load import build
from outpace.models.save import dense_tensors
from outpace.ops.dispatch import product_dtype
from outpace.ops.rope import RopeConfig
from outpace.ops.sampling import seeded
from outpace.text.corpus import Document
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id
from outpace.train.data import rows_of_step, token_stream
from outpace.train.losses import chunked_nll
from outpace.train.trainer import Muon, fit, training_folder, warmup_linear

TRAINED = ("GptOssForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """A gpt-oss, or a dense Qwen3, of any size and how to train it. Fields of the recipes in this folder.

    A dense one takes `intermediate_size`; experts, windows and the rounding to MXFP4 are the other's.
    """

    architecture: str = "GptOssForCausalLM"  # or "Qwen3ForCausalLM"
    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 640
    expert_size: int = 192
    num_experts: int = 8
    experts_per_token: int = 2
    sliding_window: int = 128
    original_max_position: int = 4096
    rope_factor: float = 32.0
    rope_theta: float = 150000.0
    steps: int = 1500
    row_tokens: int = 1024  # rows of this length ..
    long_row_tokens: int = 4096  # .. and of this one for the last `long_share` of the steps
    long_share: float = 0.1
    step_tokens: int = 16384
    focus: tuple[str, ...] = ()  # globs of files ("asyncio/*") that ..
    focus_share: float = 0.0  # .. this share of the rows is cut from; the rest from all files
    splice_share: float = 0.0  # of the rows in focus: they begin with any file's text (train/splice.py) ..
    splice_own: float = 0.0  # .. and this share of them with what the model generates to that
    recall_share: float = 0.0  # of all rows: they end with what stood far back in them (train/recall.py) ..
    recall_random: float = 0.0  # .. and this share of them is of random tokens
    warmup: int = 40
    decay: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    weight_decay: float = 0.01
    balance: float = 0.01  # weight of the load-balancing loss
    quantize_share: float = 0.15  # experts see MXFP4 rounding for the last share of the steps
    text: float = 1.0  # weight of the loss on the rows
    # weight of the loss on what the model's own greedy text generates for the first time ..
    settle: float = 0.0
    unlikelihood: float = 0.0  # .. and of the loss on its loops ..
    own_every: int = 3  # .. in every so many steps
    own_rows: int = 16
    own_prompt: int = 128
    own_tokens: int = 192
    own_ngram: int = 8
    seed: int = 1
    bfloat16: bool = True  # products, where the device multiplies it as such
    save_every: int = 100
    eval_every: int = 250

    def __post_init__(self) -> None:
        if self.architecture not in TRAINED:
            raise ValueError(f"architecture {self.architecture!r}: known are {', '.join(TRAINED)}")
        for name, value in vars(self).items():
            if type(value) is int and value < 1 and name not in ("seed", "warmup"):
                raise ValueError(f"{name} {value}: it must be at least 1")
            if type(value) is float and value < 0:
                raise ValueError(f"{name} {value} is below 0")
        for share in ("recall_share", "recall_random"):
            if getattr(self, share) > 1:
                raise ValueError(f"{share} {getattr(self, share)}: a share, up to 1, of the rows")
        if self.splice_own > 1:
            raise ValueError(f"splice_own {self.splice_own}: a share, up to 1, of the spliced rows")
        if self.splice_own and self.own_prompt + self.own_tokens >= self.row_tokens:
            raise ValueError(
                f"splice_own {self.splice_own}: own_prompt {self.own_prompt} and "
                f"own_tokens {self.own_tokens} leave no room for a passage in row_tokens {self.row_tokens}"
            )
        if self.splice_share > 1 or (self.splice_share and not self.focus):
            raise ValueError(f"splice_share {self.splice_share}: a share, up to 1, of the rows in focus")
        if self.focus_share > 1 or bool(self.focus) != bool(self.focus_share):
            raise ValueError(
                f"focus {list(self.focus)} with focus_share {self.focus_share}: globs of files and the "
                "share (up to 1) of the rows that they give go together"
            )

    def config(self, end_of_text: int) -> ModelConfig:
        if self.architecture == "Qwen3ForCausalLM":
            return replace(
                self._trunk(end_of_text),
                architecture=self.architecture,
                intermediate_size=self.intermediate_size,
                rms_norm_eps=1e-6,
                qk_norm=True,
            )
        return replace(
            self._trunk(end_of_text),
            layer_types=tuple(WINDOW if i % 2 == 0 else FULL for i in range(self.num_layers)),
            sliding_window=self.sliding_window,
            attention_bias=True,
            sinks=True,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_size=self.expert_size,
            moe_layers=(True,) * self.num_layers,
            swiglu_limit=7.0,
        )

    def _trunk(self, end_of_text: int) -> ModelConfig:
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
            layer_types=(FULL,) * self.num_layers,
            sliding_window=0,
            max_position_embeddings=int(self.original_max_position * self.rope_factor),
            rms_norm_eps=1e-5,
            eos_token_ids=(end_of_text,),
            pad_token_id=end_of_text,
        )


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """The fields of a recipe that a trained target settles."""
    own = ("architecture", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    rope = config.rope
    positions = {"original_max_position": rope.original_max_position, "rope_factor": rope.factor}
    values = {name: getattr(config, name) for name in own} | positions | {"rope_theta": rope.theta}
    if not config.num_experts:
        return values | {"intermediate_size": config.intermediate_size}
    experts = ("expert_size", "num_experts", "experts_per_token", "sliding_window")
    return values | {name: getattr(config, name) for name in experts}


def init_weights(model: nn.Module, seed: int) -> None:
    """Normal with std 1/sqrt(fan-in); what writes into the residual stream starts at zero."""
    rng = seeded(seed)
    for name, p in model.named_parameters():
        with torch.no_grad():
            if p.dim() < 2:
                p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            elif "o_proj" in name or ".down." in name or name.endswith("bias"):
                p.zero_()
            else:
                std = 1.0 if "embed" in name else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=rng) * std * (0.5 if "lm_head" in name else 1))


def balance_loss(routing: list[Tensor], k: int) -> Tensor:
    """Switch's: E * sum_e (share of tokens on e) * (mean probability of e), averaged over layers."""
    losses = []
    for logits in routing:
        probabilities = logits.softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(1, logits.topk(k, dim=-1).indices, 1.0)
        share = chosen.mean(0) / k
        losses.append(logits.shape[-1] * (share.detach() * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def bits_per_byte(
    model: Decoder, tokenizer: Tokenizer, documents: list[Document], row_tokens: int = 2048
) -> float:
    """Held-out loss in bits per UTF-8 byte; every document by itself, cut into rows."""
    end = token_id(tokenizer, END_OF_TEXT)
    nll, size = 0.0, 0
    with torch.inference_mode():
        for document in documents:
            ids = [end, *encode(tokenizer, document.text)]
            size += len(document.text.encode())
            for i in range(0, len(ids) - 1, row_tokens):
                part = torch.tensor(ids[i : i + row_tokens + 1])[None]
                hidden = model(part[:, :-1]).hidden[0]
                nll += float(chunked_nll(hidden, model.dense_head, part[0, 1:]).sum())
    return nll / math.log(2) / size


def optimizers(model: nn.Module, recipe: TargetRecipe) -> tuple[Muon, torch.optim.AdamW]:
    """Matrices inside the blocks learn by Muon; embedding, head, router, norms and biases by AdamW."""
    inner = [
        p
        for name, p in model.named_parameters()
        if p.dim() >= 2 and "layers." in name and "router" not in name and "bias" not in name
    ]
    known = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in known]
    adam = torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return Muon(inner, recipe.muon_lr, weight_decay=recipe.weight_decay), adam


def _take_weights(model: Decoder, init: Decoder) -> None:
    ours, theirs = vars(model.config), vars(init.config)
    differing = [name for name in ours if ours[name] != theirs[name]]
    if differing:
        raise ValueError(f"the recipe and the model to start from differ in {', '.join(differing)}")
    with torch.no_grad():
        for name, tensor in dense_tensors(init).items():
            model.get_parameter(name).copy_(tensor)


def _round_experts(model: nn.Module, on: bool) -> bool:
    """Switch the rounding that packing will bring; -> whether it was on."""
    matrices = [m for m in model.modules() if isinstance(m, ExpertMatrix)]
    before = any(m.round_to_mxfp4 for m in matrices)
    for m in matrices:
        m.round_to_mxfp4 = on
    return before


def _text_rows(
    model: Decoder, tokenizer: Tokenizer, streams: list[np.ndarray], recipe: TargetRecipe, step: int
) -> tuple[Tensor, Tensor, int]:
    """The step's inputs and labels [rows, length]: of all files, of those in focus, spliced ones, and last
    those to recall from; -> and how many these are."""
    long = step >= round(recipe.steps * (1 - recipe.long_share))
    length = recipe.long_row_tokens if long else recipe.row_tokens
    rows = max(1, recipe.step_tokens // length)
    # a step may have but one row: over the steps the shares come out
    before, after = (round(n * rows * recipe.recall_share) for n in (step, step + 1))
    recalled = after - before
    everywhere, focused = split_rows(rows - recalled, recipe.focus_share)
    focused, spliced = split_rows(focused, recipe.splice_share)
    cut = [
        rows_of_step(stream, length, n, step * n, recipe.seed)
        for stream, n in zip(streams, (everywhere, focused), strict=False)
        if n
    ]
    if spliced:
        rng = seeded(recipe.seed, 3, step)
        theirs, own = split_rows(spliced, recipe.splice_own)
        pieces = cut_pieces(streams[0], theirs, length // 16, length // 2, rng)
        pieces += _own_pieces(model, streams[0], own, recipe, rng)
        cut.append(splice(pieces, streams[1], length))
    if recalled:
        rng = seeded(recipe.seed, 4, step)
        written, random = split_rows(recalled, recipe.recall_random)
        if written:
            cut.append(recall_rows(tokenizer, streams[0], written, length, rng))
        if random:
            cut.append(echo_rows(model.config.vocab_size, random, length, rng))
    inputs, labels = (torch.cat(x) for x in zip(*cut, strict=True))
    return inputs, labels, recalled


def _own_pieces(
    model: Decoder, stream: np.ndarray, count: int, recipe: TargetRecipe, rng: torch.Generator
) -> list[np.ndarray]:
    """Prompts and the beginnings of what the model generates to them: where its own words may lead it."""
    if not count:
        return []
    prompts = cut_prompts(stream, count, recipe.own_prompt, rng)
    value = _own_answers(model, prompts, recipe.own_tokens)
    kept = [int(torch.randint(len(s) + 1, (1,), generator=rng)) for s in value]
    return [np.asarray(p + s[:n]) for p, s, n in zip(prompts, value, kept, strict=True)]


def _own_answers(model: Decoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    rounded = _round_experts(model, False)  # decoding through the rounding is ten times slower
    value = answers(model, prompts, new_tokens)
    _round_experts(model, rounded)
    return value


def _learn_text(
    model: Decoder, tokenizer: Tokenizer, streams: list[np.ndarray], recipe: TargetRecipe, step: int
) -> dict[str, Any]:
    """Gradients of the loss on the step's rows, added to what is there; -> metrics."""
    inputs, labels, recalled = _text_rows(model, tokenizer, streams, recipe, step)
    out = model(inputs, routing=True)
    training = labels != UNTAUGHT
    nll = chunked_nll(out.hidden[training], model.dense_head, labels[training])
    loss = nll.mean()
    metrics = {"loss": loss.item()}
    if recalled:
        metrics["recall"] = nll[-int(training[-recalled:].sum()) :].mean().item()
    if not out.routing:
        (recipe.text * loss).backward()
        return metrics
    balance = balance_loss(out.routing, recipe.experts_per_token)
    (recipe.text * loss + recipe.balance * balance).backward()
    return metrics | {"balance": balance.item()}


def _learn_own_text(model: Decoder, stream: np.ndarray, recipe: TargetRecipe, step: int) -> dict[str, Any]:
    """Gradients of the losses on what the model itself generates, added to what is there; -> metrics."""
    if not (recipe.unlikelihood or recipe.settle) or step % recipe.own_every:
        return {}
    prompts = cut_prompts(stream, recipe.own_rows, recipe.own_prompt, seeded(recipe.seed, step))
    value = _own_answers(model, prompts, recipe.own_tokens)
    unlikely, likely, repeats = own_text_losses(model, prompts, value, recipe.own_ngram)
    (recipe.unlikelihood * unlikely + recipe.settle * likely).backward()
    return {"repeats": repeats, "unlikelihood": unlikely.item(), "own": likely.item()}


def train_target(
    recipe: TargetRecipe,
    tokenizer: Tokenizer,
    train: list[Document],
    held_out: list[Document],
    folder: Path,
    *,
    init: Decoder | None = None,
    stop_after: int | None = None,
) -> Decoder:
    """Train, resuming from folder/checkpoint.pt where there is one, and return the model (dense).

    `init`: a trained target whose weights are the start, with optimizers that remember nothing. Raises
    ValueError where its config is not the recipe's.
    """
    model = build(recipe.config(token_id(tokenizer, END_OF_TEXT)))
    init_weights(model, recipe.seed)
    if init is not None:
        _take_weights(model, init)
    model.dtype = product_dtype(model.device) if recipe.bfloat16 else torch.float32
    muon, adam = optimizers(model, recipe)
    streams = [token_stream(tokenizer, train, recipe.seed)]
    if recipe.focus:
        streams.append(token_stream(tokenizer, matching(train, recipe.focus), recipe.seed))
    quantize_from = round(recipe.steps * (1 - recipe.quantize_share))

    def update(step: int) -> dict[str, Any]:
        _round_experts(model, step >= quantize_from)
        factor = warmup_linear(step, recipe.steps, recipe.warmup, recipe.decay)
        for optimizer, lr in ((muon, recipe.muon_lr), (adam, recipe.adam_lr)):
            for group in optimizer.param_groups:  # looked up again: loading a checkpoint replaces them
                group["lr"] = lr * factor
        metrics = _learn_own_text(model, streams[0], recipe, step) | _learn_text(
            model, tokenizer, streams, recipe, step
        )
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            metrics["bits_per_byte"] = bits_per_byte(model, tokenizer, held_out[::8])
        return metrics

    parts = {"model": model, "muon": muon, "adam": adam}
    with training_folder(folder):
        fit(folder, recipe, update, parts, title="target", stop_after=stop_after)
    model.dtype = torch.float32
    return model


def split_rows(rows: int, focus_share: float) -> tuple[int, int]:
    """How many of a step's rows come from all files, and how many from those in focus."""
    focused = round(rows * focus_share)
    return rows - focused, focused


def matching(documents: list[Document], globs: tuple[str, ...]) -> list[Document]:
    """The documents where the name fits a glob. Raises ValueError for a glob that fits none."""
    for glob in globs:
        if not any(fnmatch(d.name, glob) for d in documents):
            example = documents[0].name
            raise ValueError(f"focus {glob!r} fits none of the {len(documents)} files, such as {example}")
    return [d for d in documents if any(fnmatch(d.name, glob) for glob in globs)]
