"""Options that commands share: one dataclass for the draft, one for generation."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from outpace.api import Model, SamplingParams
    from outpace.decode.controller import Controller
    from outpace.decode.partial import Partial
    from outpace.drafts.base import Draft

SPECULATE = ("auto", "off", "always")

DraftQuant = Annotated[
    str | None,
    typer.Option(
        help="Number format of the draft's matrices: q8_0 (8-bit blocks). Default: as stored. The output "
        "stays the same.",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Number of tokens to generate at most.")]


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The draft of a target. Every field is an option of the commands that `with_options` wraps."""

    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft: a path in any known format, 'dflash', 'eagle3', 'ngram' or 'none'. Left out, the "
            "best one known for the target: dflash for the default one, none for others."
        ),
    ] = None
    draft_quant: DraftQuant = None
    num_draft_tokens: Annotated[
        int, typer.Option(help="Nodes of the draft tree per step, root included (0 = a chain).")
    ] = 0
    num_steps: Annotated[
        int, typer.Option(help="Depth of an EAGLE-3's proposal, in tokens (0 = its usual one).")
    ] = 0
    topk: Annotated[int, typer.Option(help="Children per node of a draft tree (0 = the usual number).")] = 0
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of cost tables. Default: outpace in the user's cache folder."),
    ] = None

    threads: Annotated[
        int | None,
        typer.Option(min=1, max=128, help="Number of CPU threads. Default: OMP_NUM_THREADS, else torch's."),
    ] = None

    def __post_init__(self) -> None:
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)

    def load_draft(self, model: "Model") -> "Draft | None":
        from outpace.api import load_draft

        shape = {name: getattr(self, name) for name in ("num_draft_tokens", "num_steps", "topk")}
        return load_draft(self.draft, model, **shape, quantize=self.draft_quant)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(DraftOptions):
    """Draft, speculation, partial KV and sampling."""

    speculate: Annotated[
        str,
        typer.Option(
            help="Speculation: auto (the fastest draft length on this machine, or autoregressive), always "
            "(the draft's full length) or off (autoregressive).",
        ),
    ] = "auto"
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(help="Draft tokens per step, fixed. Default: chosen by the controller."),
    ] = None
    kv_budget: Annotated[
        int,
        typer.Option(
            help="KV budget (tokens per full-attention layer) for approximate verification; results are "
            "re-verified with the full cache. Lossless, for long contexts, e.g. 4096 (0 = off).",
        ),
    ] = 0
    kv_budget_set: Annotated[
        list[str] | None,
        typer.Option(help="Field of partial KV, repeatable: --kv-budget-set selector=recent."),
    ] = None
    kv_budget_lossy: Annotated[
        bool,
        typer.Option(
            "--kv-budget-lossy",
            help="LOSSY: no verification with the full cache. The output differs from the model's.",
        ),
    ] = False
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="Sampling temperature (0 = greedy).")
    ] = 0.0
    top_k: Annotated[int, typer.Option(help="Top-k sampling: number of tokens kept (0 = all).")] = 0
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: probability mass kept (1 = all).")] = 1.0
    min_p: Annotated[
        float,
        typer.Option(help="Minimum probability of a token, relative to the most likely one (0 = off)."),
    ] = 0.0
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
    acceptance: Annotated[
        str,
        typer.Option(
            help="Acceptance rule above temperature 0: match, rejection, block or gumbel. All keep the "
            "target's distribution; with match and gumbel a seed gives one text, with any draft. Trees that "
            "are not sampled are matched under rejection and block, too.",
        ),
    ] = "match"
    draft_temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of the draft's own sampling (not with match). Default: the target's."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0

    def sampling(self, max_tokens: int, **more: Any) -> "SamplingParams":
        """Raises ValueError for values out of range."""
        from outpace.api import SamplingParams

        shared = {f.name for f in fields(self)} & {f.name for f in fields(SamplingParams)}
        given = {name: getattr(self, name) for name in shared}
        return SamplingParams(max_tokens=max_tokens, **given, **more)

    def partial(self) -> "Partial | None":
        """Raises ValueError for unknown fields and impossible sizes, and for options without --kv-budget."""
        from outpace.config import load_settings, parse_overrides
        from outpace.decode.partial import Partial
        from outpace.kv.partial import PartialConfig

        if not self.kv_budget:
            if self.kv_budget_set or self.kv_budget_lossy:
                raise ValueError("--kv-budget-set and --kv-budget-lossy go with --kv-budget TOKENS")
            return None
        overrides = parse_overrides(PartialConfig, self.kv_budget_set or [])
        if "n_retrieval_blocks" in overrides:
            raise ValueError("--kv-budget-set n_retrieval_blocks: --kv-budget sets the number of tokens")
        settings = load_settings(PartialConfig, None, overrides, "--kv-budget-set")
        given = {name: getattr(settings, name) for name in overrides}
        config = PartialConfig.within(self.kv_budget, **given)
        return Partial(config=config, mode="lossy" if self.kv_budget_lossy else "lossless")

    def speculation(
        self, model: "Model", sampling: "SamplingParams"
    ) -> "tuple[Draft | None, dict[str, Any], str]":
        """-> the draft to use, the arguments `controller` and `partial` of `api.stream`, and a note for the
        user. Partial KV has no controller, which knows the costs of full passes only.

        Raises ValueError for options that contradict each other.
        """
        from outpace.drafts.lookup import NullDraft

        partial = self.partial()
        if model.declined is not None and (partial is None or partial.mode == "lossless"):
            return None, {}, f"autoregressive decoding: {model.declined}"
        draft = self.load_draft(model)
        if partial is None:
            draft, controller, note = self._controller(model, draft, sampling)
            return draft, {"controller": controller}, note
        fixed = self.num_speculative_tokens
        if self.speculate == "off":
            raise ValueError("--speculate off has no draft tokens to verify: with --kv-budget, leave it out")
        if fixed is not None:
            raise ValueError(
                f"--num-speculative-tokens {fixed} is for full verification; with --kv-budget, leave it out"
            )
        positions = model.target.config.max_position_embeddings
        if self.kv_budget > positions:
            raise ValueError(f"--kv-budget {self.kv_budget}: this model's positions end at {positions}")
        note = f"draft tokens verified on {partial.config.static_size:,} tokens of KV a layer, then on all"
        note = ("" if draft else "the target drafts for itself; ") + note
        return draft or NullDraft(), {"partial": partial}, note + "; LOSSY" * (partial.mode == "lossy")

    def _controller(
        self, model: "Model", draft: "Draft | None", sampling: "SamplingParams"
    ) -> "tuple[Draft | None, Controller | None, str]":
        from outpace.config import cache_folder
        from outpace.decode.auto import auto_controller
        from outpace.decode.controller import Fixed

        fixed = self.num_speculative_tokens
        if self.speculate not in SPECULATE:
            raise ValueError(f"--speculate {self.speculate}: it must be one of {', '.join(SPECULATE)}")
        if draft is None or self.speculate == "off":
            if fixed is not None:
                raise ValueError(
                    f"--num-speculative-tokens {fixed}: there are no draft tokens to verify without a draft"
                )
            return None, None, "autoregressive decoding"
        if fixed is not None:
            if not 1 <= fixed < draft.block_size:
                raise ValueError(
                    f"--num-speculative-tokens {fixed}: this draft proposes "
                    f"1 to {draft.block_size - 1} tokens"
                )
            return draft, Fixed(fixed + 1), f"draft length {fixed} in every step"
        if self.speculate == "always":
            return draft, None, "full draft length in every step"
        rule = sampling.request(frozenset()).effective_rule
        folder = self.cache_dir or cache_folder()
        return draft, *auto_controller(model.executor, model.tokenizer, draft, rule, folder)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `options` is one of the dataclasses above -> one with each of its fields as
    an option."""
    signature = inspect.signature(command)
    kind = signature.parameters["options"].annotation
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=f.default, annotation=hints[f.name]
        )
        for f in fields(kind)
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {f.name: values.pop(f.name) for f in fields(kind)}
        command(**values, options=kind(**given))

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += shared if name == "options" else [parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
