"""A method of a comparison: which draft, in what shape it proposes, how its draft tokens are verified."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outpace.bench.run import Method, Prompts, Timed, timed
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
from outpace.loading import DFLASH, SUFFIX, draft_folder, open_draft
from outpace.models.decoder import Decoder
from outpace.ops.sampling import Sampling

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """How one row of a comparison decodes. A table of a suite's recipe.

    `draft`: a place under the suite's folder of drafts, "dflash", "suffix" or "ngram". `tree`, `depth`,
    `branch`: the shape of its proposals, as `load.open_draft` takes them; 0: a chain, and as usual.
    `weights`: "q8_0" packs its matrices in 8-bit blocks; None: as in its files. `rules`: how draft tokens are
    verified above temperature 0, where it makes a difference. `controller`: with it, without it, or both.
    `partial`: with partial KV, its `tokens`, perhaps its `mode`, and fields of cache.partial.PartialConfig.
    """

    draft: str
    tree: int = 0
    depth: int = 0
    branch: int = 0
    weights: str | None = None
    rules: tuple[str, ...] = ("match", "rejection", "gumbel")
    controller: tuple[bool, ...] = (False, True)
    partial: dict[str, Any] = field(default_factory=dict)

    @property
    def near(self) -> Partial | None:
        """Raises ValueError for sizes that cannot be."""
        if not self.partial:
            return None
        values = dict(self.partial)
        tokens, mode = values.pop("tokens", None), values.pop("mode", "lossless")
        if not isinstance(tokens, int) or "n_retrieval_blocks" in values:
            raise ValueError("a method's partial: `tokens` is the number of tokens kept per layer in all")
        load_settings(PartialConfig, None, values, "a method's partial")  # refuses what it does not know
        return Partial(config=PartialConfig.within(tokens, **values), mode=mode)

    def __post_init__(self) -> None:
        if self.near is not None and True in self.controller:
            raise ValueError("a method's partial: controllers know full passes alone; controller = [false]")
        unknown = [rule for rule in self.rules if rule not in RULES]
        if unknown or not self.rules:
            message = f"no rule {unknown[0]!r}" if unknown else "at least one rule"
            raise ValueError(f"a method's rules: {message}; known: {', '.join(RULES)}")
        if not self.controller or len(set(self.controller)) < len(self.controller):
            raise ValueError("a method's controller: true, false, or both, each once")
        if min(self.tree, self.branch, self.depth) < 0:
            raise ValueError("a method's tree, depth and branch: counts, or 0 for the draft's own")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A method's draft, ready to propose. `kind` and `bytes` for the report; `trained`: what its provenance
    states, empty for what was not trained."""

    name: str
    spec: MethodSpec
    draft: Draft
    kind: str
    trained: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of a table: a method at a temperature, under a rule, perhaps verifying at most `width`
    positions of what is drafted, perhaps with the controller. `method` "plain" has none of the last two."""

    method: str
    temperature: float
    rule: str = "match"
    width: int = 0
    steered: bool = False

    @property
    def request(self) -> Request:
        """But for how long: no stop tokens, so that all emit equally many."""
        return Request(max_new_tokens=1, sampling=Sampling(temperature=self.temperature), rule=self.rule)

    @property
    def label(self) -> str:
        items = [self.method, f"T={self.temperature:g}", self.rule]
        items += [f"width {self.width}"] if self.width else []
        return ", ".join([*items, "controller"] if self.steered else items)


def open_method(
    name: str, spec: MethodSpec, drafts: Path, target: Decoder, tokenizer: Tokenizer, fingerprint: str
) -> Opened:
    """Raises ValueError, naming the method, for a draft that is not there, that was trained for another
    target, or that cannot propose in this shape."""
    try:
        return _open(name, spec, drafts, target, tokenizer, fingerprint)
    except ValueError as error:
        raise ValueError(f"method {name!r}: {error}") from error


def _open(
    name: str, spec: MethodSpec, drafts: Path, target: Decoder, tokenizer: Tokenizer, fingerprint: str
) -> Opened:
    local = drafts / spec.draft  # a folder of that name comes before an embedded draft
    embedded = spec.draft in (DFLASH, SUFFIX, "ngram") and not local.exists()
    place = spec.draft if embedded else str(local)
    trained = {} if place == "ngram" else provenance_of(draft_folder(place), fingerprint)
    shape = {"tree": spec.tree, "depth": spec.depth, "branch": spec.branch}
    draft = open_draft(place, target, tokenizer, **shape, quantize=spec.weights)
    assert draft is not None, "a name that means no draft is no folder"
    return Opened(name=name, spec=spec, draft=draft, kind=kind_of(draft), trained=trained)


def kind_of(draft: BoundDFlash | BoundEagle3 | DDTree | NGram | Suffix) -> str:
    match draft:
        case NGram():
            return "n-gram"
        case Suffix():
            return "suffix"
        case BoundEagle3():
            return "P-EAGLE" if draft.draft.config.parallel else "EAGLE-3"
        case DDTree(draft=BoundDFlash() as bound) | (BoundDFlash() as bound):
            return f"DFlash, {parts_of(bound.draft.config)}".removesuffix(", none")
    raise AssertionError(f"no kind of draft that open_draft gives: {draft}")


def provenance_of(folder: Path, fingerprint: str) -> dict[str, Any]:
    """What provenance.json next to the weights holds; {} where there is none. Raises ValueError where it
    names another target."""
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


def run_case(
    case: Case,
    target: Decoder,
    draft: Draft | None,
    costs: Costs | None = None,
    partial: Partial | None = None,
) -> Method:
    """`draft`: None for autoregressive decoding; `costs`: of a steered case. One controller serves all
    runs, and remembers.

    Raises ValueError for a width that the draft does not have.
    """
    if draft is not None and case.width and not 1 <= case.width <= draft.block_size:
        raise ValueError(f"width {case.width}: {case.method} proposes at most {draft.block_size} positions")
    controller: Controller | None = Fixed(case.width) if case.width else None
    if case.steered:
        assert costs is not None, "a controller reads a cost table"
        controller = Adaptive(costs)

    def run(prompts: Prompts, new_tokens: int, seed: int) -> Timed:
        request = replace(case.request, max_new_tokens=new_tokens)
        rng = torch.Generator(target.device).manual_seed(seed)
        return timed(
            lambda note: generate(
                target,
                prompts,
                request,
                draft,
                controller=controller,
                partial=partial,
                rng=rng,
                on_tokens=note,
            )
        )

    return run
