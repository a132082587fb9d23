"""Options of partial KV, and what they come to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli.calibrate import controller_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outpace.decode.controller import Controller
    from outpace.decode.partial import Partial
    from outpace.drafts.base import Draft as AnyDraft
    from outpace.models.decoder import Decoder

PartialTokens = Annotated[
    int,
    typer.Option(
        "--kv-budget",
        help="KV budget (tokens per full-attention layer) for approximate verification; results are "
        "re-verified with the full cache. Lossless, for long contexts, e.g. 4096 (0 = off).",
    ),
]
PartialSet = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-budget-set",
        help="Field of partial KV: --kv-budget-set n_spec_tokens_buf=40, --kv-budget-set selector=recent.",
    ),
]
PartialLossy = Annotated[
    bool,
    typer.Option(
        "--kv-budget-lossy",
        help="LOSSY: no verification with the full cache. The output differs from the model's.",
    ),
]


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
        raise ValueError(
            "--kv-budget-set n_retrieval_blocks: --kv-budget states how many tokens there are in all"
        )
    fields = load_settings(PartialConfig, None, overrides, "--kv-budget-set")
    config = PartialConfig.within(tokens, **{name: getattr(fields, name) for name in overrides})
    return Partial(config=config, mode="lossy" if lossy else "lossless")


def method_for(
    target: "Decoder",
    draft: "AnyDraft | None",
    tokenizer: "Tokenizer",
    message: str,
    near: "Partial | None",
    method: str,
    verify: int | None,
    cache_dir: Path | None,
) -> "tuple[AnyDraft | None, Controller | None, str]":
    """As `controller_for`, which knows full passes alone. Raises ValueError for what cannot be had."""
    from outpace.drafts.lookup import NullDraft

    if near is None:
        return controller_for(target, draft, tokenizer, message, method, verify, cache_dir)
    return draft or NullDraft(), None, partial_note(near, draft is not None, method, verify)


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
