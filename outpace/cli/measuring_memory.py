"""The suites of `outpace bench` about memory: memory, pareto."""

from pathlib import Path
from typing import Any

from rich.console import Console

from outpace.cli.app import recipe_settings


def bench_memory(
    target: str,
    draft: str,
    weights: str | None,
    recipe: Path | None,
    set_: list[str] | None,
    out: Path,
    corpus: Path | None,
    shown: Console,
) -> dict[str, Any]:
    from outpace.bench.memory import MemorySettings, run_memory, write_memory
    from outpace.loading import open_draft, open_target
    from outpace.text.corpus import read_corpus, split

    settings = recipe_settings(MemorySettings, recipe, set_)
    loaded, tokenizer = open_target(target)
    bound = open_draft(draft, loaded, tokenizer, quantize=weights)
    if bound is None:
        raise ValueError(
            f"--draft {draft}: the suite memory decodes with a draft: ngram, suffix, or a folder"
        )
    held_out = split(read_corpus(corpus))[1]
    report = run_memory(loaded, tokenizer, bound, draft, held_out, settings, out, shown)
    write_memory(report, out)
    return report


def bench_pareto(
    target: str, recipe: Path | None, set_: list[str] | None, out: Path, corpus: Path | None, shown: Console
) -> dict[str, Any]:
    from outpace.bench.pareto import ParetoSettings, run_pareto, write_pareto
    from outpace.loading import open_target
    from outpace.text.corpus import read_corpus, split

    settings = recipe_settings(ParetoSettings, recipe, set_)
    trained = {name: open_target(name)[0] for name in settings.trained}
    loaded, tokenizer = open_target(target)
    train, held_out = split(read_corpus(corpus))
    report = run_pareto(loaded, tokenizer, trained, train, held_out, settings, out, shown)
    write_pareto(report, out)
    return report
