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
        "--partial",
        help="Go over guesses with so many tokens of each full-attention layer's KV first, and judge them "
        "with all of it when some have gathered: for long contexts, e.g. 4096. 0: off. Lossless.",
    ),
]
PartialSet = Annotated[
    list[str] | None,
    typer.Option(
        help="A field of partial KV: --partial-set n_spec_tokens_buf=40, --partial-set selector=recent."
    ),
]
PartialLossy = Annotated[
    bool,
    typer.Option(
        "--partial-lossy",
        help="LOSSY: what passed on partial KV is never judged. Another text than the model's.",
    ),
]


def partial_of(tokens: int, pairs: list[str] | None, lossy: bool) -> "Partial | None":
    """Raises ValueError for fields and sizes that cannot be, and for what is said without --partial."""
    from outpace.config import load_settings, parse_overrides
    from outpace.decode.partial import Partial
    from outpace.kv.partial import PartialConfig

    if not tokens:
        if pairs or lossy:
            raise ValueError("--partial-set and --partial-lossy go with --partial TOKENS")
        return None
    said = parse_overrides(PartialConfig, pairs or [])
    if "n_retrieval_blocks" in said:
        raise ValueError("--partial-set n_retrieval_blocks: --partial says how many tokens there are in all")
    fields = load_settings(PartialConfig, None, said, "--partial-set")
    config = PartialConfig.within(tokens, **{name: getattr(fields, name) for name in said})
    return Partial(config=config, mode="lossy" if lossy else "lossless")


def method_for(
    target: "Decoder",
    draft: "AnyDraft | None",
    tokenizer: "Tokenizer",
    judged: str,
    near: "Partial | None",
    method: str,
    verify: int | None,
    cache_dir: Path | None,
) -> "tuple[AnyDraft | None, Controller | None, str]":
    """As `controller_for`, which knows full passes alone. Raises ValueError for what cannot be had."""
    from outpace.drafts.null import NullDraft

    if near is None:
        return controller_for(target, draft, tokenizer, judged, method, verify, cache_dir)
    return draft or NullDraft(), None, partial_told(near, draft is not None, method, verify)


def partial_told(partial: "Partial", draft: bool, method: str, verify: int | None) -> str:
    """What people are told of it. Raises ValueError where it does not go with the rest."""
    if method == "plain":
        raise ValueError("--method plain has no guesses to go over: with --partial, leave it out")
    if verify is not None:
        raise ValueError(f"--verify {verify} counts guesses of full passes; with --partial, leave it out")
    kept = f"{partial.config.static_size:,} tokens of KV a layer, then the full pass"
    whose = "every guess verified" if draft else "the target guesses for itself"
    return f"{whose} on {kept}" + ("; LOSSY" if partial.mode == "lossy" else "")
