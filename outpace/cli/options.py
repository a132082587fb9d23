"""Options that generate and chat share: draft, speculation, partial KV, sampling."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outpace.cli.app import (
    Branch,
    Depth,
    DraftTemperature,
    DraftWeights,
    MinP,
    OwnDraft,
    Rule,
    Seed,
    Temperature,
    TopK,
    TopP,
    TreeColumns,
)
from outpace.cli.calibrate import CacheDir, Method, Verify, controller_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outpace.decode.controller import Controller
    from outpace.decode.partial import Partial
    from outpace.decode.request import Request
    from outpace.drafts.base import Draft
    from outpace.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Every field is an option of the commands that `with_options` wraps."""

    draft: OwnDraft = None
    draft_weights: DraftWeights = None
    tree: TreeColumns = 0
    depth: Depth = 0
    branch: Branch = 0
    method: Method = "auto"
    verify: Verify = None
    cache_dir: CacheDir = None
    kv_budget: Annotated[
        int,
        typer.Option(
            help="KV budget (tokens per full-attention layer) for approximate verification; results are "
            "re-verified with the full cache. Lossless, for long contexts, e.g. 4096 (0 = off).",
        ),
    ] = 0
    kv_budget_set: Annotated[
        list[str] | None,
        typer.Option(
            help="Field of partial KV, repeatable: --kv-budget-set selector=recent.",
        ),
    ] = None
    kv_budget_lossy: Annotated[
        bool,
        typer.Option(
            "--kv-budget-lossy",
            help="LOSSY: no verification with the full cache. The output differs from the model's.",
        ),
    ] = False
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Penalty on tokens of the prompt and the output (1 = off, above 1: rarer)."),
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="Penalty on tokens that the output contains, -2 to 2 (0 = off).")
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Penalty on tokens for each time that the output contains them, -2 to 2 (0 = off)."
        ),
    ] = 0.0
    rule: Rule = "match"
    draft_temperature: DraftTemperature = None
    seed: Seed = 0

    def request(self, max_new_tokens: int, **more: Any) -> "Request":
        """Raises ValueError for values out of range."""
        from outpace.decode.request import Request
        from outpace.ops.sampling import Sampling

        names = [f.name for f in fields(Sampling)]
        sampling = Sampling(**{name: getattr(self, name) for name in names})
        return Request(
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            rule=self.rule,
            draft_temperature=self.draft_temperature,
            **more,
        )

    def open(self, name: str, layers: int | None) -> "tuple[Decoder, Tokenizer, Draft | None]":
        """The model, and its draft: without --draft the best one known for the whole target."""
        from outpace.loading import open_draft, open_target, own_draft

        target, tokenizer = open_target(name, layers)
        shape = {"tree": self.tree, "depth": self.depth, "branch": self.branch}
        chosen = self.draft or (own_draft(name) if layers is None else "none")
        return target, tokenizer, open_draft(chosen, target, tokenizer, **shape, quantize=self.draft_weights)

    def partial(self) -> "Partial | None":
        return partial_of(self.kv_budget, self.kv_budget_set, self.kv_budget_lossy)

    def speculation(
        self, target: "Decoder", draft: "Draft | None", tokenizer: "Tokenizer", rule: str
    ) -> "tuple[Draft | None, Controller | None, str]":
        """The draft to use, the controller of its length, and a note for people. With partial KV there is no
        controller: it knows full passes alone. Raises ValueError for options that contradict each other."""
        from outpace.drafts.lookup import NullDraft

        near = self.partial()
        if near is None:
            return controller_for(target, draft, tokenizer, rule, self.method, self.verify, self.cache_dir)
        return draft or NullDraft(), None, partial_note(near, draft is not None, self.method, self.verify)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes `options: GenerationOptions` -> one with each of its fields as an option."""
    signature, hints = inspect.signature(command), get_type_hints(GenerationOptions, include_extras=True)
    shared = [
        inspect.Parameter(
            f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=f.default, annotation=hints[f.name]
        )
        for f in fields(GenerationOptions)
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        chosen = {f.name: values.pop(f.name) for f in fields(GenerationOptions)}
        command(**values, options=GenerationOptions(**chosen))

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += shared if name == "options" else [parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def partial_of(tokens: int, pairs: list[str] | None, lossy: bool) -> "Partial | None":
    """Raises ValueError for fields and sizes that cannot be, and for what is reported without --kv-budget."""
    from outpace.config import load_settings, parse_overrides
    from outpace.decode.partial import Partial
    from outpace.kv.partial import PartialConfig

    if not tokens:
        if pairs or lossy:
            raise ValueError("--kv-budget-set and --kv-budget-lossy go with --kv-budget TOKENS")
        return None
    overrides = parse_overrides(PartialConfig, pairs or [])
    if "n_retrieval_blocks" in overrides:
        raise ValueError("--kv-budget-set n_retrieval_blocks: --kv-budget sets the number of tokens")
    fields = load_settings(PartialConfig, None, overrides, "--kv-budget-set")
    config = PartialConfig.within(tokens, **{name: getattr(fields, name) for name in overrides})
    return Partial(config=config, mode="lossy" if lossy else "lossless")


def partial_note(partial: "Partial", draft: bool, method: str, verify: int | None) -> str:
    """What people are told of it. Raises ValueError where it does not go with the rest."""
    if method == "off":
        raise ValueError("--speculate off has no draft tokens to verify: with --kv-budget, leave it out")
    if verify is not None:
        raise ValueError(
            f"--num-speculative-tokens {verify} is for full verification; with --kv-budget, leave it out"
        )
    kept = f"{partial.config.static_size:,} tokens of KV a layer, then the full pass"
    whose = "draft tokens verified" if draft else "the target drafts for itself"
    return f"{whose} on {kept}" + ("; LOSSY" if partial.mode == "lossy" else "")
