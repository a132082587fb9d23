"""Cost tables of this machine: read, or measured for a request that has none."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.decode.costs import Costs
    from outpace.drafts.base import Draft

QUICK = 5.0  # seconds that a request may spend on its own cost table


def stored_costs(
    model: "Model", draft: "Draft", folder: Path, rule: str
) -> "tuple[Costs | None, str | None]":
    """-> the stored table of this target, draft, machine and rule, or why the stored file is not used."""
    from outpace.checkpoint.base import LoadError
    from outpace.decode.costs import fingerprint, read_costs

    try:
        return read_costs(folder, fingerprint(model.target, draft, rule)), None
    except LoadError as error:
        return None, f"{error}; measuring again"


def costs_for_auto(
    model: "Model", draft: "Draft", rule: str, folder: Path | None
) -> "tuple[Costs | None, str]":
    """The table of a request with --speculate auto, measured if that is quick; and a note for the user."""
    from outpace.config import cache_folder
    from outpace.decode.calibrate import quick
    from outpace.decode.costs import write_costs
    from outpace.decode.request import GREEDY

    folder = folder or cache_folder()
    costs, unusable = stored_costs(model, draft, folder, rule)
    if costs is not None:
        return costs, "draft length chosen by measured costs"
    more = f"; {unusable}" if unusable else ""
    expected = quick(model.target, draft, enough=QUICK)
    if expected > QUICK:
        greedy = None if rule == GREEDY else stored_costs(model, draft, folder, GREEDY)[0]
        if greedy is not None:
            return greedy, f"draft length chosen by greedy costs (outpace calibrate --acceptance {rule})"
        note = f"a cost table would take {expected:.0f} s or more (outpace calibrate)"
        return None, f"full draft length in every step: {note}{more}"
    costs = measure_costs(model, draft, rule, [256], [1], 0.5, quiet=True)
    if costs.busy:
        return None, "full draft length in every step: the machine is too busy to measure costs"
    note = f"draft length chosen by costs measured in about {expected:.1f} s"
    try:
        write_costs(costs, folder)
    except OSError as error:
        note += f", which could not be saved ({error})"
    return costs, note + more


def measure_costs(
    model: "Model",
    draft: "Draft",
    rule: str,
    contexts: list[int],
    batches: list[int],
    seconds: float,
    quiet: bool,
) -> "Costs":
    """Measured on held-out text of the standard library, with a progress bar unless `quiet`."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from outpace.decode.calibrate import calibrate
    from outpace.text.corpus import read_corpus, split

    wanted, text = max(contexts) + 4096, list[int]()
    for document in split(read_corpus())[1]:
        if len(text) >= wanted:
            break
        text += model.tokenizer.encode(document.text[:20000], add_special_tokens=False).ids
    columns = (TextColumn("measuring"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)
        return calibrate(
            model.target,
            draft,
            text,
            contexts=contexts,
            batches=batches,
            seconds=seconds,
            rule=rule,
            on_progress=lambda done: bar.update(task, completed=done),
        )
