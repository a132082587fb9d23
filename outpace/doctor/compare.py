"""Ours against a reference, layer by layer; where a half of a layer departs, the mistake that explains it."""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoint.base import Checkpoint
from outpace.checkpoint.open import open_checkpoint
from outpace.doctor.check import Check
from outpace.doctor.reference import attention_weights, mlp_different, mlp_weights, most_different, relative
from outpace.doctor.search import EXACT
from outpace.doctor.sides import (
    LayerSteps,
    Walk,
    engine_attention,
    engine_mlp,
    layer_of,
    same_experts,
    telling,
)
from outpace.doctor.trial import HALVES, Half, TrialCache, TrialResult, telling_rows, trial
from outpace.models.decoder import Decoder, DecoderBlock
from outpace.ops.quant import Joined, Quant, Weight, reference_dense

# Two files of one model in different number formats: what each half adds may differ by this many times
# what its matrices do. Beyond these relative differences a tensor is another one, not a rounded one; norms,
# biases and sinks stay in 16 bits or more in every format.
NOISE_FACTOR, MOST_NOISE = 10.0, 0.5
OTHER_MATRIX, OTHER_VECTOR = 0.25, 0.02
MATRICES = {"q", "k", "v", "o", "router", "gate_up", "down"}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """`walk`: what it did on the text. `model`: its weights in our engine; None where they are the same
    files as ours."""

    name: str
    walk: Walk
    model: Decoder | None = None


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far ours is from the reference: cosine over everything, largest difference, relative error."""

    cosine: float
    largest: float
    error: float


def apart(ours: Tensor, theirs: Tensor) -> Apart:
    flat = ours.flatten().double(), theirs.flatten().double()
    return Apart(
        cosine=float(torch.nn.functional.cosine_similarity(*flat, dim=0)),
        largest=float((flat[0] - flat[1]).abs().max()),
        error=relative(*flat),
    )


@dataclass(frozen=True, kw_only=True)
class LayerApart:
    """attention and mlp are fed with what the reference's got; `so_far` is ours from the embedding on."""

    layer: int
    window: int
    attention: Apart
    mlp: Apart
    so_far: Apart
    routed_alike: float | None  # share of the text's tokens that go to the same experts
    limits: dict[Half, float]
    tensors: dict[Half, tuple[str, ...]]  # those that differ by more than two number formats do
    findings: tuple[TrialResult, ...]

    @property
    def departs(self) -> tuple[Half, ...]:
        return tuple(h for h in HALVES if not getattr(self, h).error <= self.limits[h])


def compare_layers(model: Decoder, ours: Walk, reference: Reference) -> Iterator[LayerApart]:
    """One after the other."""
    memory = TrialCache()
    for i, theirs in enumerate(reference.walk.layers[: len(ours.layers)]):
        yield _compare_layer(model, i, ours.layers[i], theirs, reference, memory)


def _compare_layer(
    model: Decoder, i: int, ours: LayerSteps, theirs: LayerSteps, reference: Reference, memory: TrialCache
) -> LayerApart:
    block = layer_of(model, i)
    mlp, chosen = engine_mlp(block, theirs.middle)
    values: dict[Half, Tensor] = {
        "attention": engine_attention(model, block, theirs.x).float().cpu(),
        "mlp": mlp.float().cpu(),
    }
    wanted: dict[Half, Tensor] = {"attention": theirs.attention, "mlp": theirs.mlp}
    alike = same_experts(chosen, theirs.chosen)
    note = telling(alike, len(theirs.x))
    different = _different(block, None if reference.model is None else layer_of(reference.model, i))
    limits = {half: noise_limit(different[half]) for half in HALVES}
    halves: dict[Half, Apart] = {
        "attention": apart(values["attention"], wanted["attention"]),
        "mlp": apart(values["mlp"][note], wanted["mlp"][note]),
    }
    findings: list[TrialResult] = []
    for half in (h for h in HALVES if not halves[h].error <= limits[h]):
        rows = telling_rows(values[half], wanted[half], note)
        tried = trial(half, model, i, theirs, rows)
        mine = memory.explain(tried, "ours", wanted[half], limits[half], in_pairs=True)
        findings.append(mine)
        if reference.model is not None:
            tried = trial(half, reference.model, i, theirs, rows)
            its = memory.explain(tried, "theirs", values[half], limits[half], in_pairs=not mine.names)
            findings.append(its)
    return LayerApart(
        layer=i,
        window=block.self_attn.window,
        attention=halves["attention"],
        mlp=halves["mlp"],
        so_far=apart(ours.out, theirs.out),
        routed_alike=None if alike is None else float(alike.float().mean()),
        limits=limits,
        tensors={half: other_tensors(different[half]) for half in HALVES},
        findings=tuple(findings),
    )


def other_tensors(different: dict[str, float]) -> tuple[str, ...]:
    """Those that no number format explains."""
    return tuple(n for n, e in different.items() if e > (OTHER_MATRIX if n in MATRICES else OTHER_VECTOR))


def noise_limit(different: dict[str, float]) -> float:
    """What may differ by rounding: the median matrix tells how coarse the formats are. Not the largest one:
    it may be a little wrong."""
    rounded = [e for n, e in different.items() if n in MATRICES and e <= OTHER_MATRIX]
    return max(EXACT, min(NOISE_FACTOR * median(rounded or [0.0]), MOST_NOISE))


def _different(block: DecoderBlock, other: DecoderBlock | None) -> dict[Half, dict[str, float]]:
    """How far the two files' tensors are apart; nothing where there is one file only."""
    if other is None:
        return {"attention": {}, "mlp": {}}
    mine, theirs = mlp_weights(block), mlp_weights(other)
    alike = (mine.router is None) == (theirs.router is None)
    return {
        "attention": most_different(attention_weights(block), attention_weights(other)),
        "mlp": mlp_different(mine, theirs) if alike else {},
    }


GIB = 2**30


def open_transformers(folder: Path, layers: int) -> Any:
    """The model in float32, its first `layers` layers, MXFP4 experts unpacked by transformers itself.

    Raises ValueError where transformers is not installed, or where float32 would not fit in memory.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--reference hf needs transformers: pip install 'outpace[baselines]'")
    if not (folder / "config.json").is_file():
        raise ValueError(f"--reference hf: {folder} holds no config.json; name an HF folder after PATH")
    theirs: Any = importlib.import_module("transformers")
    config = theirs.AutoConfig.from_pretrained(folder)
    needed, free = _float32_bytes(folder, layers), _free_bytes()
    if needed > free:
        raise ValueError(
            f"transformers would need about {needed / GIB:.0f} GiB for {folder} in float32, "
            f"{free / GIB:.0f} are free: compare fewer layers (--layers 4), or without transformers "
            "(--reference OTHER-CHECKPOINT)"
        )
    if layers < config.num_hidden_layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    how: dict[str, Any] = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    if getattr(config, "quantization_config", None):
        how["quantization_config"] = theirs.Mxfp4Config(dequantize=True)
    theirs.logging.set_verbosity_error()
    theirs.logging.disable_progress_bar()
    try:
        return theirs.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    except ImportError as error:  # it unpacks MXFP4 with accelerate
        raise ValueError(f"--reference hf: {error}") from error


@torch.inference_mode()
def walk_transformers(model: Any, tokens: list[int]) -> Walk:
    """`model`: a transformers causal model of the Llama shape (`model.layers`, `self_attn`, `mlp`, ..)."""
    kept: dict[tuple[int, str], Tensor] = {}
    embedded: list[Tensor] = []
    hooks = [model.model.embed_tokens.register_forward_hook(lambda m, a, out: embedded.append(out[0]))]

    def entering(layer: int, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            kept[layer, name] = (args[0] if args else kwargs["hidden_states"])[0].float()

        return hook

    def leaving(layer: int, name: str, part: int = 0) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            value = out[part] if isinstance(out, tuple) else out
            kept[layer, name] = value if name == "chosen" else value.view(-1, value.shape[-1]).float()

        return hook

    for i, layer in enumerate(model.model.layers):
        hooks += [
            layer.register_forward_pre_hook(entering(i, "x"), with_kwargs=True),
            layer.self_attn.register_forward_hook(leaving(i, "attention")),
            layer.post_attention_layernorm.register_forward_pre_hook(entering(i, "middle"), with_kwargs=True),
            layer.mlp.register_forward_hook(leaving(i, "mlp")),
            layer.register_forward_hook(leaving(i, "out")),
        ]
        router = getattr(layer.mlp, "router", None) or getattr(layer.mlp, "gate", None)
        if router is not None:
            hooks.append(router.register_forward_hook(leaving(i, "chosen", 2)))
    try:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    count = len(model.model.layers)
    names = ("x", "attention", "middle", "mlp", "out", "chosen")
    steps = [LayerSteps(**{n: kept[i, n] for n in names if (i, n) in kept}) for i in range(count)]
    return Walk(embedded=embedded[0].float(), layers=steps, logits=logits)


def _float32_bytes(folder: Path, layers: int) -> int:
    """What the weights of the first `layers` layers take once every value is a float32."""
    total = 0
    for name, shape, _ in open_checkpoint(folder).specs():
        number = name.split("layers.")[-1].split(".")[0]
        if "layers." in name and number.isdigit() and int(number) >= layers:
            continue
        values = int(torch.Size(shape).numel())
        total += 4 * values * (2 if name.endswith("_blocks") else 0 if name.endswith("_scales") else 1)
    return total


def _free_bytes() -> int:
    """What the kernel reports as available; without /proc, half of the machine's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        value = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(value.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOST_ROWS = 2048  # that statistics are taken over
# Rows of the text's tokens where the norm is this far from the median's are not a trained token's.
FAR = 100.0


def stored_rows(checkpoint: Checkpoint, name: str, ids: list[int]) -> Tensor:
    """Rows of a tensor as the file has them, [n, C] float32; blocks unpacked by the gguf package."""
    tensor = checkpoint.get(name)
    if isinstance(tensor, Quant):
        return reference_dense(tensor.data[ids], tensor.format)
    return tensor[ids].float()


def weight_rows(weight: Weight, ids: list[int]) -> Tensor:
    assert not isinstance(weight, Joined), "embedding and head are one matrix"
    if isinstance(weight, Quant):
        return weight[torch.tensor(ids)].dense().float()
    return weight[ids].float()


def check_embedding(model: Decoder, checkpoint: Checkpoint, tokens: list[int]) -> Check:
    """The rows of the text's tokens, looked up and read from the file."""
    name = "embedding rows"
    ids = sorted(set(tokens))
    rows = stored_rows(checkpoint, EMBEDDING, ids)
    with torch.inference_mode():
        seen = model.embed(torch.tensor([ids], device=model.device))[0].float().cpu()
    norms = rows.norm(dim=-1)
    median = float(norms.median())
    odd = [i for i, n in zip(ids, norms.tolist(), strict=True) if not median / FAR <= n <= median * FAR]
    apart = float((seen - rows).abs().max())
    evidence = {
        "largest_difference": apart,
        "median_norm": median,
        "smallest_norm": float(norms.min()),
        "largest_norm": float(norms.max()),
        "odd": odd[:20],
    }
    if not bool(rows.isfinite().all()):
        return Check(name=name, status="fail", message="the file's rows hold NaN or Inf", evidence=evidence)
    if not apart <= 1e-6 * float(rows.abs().max()):
        text = f"what the model looks up differs from the file's rows by {apart:.2g}"
        return Check(name=name, status="fail", message=text, evidence=evidence)
    text = (
        f"{len(ids)} rows are the file's; norms {evidence['smallest_norm']:.3g} to "
        f"{evidence['largest_norm']:.3g}, median {median:.3g}"
    )
    if odd:
        text += f"; tokens {odd[:5]} have rows of a norm that no trained token has"
    return Check(name=name, status="warn" if odd else "pass", message=text, evidence=evidence)


def check_head(model: Decoder, checkpoint: Checkpoint) -> Check:
    """Tied or not, as the config specifies and as the file has it."""
    name = "head"
    vocab = model.config.vocab_size
    ids = list(range(0, vocab, max(vocab // MOST_ROWS, 1)))
    embedding = stored_rows(checkpoint, EMBEDDING, ids)
    used = weight_rows(model.head, ids).cpu()
    held = HEAD in checkpoint.names()
    tied = model.config.tie_word_embeddings
    alike = float(torch.nn.functional.cosine_similarity(embedding, used, dim=-1).mean())
    evidence = {"tied": tied, "file_has_a_head": held, "cosine_with_embedding": round(alike, 4)}
    if not bool(used.isfinite().all()):
        return Check(name=name, status="fail", message="the head holds NaN or Inf", evidence=evidence)
    if tied and held and not torch.equal(stored_rows(checkpoint, HEAD, ids), embedding):
        text = (
            "config.json ties the head to the embedding, but the file holds another head, which nobody "
            "reads: set tie_word_embeddings to false"
        )
        return Check(name=name, status="fail", message=text, evidence=evidence)
    if not tied and torch.equal(used, embedding):
        text = (
            "config.json specifies the head is not tied, but it equals the embedding: a converter may have "
            "copied one over the other"
        )
        return Check(name=name, status="warn", message=text, evidence=evidence)
    text = "tied to the embedding" if tied else f"its own matrix (cosine with the embedding {alike:.2f})"
    return Check(name=name, status="pass", message=text, evidence=evidence)
