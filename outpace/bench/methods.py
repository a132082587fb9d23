"""Methods of a comparison: a draft, the shape of its proposals, and how they are verified."""

import dataclasses
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from outpace.bench.machine import parameters
from outpace.bench.run import Method, Prompts, Timed, timed
from outpace.checkpoint.shipped import DRAFTS, draft_path
from outpace.config import load_settings
from outpace.decode.acceptance import RULES
from outpace.decode.controller import Adaptive, Controller, Fixed
from outpace.decode.costs import Costs
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.drafts.base import Draft
from outpace.drafts.dflash import BoundDFlash, parts_of
from outpace.drafts.eagle3_decode import BoundEagle3
from outpace.drafts.lookup import NGram, Suffix
from outpace.drafts.tree import DDTree
from outpace.kv.partial import PartialConfig
from outpace.loading import open_draft
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors
from outpace.ops.sampling import Sampling

# a report's key -> the key in a draft's provenance.json, where a draft that it began from has its own
PROVENANCE = {"tokens": "training_tokens", "hours": "training_hours", "steps": "steps"}


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """A method of a suite's recipe: a table [methods.NAME].

    `draft`: a folder under the suite's --drafts, or "dflash", "eagle3" or "ngram". `num_draft_tokens`,
    `num_steps`, `topk`: the shape of its proposals, as in `loading.py: open_draft`; 0: a chain of the usual
    length. `weights`: "q8_0" quantises its matrices to 8 bits; None: as stored. `rules`: acceptance rules
    above temperature 0. `controller`: without it, with it, or both. `partial`: partial KV with `tokens` per
    layer, optionally `mode` and fields of `kv/partial.py: PartialConfig`."""

    draft: str
    num_draft_tokens: int = 0
    num_steps: int = 0
    topk: int = 0
    weights: str | None = None
    rules: tuple[str, ...] = ("match", "rejection", "gumbel")
    controller: tuple[bool, ...] = (False, True)
    partial: dict[str, Any] = field(default_factory=dict)

    @property
    def partial_kv(self) -> Partial | None:
        """Raises ValueError for impossible sizes."""
        if not self.partial:
            return None
        values = dict(self.partial)
        tokens, mode = values.pop("tokens", None), values.pop("mode", "lossless")
        if not isinstance(tokens, int) or "n_retrieval_blocks" in values:
            raise ValueError("a method's partial: `tokens` is the number of tokens kept per layer in all")
        load_settings(PartialConfig, None, values, "a method's partial")  # refuses unknown keys
        return Partial(config=PartialConfig.within(tokens, **values), mode=mode)

    def __post_init__(self) -> None:
        if self.partial_kv is not None and True in self.controller:
            raise ValueError("a method's partial: controllers know full passes alone; controller = [false]")
        unknown = [rule for rule in self.rules if rule not in RULES]
        if unknown or not self.rules:
            message = f"no rule {unknown[0]!r}" if unknown else "at least one rule"
            raise ValueError(f"a method's rules: {message}; known: {', '.join(RULES)}")
        if not self.controller or len(set(self.controller)) < len(self.controller):
            raise ValueError("a method's controller: true, false, or both, each once")
        if min(self.num_draft_tokens, self.num_steps, self.topk) < 0:
            raise ValueError(
                "a method's num_draft_tokens, num_steps and topk: counts, or 0 for the draft's own"
            )


@dataclass(frozen=True, kw_only=True)
class LoadedMethod:
    """A method with its draft loaded. `provenance`: of the draft's training, empty where there was none."""

    name: str
    spec: MethodSpec
    draft: Draft
    kind: str
    provenance: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """For the report: the draft's kind, its weights, and the data of its training."""
        modules = [m for m in _fields(self.draft) if isinstance(m, nn.Module) and not isinstance(m, Decoder)]
        nbytes = sum(t.nbytes for m in modules for _, t in named_tensors(m))
        if isinstance(self.draft, Suffix):
            nbytes += self.draft.answers.text.nbytes + self.draft.answers.order.nbytes
        return {
            "kind": self.kind,
            "draft": self.spec.draft,
            "weights": self.spec.weights,
            "num_draft_tokens": self.spec.num_draft_tokens,
            **({"partial": self.spec.partial} if self.spec.partial else {}),
            "columns": self.draft.block_size,
            "parameters": sum(map(parameters, modules)),
            "bytes": nbytes,
            "trained": _trained(self.provenance) if self.provenance else None,
        }


def _trained(provenance: dict[str, Any]) -> dict[str, Any]:
    """Sums over all trainings that a draft began from, and the last one's teacher cache."""
    stages, stage = list[dict[str, Any]](), provenance
    while stage:
        stages.append(stage)
        stage = stage.get("started_from") or {}
    known = {name: [stage[key] for stage in stages if key in stage] for name, key in PROVENANCE.items()}
    sums = {name: round(sum(values), 3) if values else None for name, values in known.items()}
    return sums | {"cache_sha256": provenance.get("cache_sha256")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table: a method at a temperature under a rule, with drafts cut to `width` positions (0:
    the draft's own length), or `steered` by the controller. The method "plain" is autoregressive
    decoding."""

    method: str
    temperature: float
    rule: str = "match"
    width: int = 0
    steered: bool = False

    @property
    def request(self) -> Request:
        """Without stop tokens, so that every method emits equally many; its length is set per run."""
        return Request(max_new_tokens=1, sampling=Sampling(temperature=self.temperature), rule=self.rule)

    @property
    def label(self) -> str:
        parts = [self.method, f"T={self.temperature:g}", self.rule]
        parts += [f"width {self.width}"] * bool(self.width) + ["controller"] * self.steered
        return ", ".join(parts)


def load_method(
    name: str, spec: MethodSpec, drafts: Path, target: Decoder, tokenizer: Tokenizer, fingerprint: str
) -> LoadedMethod:
    """Raises ValueError, naming the method, for a draft that does not exist, that was trained for another
    target, or that cannot propose in this shape."""
    folder = drafts / spec.draft  # takes precedence over an embedded draft of that name
    embedded = spec.draft in (*DRAFTS, "ngram") and not folder.exists()
    path = spec.draft if embedded else str(folder)
    try:
        provenance = {} if path == "ngram" else _provenance(draft_path(path), fingerprint)
        shape = {name: getattr(spec, name) for name in ("num_draft_tokens", "num_steps", "topk")}
        draft = open_draft(path, target, tokenizer, **shape, quantize=spec.weights)
    except ValueError as error:
        raise ValueError(f"method {name!r}: {error}") from error
    assert draft is not None, "a name that means no draft is no folder"
    return LoadedMethod(name=name, spec=spec, draft=draft, kind=_kind(draft), provenance=provenance)


def _kind(draft: BoundDFlash | BoundEagle3 | DDTree | NGram | Suffix) -> str:
    match draft:
        case NGram():
            return "n-gram"
        case Suffix():
            return "suffix"
        case BoundEagle3():
            return "P-EAGLE" if draft.draft.config.parallel else "EAGLE-3"
        case DDTree(draft=BoundDFlash() as bound) | (BoundDFlash() as bound):
            return f"DFlash, {parts_of(bound.draft.config)}".removesuffix(", none")
    raise AssertionError(f"open_draft returned an unknown kind: {draft}")


def _provenance(folder: Path, fingerprint: str) -> dict[str, Any]:
    """provenance.json next to the weights; {} where there is none. Raises ValueError for another target's."""
    path = (folder if folder.is_dir() else folder.parent) / "provenance.json"
    if not path.is_file():
        return {}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    theirs = values.get("target_fingerprint")
    if theirs != fingerprint:
        raise ValueError(
            f"{folder} was trained for another target ({str(theirs)[:12]}, this one is {fingerprint[:12]}): "
            "train it from a cache of this target"
        )
    return values


def _fields(draft: Any) -> list[Any]:
    """The fields of a bound draft and of the dataclasses it wraps."""
    fields = []
    for value in vars(draft).values():
        fields += [value, *(_fields(value) if dataclasses.is_dataclass(value) else [])]
    return fields


def run_case(
    case: Case,
    target: Decoder,
    draft: Draft | None,
    costs: Costs | None = None,
    partial: Partial | None = None,
) -> Method:
    """`draft`: None for autoregressive decoding; `costs`: the cost table of a steered case, where one
    controller serves all runs and keeps its state. Raises ValueError for a width beyond the draft's block
    size."""
    if draft is not None and case.width and not 1 <= case.width <= draft.block_size:
        raise ValueError(f"width {case.width}: {case.method} proposes at most {draft.block_size} positions")
    controller: Controller | None = Fixed(case.width) if case.width else None
    if case.steered:
        assert costs is not None, "a controller reads a cost table"
        controller = Adaptive(costs)

    def run(prompts: Prompts, new_tokens: int, seed: int) -> Timed:
        request = replace(case.request, max_new_tokens=new_tokens)
        rng = torch.Generator(target.device).manual_seed(seed)
        options: dict[str, Any] = {"controller": controller, "partial": partial, "rng": rng}
        return timed(
            lambda on_tokens: generate(target, prompts, request, draft, on_tokens=on_tokens, **options)
        )

    return run
