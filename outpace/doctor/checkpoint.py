"""Gate A: what is wrong between a checkpoint and its config.json, by name, and what to do about it."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from reprlib import repr  # short, however long or deep the value
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoint.base import Checkpoint
from outpace.checkpoint.hf import HFCheckpoint
from outpace.checkpoint.open import LoadError, open_checkpoint
from outpace.models.config import ModelConfig
from outpace.models.load import Comparison, compare, parse_config
from outpace.models.weights import count
from outpace.ops.mxfp4 import SCALE_BIAS
from outpace.ops.quant import Quant

MLA = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHOWN = 4  # of a list, in a message
PROBE = "layers.0.input_layernorm.weight"
PREFIXES = {  # part of a prefix -> where such a checkpoint comes from, and what to do
    "language_model": "part of a multimodal checkpoint: save it alone, or fetch the text-only model",
    "base_model": "a model wrapped by PEFT: merge the adapter (`merge_and_unload`) and save again",
    "_orig_mod": "a model wrapped by torch.compile: save the model inside it",
    "module": "a model wrapped for parallel training: save the model inside it",
    "transformer": "another architecture, or other names for it: convert it to HF's layout",
}
PARTS = (  # tensors that a config switches on: pattern, name of the finding, what they are
    (r"self_attn\.[qkvo]_proj\.bias$", "attention_bias", "biases in attention", "set `attention_bias` to {}"),
    (r"mlp\.(gate|up|down)_proj\.bias$", "mlp_bias", "biases in the MLP", "set `mlp_bias` to {}"),
    (r"self_attn\.[qk]_norm\.weight$", "qk_norm", "norms of q and k", "Qwen3 has them: mind `architectures`"),
    (r"self_attn\.sinks$", "sinks", "attention sinks", "gpt-oss has them: mind `architectures`"),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`name` is stable, for scripts. A note (`fault` False) is worth knowing and stops nothing."""

    name: str
    message: str
    fix: str = ""
    fault: bool = True


@dataclass(frozen=True)
class CheckpointUnderTest:
    """What the checks look at. `specs`: name -> shape and dtype of every tensor held."""

    checkpoint: Checkpoint
    config: ModelConfig
    comparison: Comparison
    specs: dict[str, tuple[tuple[int, ...], str]]

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.specs[name][0] if name in self.specs else None


Explained = tuple[Finding, set[str]]  # a finding, and the names of the comparison that it accounts for


def config_findings(checkpoint: Checkpoint) -> list[Finding]:
    """What config.json and the names give away, whether or not the config can be parsed."""
    hf, names = checkpoint.config, checkpoint.names()
    latent, quantised = _latent_attention(hf, names), _quantised(hf, names)
    return [*latent, *quantised, *_adapter(names), *_index_total(checkpoint)]


def tensor_findings(evidence: CheckpointUnderTest) -> list[Finding]:
    """What the comparison of names, shapes and dtypes states, causes before symptoms: a tensor that one
    finding explains is in no later one."""
    prefix = list(_prefix(evidence))
    if prefix:
        return prefix
    value = []
    for check in (_experts, _number_of_experts, _layers, _head, _vocabulary, _heads, _parts, _half_packed):
        for finding, names in check(evidence):
            value.append(finding)
            evidence = replace(evidence, comparison=_without(evidence.comparison, names))
    return value + list(_rest(evidence.comparison))


def _without(comparison: Comparison, names: set[str]) -> Comparison:
    return Comparison(
        [name for name in comparison.missing if name not in names],
        [name for name in comparison.left_over if name not in names],
        [row for row in comparison.wrong_shape if row[0] not in names],
        comparison.wrong_dtype,
    )


# ---- config ---------------------------------------------------------------------------------------


def _latent_attention(hf: dict[str, Any], names: list[str]) -> Iterator[Finding]:
    keys = [key for key in MLA if hf.get(key)]
    tensors = [name for name in names if re.search(r"\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj)\.", name)]
    if keys or tensors:
        shown = ", ".join([f"`{key}` {repr(hf[key])}" for key in keys] + tensors[:1])
        yield Finding(
            name="latent_attention",
            message=f"multi-head latent attention (as DeepSeek's) is not read: {shown}",
            fix="GPT-OSS, Llama and Qwen3 with grouped-query attention are",
        )


def _quantised(hf: dict[str, Any], names: list[str]) -> Iterator[Finding]:
    message = hf.get("quantization_config") or hf.get("quantization")
    method = None
    if isinstance(message, dict):
        method = message.get("quant_method", "mlx" if "bits" in message else "an unnamed method")
        method = method if isinstance(method, str) else repr(method)
    packed = any(name.endswith("_blocks") for name in names)
    dense = any(re.search(r"\.experts\.(gate_up|down)_proj$", name) for name in names)
    if method is not None and method != "mxfp4":
        yield Finding(
            name="quantised",
            message=f"config.json: weights quantised by {method[:40]}, which is not read",
            fix="fetch the model in bfloat16 (or, of gpt-oss, as published in MXFP4), or as GGUF",
        )
    if method == "mxfp4" and dense and not packed:
        yield Finding(
            name="dequantised_experts",
            message="config.json specifies mxfp4, and the experts are dense",
            fix="remove `quantization_config` from config.json: other readers trust it",
            fault=False,
        )
    if packed and method is None:
        yield Finding(
            name="unmarked_mxfp4",
            message="the experts are MXFP4 (*_blocks), and config.json has no `quantization_config`",
            fix='add {"quant_method": "mxfp4"} as `quantization_config`: other readers need it',
            fault=False,
        )


def _adapter(names: list[str]) -> Iterator[Finding]:
    lora = [name for name in names if ".lora_A." in name or ".lora_B." in name]
    if lora:
        yield Finding(
            name="adapter",
            message=f"holds the weights of an adapter (LoRA): {lora[0]} and {len(lora) - 1} more",
            fix="merge it into its model (`merge_and_unload` of peft) and save again",
        )


def _index_total(checkpoint: Checkpoint) -> Iterator[Finding]:
    if not isinstance(checkpoint, HFCheckpoint) or checkpoint.total_size is None:
        return
    held = sum(slot.nbytes for file in checkpoint.files for slot in file.slots.values())
    if checkpoint.total_size != held:
        message = f"the index adds up to {repr(checkpoint.total_size)} bytes in all, the shards hold {held:,}"
        fix = "every tensor the index names is there and whole; a shard of another version may be among them"
        yield Finding(name="index_total", message=message, fix=fix, fault=False)


# ---- tensors --------------------------------------------------------------------------------------


def _prefix(evidence: CheckpointUnderTest) -> Iterator[Finding]:
    value = next((name for name in evidence.specs if f".{name}".endswith(f".{PROBE}")), None)
    if value is None or value == f"model.{PROBE}":
        return
    prefix = value.removesuffix(PROBE)
    origin = next(
        (message for part, message in PREFIXES.items() if part in prefix), "save the whole ..ForCausalLM"
    )
    message = f"names begin with {prefix!r}, not 'model.'" if prefix else "names lack the prefix 'model.'"
    yield Finding(name="prefix", message=f"{message} ({value})", fix=origin)


def _experts(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    """The silent classic: a dense MLP is built, and the experts of the file stay unread; and the reverse."""
    dense, moe = r"\.mlp\.(gate|up|down)_proj\.", r"\.mlp\.(experts\.|router\.|gate\.)"
    missing, left = evidence.comparison.missing, evidence.comparison.left_over
    over = sorted(_layers_of(missing, dense) & _layers_of(left, moe))
    under = sorted(_layers_of(missing, moe) & _layers_of(left, dense))
    own = evidence.config.architecture
    if over:
        names = _of_layers(over, missing, dense) | _of_layers(over, left, moe)
        right = (
            "GptOssForCausalLM" if any("gate_up_proj" in name for name in names) else "Qwen3MoeForCausalLM"
        )
        fix = f"config.json belongs to another model: its `architectures` should be [{right!r}]"
        if right == own:
            fix = f"take {_some(over)} out of `mlp_only_layers`, and set `decoder_sparse_step` to 1"
        message = (
            f"config.json ({own}) builds a dense MLP in layers {_some(over)}; the checkpoint holds experts "
            "there: they would stay unread, and the MLP random"
        )
        yield Finding(name="dense_mlp_over_experts", message=message, fix=fix), names
    if under:
        fix = "config.json belongs to another model: its `architectures` should name a dense one"
        dense_layers = {*under, *(i for i, moe in enumerate(evidence.config.moe_layers) if not moe)}
        if len(dense_layers) < evidence.config.num_layers:
            fix = f"set `mlp_only_layers` to {sorted(dense_layers)}"
        message = f"config.json ({own}) builds experts in layers {_some(under)}, where the checkpoint holds "
        names = _of_layers(under, missing, moe) | _of_layers(under, left, dense)
        yield Finding(name="experts_over_dense_mlp", message=message + "a dense MLP", fix=fix), names


def _number_of_experts(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    wrong = evidence.comparison.wrong_shape
    routers = [row for row in wrong if re.search(r"\.mlp\.(router|gate)\.weight$", row[0])]
    if not routers or routers[0][1][1:] != routers[0][2][1:]:
        return
    name, (wanted, _), (held, _) = routers[0]
    names = {n for n, w, f in wrong if re.search(r"\.mlp\.(experts|router|gate)\b", n) and w[1:] == f[1:]}
    every = (*evidence.comparison.missing, *evidence.comparison.left_over)
    names |= {n for n in every if re.search(r"\.mlp\.experts\.\d+\.", n)}
    key = "num_local_experts" if evidence.config.sinks else "num_experts"
    message = f"config.json has {wanted} experts, {name} routes to {held}"
    yield Finding(name="num_experts", message=message, fix=f"set `{key}` to {held}"), names


def _layers(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    held, wanted = _layers_of(evidence.specs, ""), evidence.config.num_layers
    absent = sorted(set(range(wanted)) - held)
    wrong = {*absent, *held} - (held & set(range(wanted)))
    if not wrong:
        return
    every = (*evidence.comparison.missing, *evidence.comparison.left_over)
    names = _of_layers(wrong, every, "")
    count = max(held, default=-1) + 1
    if held == set(range(count)) and count:
        fix = f"set `num_hidden_layers` to {count}, and cut or lengthen `layer_types`"
        if absent:
            fix = f"fetch the files with layers {_some(absent)}; if the model was cut on purpose, {fix}"
        message = f"config.json has {wanted} layers, the checkpoint {count}"
        yield Finding(name="num_hidden_layers", message=message, fix=fix), names
    else:
        holes = sorted(set(range(max(count, wanted))) - held)
        message = f"no tensor of layers {_some(holes)} is there; config.json has {wanted} layers"
        yield Finding(name="missing_layers", message=message, fix="fetch the checkpoint again"), names


def _head(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    tied, held = evidence.config.tie_word_embeddings, HEAD in evidence.specs
    if tied and held and EMBEDDING in evidence.specs and not _equal(evidence.checkpoint, HEAD, EMBEDDING):
        message = f"`tie_word_embeddings` is true, and {HEAD} is not {EMBEDDING}: it would stay unread"
        fix = "set `tie_word_embeddings` to false, if the head was trained; else remove the tensor"
        yield Finding(name="tied_head_differs", message=message, fix=fix), set()
    if not tied and not held:
        message = f"`tie_word_embeddings` is false or missing, and there is no {HEAD}"
        fix = (
            "set `tie_word_embeddings` to true where the model shares its embedding (Llama 3.2 1B and 3B, "
            "Qwen3 0.6B to 4B); else fetch the file that holds the head"
        )
        yield Finding(name="missing_head", message=message, fix=fix), {HEAD}


def _vocabulary(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    size, width = evidence.config.vocab_size, evidence.config.hidden_size
    rows = {name: shape[0] for name in (EMBEDDING, HEAD) if (shape := evidence.shape(name))}
    widths = {shape[1] for name in rows if (shape := evidence.shape(name)) and len(shape) == 2}
    if set(rows.values()) <= {size} or widths != {width}:
        return
    message = f"`vocab_size` is {size}; " + ", ".join(f"{name} has {n} rows" for name, n in rows.items())
    if len(set(rows.values())) == 1:
        fix = f"set `vocab_size` to {next(iter(rows.values()))}, padding rows included"
    else:
        fix = "embedding and head must have as many rows: save again after `resize_token_embeddings`"
    yield Finding(name="vocab_size", message=message, fix=fix), set(rows)


def _heads(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    c = evidence.config
    wrong = [row for row in evidence.comparison.wrong_shape if ".self_attn." in row[0]]
    layer = next((name.split(".self_attn.")[0] for name, _, _ in wrong), "")
    q, k = (evidence.shape(f"{layer}.self_attn.{x}_proj.weight") for x in "qk")
    if not wrong or q is None or k is None or len(q) != 2 or len(k) != 2 or q[1] != c.hidden_size:
        return
    norm = evidence.shape(f"{layer}.self_attn.q_norm.weight")
    head_dim = norm[0] if norm else q[0] // c.num_heads
    H, K = c.num_heads, c.num_kv_heads
    if q[0] == H * c.head_dim and k[0] == K * c.head_dim:
        return
    if head_dim and q[0] == H * head_dim and k[0] == K * head_dim:
        fix = f"set `head_dim` to {head_dim}"
    elif q[0] == H * c.head_dim and k[0] % c.head_dim == 0:
        fix = f"set `num_key_value_heads` to {k[0] // c.head_dim}"
    elif k[0] == K * c.head_dim and q[0] % c.head_dim == 0:
        fix = f"set `num_attention_heads` to {q[0] // c.head_dim}"
    else:
        fix = "compare num_attention_heads, num_key_value_heads and head_dim with the original config.json"
    message = (
        f"{H} heads of {c.head_dim} on {K} kv heads make q {H * c.head_dim} and k {K * c.head_dim} rows, "
    )
    message += f"the checkpoint has {q[0]} and {k[0]}"
    yield Finding(name="heads", message=message, fix=fix), {name for name, _, _ in wrong}


def _parts(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    for pattern, name, what, fix in PARTS:
        for names, message, flag in (
            (evidence.comparison.left_over, f"the checkpoint has {what}, config.json does not", "true"),
            (evidence.comparison.missing, f"config.json has {what}, the checkpoint does not", "false"),
        ):
            value = {n for n in names if re.search(pattern, n)}
            if value:
                example = f"{message} ({min(value)}, {len(value)} in all)"
                yield Finding(name=name, message=example, fix=fix.format(flag)), value


def _half_packed(evidence: CheckpointUnderTest) -> Iterator[Explained]:
    for one, other in (("_blocks", "_scales"), ("_scales", "_blocks")):
        lonely = [n for n in evidence.specs if n.endswith(one) and n[:-7] + other not in evidence.specs]
        if lonely:
            message = f"{lonely[0]} has no {other} next to it ({len(lonely)} in all)"
            finding = Finding(
                name=f"{one[1:]}_without{other}", message=message, fix="fetch the checkpoint again"
            )
            yield finding, {*lonely, *(n[:-7] + other for n in lonely)}


def _rest(comparison: Comparison) -> Iterator[Finding]:
    """What no check accounts for."""
    fix = "fetch the checkpoint and its config.json again: they are not of one model"
    for name, what, rest in (
        ("missing", "no such tensor is there", comparison.missing),
        ("left_over", "config.json has no place for", comparison.left_over),
    ):
        if rest:
            yield Finding(name=name, message=f"{what}: {_first(rest)}", fix=fix)
    shapes = [f"{n} is {held}, config.json wants {wanted}" for n, wanted, held in comparison.wrong_shape]
    if shapes:
        yield Finding(name="shape", message=_first(shapes, "; "), fix=fix)
    if comparison.wrong_dtype:
        name, wanted, held = comparison.wrong_dtype[0]
        message = f"{name} is {held}, where {wanted} belongs ({len(comparison.wrong_dtype)} in all)"
        yield Finding(name="dtype", message=message, fix="fetch the model in bfloat16, or as published")


def _layers_of(names: Iterable[str], pattern: str) -> set[int]:
    value = (re.match(r"model\.layers\.(\d{1,6})" + (pattern or r"\."), name) for name in names)
    return {int(match[1]) for match in value if match}


def _of_layers(layers: Iterable[int], names: Iterable[str], pattern: str) -> set[str]:
    wanted = set(layers)
    return {name for name in names if _layers_of([name], pattern) & wanted}


def _some(layers: list[int]) -> str:
    """0-3 for a run, else the first few."""
    if layers == list(range(layers[0], layers[-1] + 1)) and len(layers) > 2:
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers[:6])) + (" .." if len(layers) > 6 else "")


def _first(rows: list[str], separator: str = ", ", count: str = "in all") -> str:
    more = f"{separator}.. ({len(rows)} {count})" if len(rows) > SHOWN else ""
    return separator.join(rows[:SHOWN]) + more


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    a, b = checkpoint.get(one), checkpoint.get(other)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.shape == b.shape and all(
        torch.equal(x, y) for x, y in zip(a.split(4096), b.split(4096), strict=True)
    )


PIECE = 2**24  # bytes looked at together
EXPANSION = 8  # blocks take this much more room as float32
ABSURD = 1e5  # no trained weight is near; a flipped exponent bit is far beyond
NAN_SCALE = 255  # of E8M0
LARGEST_CODE = 6.0  # of E2M1
WHOLE = (torch.float64, torch.float32, torch.bfloat16)  # dtypes that know their extremes
# an untrained index weighs its heads alike; a frequency may be the first
MAY_BE_ZERO = ("bias", "dsa_w.weight", "dsa_frequencies")


def deep_findings(checkpoint: Checkpoint, on_bytes: Callable[[int], None] = lambda n: None) -> list[Finding]:
    """Reads every byte once; pages of a mapped file are given back as it goes. `on_bytes` hears of every
    piece.

    NaN and Inf, tensors that are zero throughout (MAY_BE_ZERO aside), values beyond 1e5, and of MXFP4 scales
    that mean NaN or for values beyond that.
    """
    faults: dict[str, list[str]] = {}
    for name in checkpoint.names():
        for kind, value in _look(name, _pieces(checkpoint, name, on_bytes)):
            faults.setdefault(kind, []).append(f"{name} ({value})" if value else name)
    mends = {
        "not_finite": "the file is damaged or the training was: fetch it again, or go back to an older step",
        "nan_scales": "MXFP4 scales of 255 mean NaN: the file is damaged, or was packed from NaN",
        "zero": "a tensor that was never written, or a part of the model that does nothing",
        "absurd": "a damaged file, a wrong dtype or byte order: fetch it again",
    }
    return [
        Finding(name=kind, message=_first(rows, count="tensors"), fix=mends[kind])
        for kind, rows in sorted(faults.items())
    ]


def _look(name: str, pieces: Iterator[Tensor]) -> Iterator[tuple[str, str]]:
    """-> (kind of fault, detail) of one tensor."""
    zero, bad, largest, scales = True, 0, 0.0, False
    for values in pieces:
        scales = values.dtype == torch.uint8 and name.endswith("_scales")
        if scales:
            size, faults = _of_scales(values)
        elif values.dtype.is_floating_point:
            size, faults = _of_floats(values)
        else:
            size, faults = float(values.any()), 0
        largest, bad = max(largest, size), bad + faults
        zero &= size == 0
    if bad:
        yield ("nan_scales", f"{bad:,} scales") if scales else ("not_finite", f"{bad:,} values")
    if largest > ABSURD:
        yield "absurd", f"up to {largest:.3g}"
    if zero and not bad and not name.endswith(MAY_BE_ZERO):
        yield "zero", ""


def _of_floats(values: Tensor) -> tuple[float, int]:
    """The largest finite magnitude, and how many values are not finite."""
    if not values.numel():
        return 0.0, 0
    values = values if values.dtype in WHOLE else values.float()
    low, high = map(float, values.aminmax())
    if -inf < low and high < inf:  # false of NaN, which aminmax hands on
        return max(-low, high), 0
    finite = values[values.isfinite()]
    return _of_floats(finite)[0], values.numel() - finite.numel()


def _of_scales(values: Tensor) -> tuple[float, int]:
    """The largest magnitude that E8M0 bytes allow in their blocks, and how many mean NaN."""
    numbers = values[values != NAN_SCALE]
    largest = LARGEST_CODE * 2.0 ** (int(numbers.amax()) - SCALE_BIAS) if numbers.numel() else 0.0
    return largest, values.numel() - numbers.numel()


def _pieces(checkpoint: Checkpoint, name: str, on_bytes: Callable[[int], None]) -> Iterator[Tensor]:
    """A tensor's values, some at a time; blocks unpacked. What has been seen leaves memory."""
    weight = checkpoint.get(name)
    stored = weight.data if isinstance(weight, Quant) else weight
    rows = stored.reshape(-1, stored.shape[-1]) if isinstance(weight, Quant) else stored.reshape(-1)
    row_bytes = rows[:1].nbytes * (EXPANSION if isinstance(weight, Quant) else 1)
    for piece in rows.split(max(PIECE // max(row_bytes, 1), 1)):
        yield Quant(piece, weight.format).dense() if isinstance(weight, Quant) else piece
        on_bytes(piece.nbytes)
        if isinstance(checkpoint, HFCheckpoint):
            checkpoint.release(name)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    folder: str
    config: ModelConfig
    parameters: int
    active_parameters: int  # that one token's forward reads; of the embedding, one row
    nbytes: int
    dtypes: dict[str, int]  # safetensors dtype -> bytes
    parts: dict[str, tuple[int, int]]  # part -> (parameters, bytes)
    kv_bytes_per_token: int  # float32, growing layers only
    comparison: Comparison

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "architecture": self.config.architecture,
            "layers": self.config.num_layers,
            "hidden_size": self.config.hidden_size,
            "heads": [self.config.num_heads, self.config.num_kv_heads, self.config.head_dim],
            "experts": [self.config.num_experts, self.config.experts_per_token],
            "vocab_size": self.config.vocab_size,
            "sliding_window": self.config.sliding_window,
            "max_position_embeddings": self.config.max_position_embeddings,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "bytes": self.nbytes,
            "bytes_by_dtype": self.dtypes,
            "parts": {k: {"parameters": p, "bytes": b} for k, (p, b) in self.parts.items()},
            "kv_bytes_per_token_float32": self.kv_bytes_per_token,
            "missing": self.comparison.missing,
            "left_over": self.comparison.left_over,
            "wrong_shape": [list(map(str, row)) for row in self.comparison.wrong_shape],
            "wrong_dtype": [list(row) for row in self.comparison.wrong_dtype],
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Gate A. `inspection` is None where the path cannot be opened or its config not parsed."""

    path: str
    inspection: Inspection | None
    findings: tuple[Finding, ...]
    deep: bool = False

    @property
    def passed(self) -> bool:
        return not any(finding.fault for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        values = {"folder": self.path} if self.inspection is None else self.inspection.as_json()
        findings = [asdict(finding) for finding in self.findings]
        return values | {"passed": self.passed, "deep": self.deep, "findings": findings}


def validate_checkpoint(
    path: Path | str, *, deep: bool = False, on_bytes: Callable[[int, int], None] = lambda n, total: None
) -> Report:
    """What is in a checkpoint and what is wrong with it, from headers alone; `deep` reads every value, and
    tells `on_bytes` how many bytes it has just read and how many there are. Raises nothing that a checkpoint
    can cause."""
    try:
        checkpoint = open_checkpoint(path)
    except LoadError as error:
        return Report(
            path=str(path), inspection=None, findings=(Finding(name=error.kind, message=str(error)),)
        )
    findings, result = config_findings(checkpoint), None
    try:
        result = inspect_target(checkpoint)
    except ValueError as error:
        findings.append(_unparsed(error, checkpoint.config))
    if result is not None:
        specs = {name: (shape, dtype) for name, shape, dtype in checkpoint.specs()}
        findings += tensor_findings(CheckpointUnderTest(checkpoint, result.config, result.comparison, specs))
    if deep:
        total = sum(b for _, b in count(checkpoint.specs())[0].values())
        findings += deep_findings(checkpoint, lambda n: on_bytes(n, total))
    return Report(path=str(path), inspection=result, findings=tuple(findings), deep=deep)


def _unparsed(error: ValueError, hf: dict[str, Any]) -> Finding:
    """The finding of a config that no parser takes."""
    if not isinstance(error, LoadError):
        return Finding(name="config", message=str(error), fix="fetch the config.json of this model")
    text = "GPT-OSS, Llama, Qwen3 and Qwen3-MoE are read"
    if any(word in str(hf.get("architectures")).lower() for word in ("draft", "eagle")):
        text = "this is a draft, not a target: name it with --draft"
    return Finding(name="architecture", message=str(error), fix=text)


def inspect_target(source: Checkpoint | Path | str) -> Inspection:
    """Reads headers only. Raises LoadError where there is no checkpoint to read, ValueError where its config
    cannot be parsed."""
    checkpoint = open_checkpoint(source) if isinstance(source, Path | str) else source
    config = parse_config(checkpoint.config)
    parts, dtypes = count(checkpoint.specs())
    total = sum(p for p, _ in parts.values())
    experts = parts.get("experts", (0, 0))[0]
    used = config.experts_per_token / config.num_experts if config.num_experts else 1.0
    idle = experts * (1 - used)
    embedding = config.vocab_size * config.hidden_size
    unread = 0 if config.tie_word_embeddings else embedding - config.hidden_size
    growing = sum(config.kv_numbers(i) + config.index_numbers(i) for i in config.full_layers)
    return Inspection(
        folder=str(checkpoint.folder),
        config=config,
        parameters=total,
        active_parameters=round(total - idle - unread),
        nbytes=sum(b for _, b in parts.values()),
        dtypes=dtypes,
        parts=parts,
        kv_bytes_per_token=growing * 4,
        comparison=compare(checkpoint, config),
    )
