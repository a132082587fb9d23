"""The baselines: transformers' greedy generation, and its own DFlash, on the same weights in float32."""

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.bench.run import Method, Prompts, Timed
from outpace.decode.trace import Trace
from outpace.drafts.dflash import DFlash, parts_of
from outpace.formats.load import weight_map
from outpace.formats.spec import dflash_shapes
from outpace.models.config import FULL, rope_to_hf
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors
from outpace.models.save import save_target
from outpace.ops.quant import Quant

EXPERTS = ("batched_mm", "grouped_mm", "eager")
ATTENTION = ("sdpa", "eager")


def installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


class BaselineTimer:
    """Looks like a transformers streamer: the prompt first, then the tokens of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.widths: list[int] = []
        self.began = 0.0

    def put(self, value: Tensor) -> None:
        if not self.began:  # the prompt
            self.began = time.perf_counter()
            return
        self.times.append(time.perf_counter())
        self.widths.append(value.shape[-1] if value.dim() == 2 else 1)

    def end(self) -> None: ...


@dataclass(frozen=True)
class Baseline:
    """`target` a transformers model; `draft` its MuseGlimmerAssistantModel, or None. `remarks`: the
    implementations used."""

    target: Any
    draft: Any
    remarks: list[str]
    chosen: dict[tuple[str, int], tuple[str, str]]  # method, batch -> attention, experts implementation

    def methods(self) -> dict[str, Method]:
        drafts = {"transformers": None} | ({"transformers-dflash": self.draft} if self.draft else {})
        return {name: partial(self._generate, name, draft) for name, draft in drafts.items()}

    @torch.inference_mode()
    def _generate(self, method: str, draft: Any, prompts: Prompts, new_tokens: int, seed: int = 0) -> Timed:
        """A draft takes one prompt. Its last step is left out of the trace where the end of the text cut it:
        what would have been accepted beyond the end is not known."""
        self._set(self.chosen[method, len(prompts)])
        ids = torch.tensor([list(p) for p in prompts], device=self.target.device)
        how = {} if draft is None else {"assistant_model": draft, "speculation_type": "dflash"}
        clock, trace = BaselineTimer(), Trace()
        began = time.perf_counter()
        with _timing(self.target, clock, trace, "verify"), _timing(draft, clock, trace, "draft"):
            out = self.target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                streamer=clock,
                **how,
            )
        ended = time.perf_counter()
        first, decode = clock.times[0] - began, ended - clock.times[0]
        offered = 0 if draft is None else draft.config.block_size - 1
        done, B = clock.widths[0], len(prompts)
        for width in clock.widths[1:]:
            if new_tokens - done > offered:
                trace.add(B, list(range(B)), [offered] * B, [width - 1] * B)
            done += width
        trace.seconds["prefill"] = first
        trace.seconds["rest"] = decode - trace.seconds["draft"] - trace.seconds["verify"]
        tokens = out[:, ids.shape[1] :].tolist()
        return Timed(tokens=tokens, first_s=first, decode_s=decode, trace=trace)

    def _set(self, how: tuple[str, str]) -> None:
        attention, experts = how
        if attention:
            self.target.set_attn_implementation(attention)
        if experts:
            self.target.set_experts_implementation(experts)

    def choose(self, method: str, batch: int) -> None:
        """Time every combination this model takes in this use, keep the fastest, and say so."""
        attentions = ATTENTION if getattr(self.target, "_supports_sdpa", False) else ("eager",)
        experts = EXPERTS if _has_experts(self.target) else ("",)
        vocab = self.target.config.vocab_size
        prompts = [[(7 * i + b) % vocab for i in range(48)] for b in range(batch)]
        run = self.methods()[method]
        items: list[tuple[float, tuple[str, str]]] = []
        for how in product(attentions, experts):
            self.chosen[method, batch] = how
            try:
                run(prompts, 3, 0)
                items.append((min(run(prompts, 9, 0).decode_s for _ in range(2)), how))
            except (RuntimeError, ValueError, NotImplementedError, ImportError):
                continue  # not for this model, or not on this device
        if not items:
            raise ValueError(f"{method} runs with none of {attentions} x {experts} on this machine")
        attention, expert = self.chosen[method, batch] = min(items)[1]
        tried = ", ".join(" + ".join(part for part in how if part) for _, how in items)
        self.remarks.append(
            f"{method}, batch {batch}: {attention} attention"
            + (f", {expert} experts" if expert else "")
            + f" (the fastest of: {tried})"
        )


@contextmanager
def _timing(model: nn.Module | None, clock: BaselineTimer, trace: Trace, part: str) -> Iterator[None]:
    """Add up the time inside `model` after the first token."""
    if model is None:
        yield
        return
    starts: list[float] = []

    def before(*_: object) -> None:
        starts.append(time.perf_counter())

    def after(*_: object) -> None:
        if clock.times:
            trace.seconds[part] += time.perf_counter() - starts[-1]

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def open_baseline(target: Decoder, draft: DFlash | None, batches: tuple[int, ...]) -> Baseline:
    """Export the target in float32, load it with transformers, and choose its fastest implementations at
    each batch size. Raises ImportError where transformers is not installed."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_target(target, Path(folder), unpack=True, dtype=torch.float32, eos_token_id=None)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(target.device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    theirs, why = _convert(draft, target.device)
    baseline = Baseline(model, theirs, [why] if why else [], {})
    for batch in batches:
        baseline.choose("transformers", batch)
    if theirs is not None and 1 in batches:
        baseline.choose("transformers-dflash", 1)
    return baseline


def _has_experts(model: Any) -> bool:
    return any(getattr(model.config, key, 0) for key in ("num_local_experts", "num_experts"))


def _convert(draft: DFlash | None, device: torch.device) -> tuple[Any, str]:
    """Our draft as transformers' own DFlash class, or None and the reason."""
    if draft is None:
        return None, ""
    for what, has in (
        ("attention biases", draft.config.attention_bias),
        ("learned mask embedding", draft.config.mask_token_id is None),
        ("causal windows", draft.config.causal),
        ("causal full layers", draft.config.causal_full),
        (parts_of(draft.config), parts_of(draft.config) != "none"),
        ("packed weights", any(isinstance(part, Quant) for part in draft.modules())),
    ):
        if has:
            return None, f"transformers-dflash left out: its class knows no {what}, which this draft has"
    if importlib.util.find_spec("transformers.models.muse_glimmer_assistant") is None:
        return None, "transformers-dflash left out: this transformers has no DFlash (it came with 5.23)"
    theirs: Any = importlib.import_module("transformers")
    c = draft.config
    config = theirs.MuseGlimmerAssistantConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=rope_to_hf(c.rope)["rope_parameters"],
        max_position_embeddings=c.max_position_embeddings,
        layer_types=list(c.layer_types) or [FULL] * c.num_layers,
        # it counts how far back a query sees, ours how much it sees, itself included
        sliding_window=c.sliding_window - 1 if c.sliding_window else c.max_position_embeddings,
        block_size=c.block_size,
        mask_token_id=c.mask_token_id,
        target_layer_ids=list(c.target_layer_ids),
    )
    model = theirs.MuseGlimmerAssistantModel(config)
    model.load_state_dict(_renamed(draft), strict=True)
    return model.to(device, torch.float32).eval(), ""


def _renamed(draft: DFlash) -> dict[str, Tensor]:
    """z-lab's names with the two that differ there."""
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    tensors = dict(named_tensors(draft))
    values = {}
    for entry in weight_map(dflash_shapes(draft.config)):
        for name, part in zip(entry.names, entry.split(tensors[entry.param].detach().float()), strict=True):
            values[names.get(name, name)] = part.clone()
    return values
