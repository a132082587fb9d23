"""The controller of a request that names no draft length, by costs that are stored or quickly measured."""

from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from outpace.checkpoint.base import LoadError
from outpace.decode.calibrate import STEADY, OnProgress, calibrate, quick
from outpace.decode.controller import Adaptive, Controller, Fixed
from outpace.decode.costs import Costs, fingerprint, read_costs, write_costs
from outpace.decode.request import GREEDY
from outpace.decode.row_costs import shared
from outpace.drafts.base import Draft
from outpace.models.decoder import Decoder, Target
from outpace.tasks.prompts import draw_mixed, harmony_of, problem_text
from outpace.text.corpus import read_corpus, split
from outpace.text.harmony import prompt_ids

QUICK = 5.0  # seconds that a request may spend on its own cost table
PROBLEMS, LONGEST, SEED = 64, 512, 2  # prompts for the acceptance rate, and the most tokens of each
ROWS = 32  # of a batch, for which measured costs are scaled


def stored_costs(
    target: Decoder, draft: Draft, folder: Path, rule: str = GREEDY
) -> tuple[Costs | None, str | None]:
    """-> the stored table of this target, draft, machine and rule, or why the stored file is not used."""
    try:
        return read_costs(folder, fingerprint(target, draft, rule)), None
    except LoadError as error:
        return None, f"{error}; measuring again"


def measure_costs(
    target: Target,
    tokenizer: Tokenizer,
    draft: Draft,
    rule: str,
    contexts: list[int],
    batches: list[int],
    seconds: float,
    on_progress: OnProgress | None = None,
) -> Costs:
    """`calibrate` on text of the kind that the target writes: what it answers to problems where it speaks
    Harmony, and else held-out source of the standard library."""
    wanted = max(contexts) + 4096
    harmony, prompts = harmony_of(tokenizer), list[list[int]]()
    if harmony is not None:
        text = problem_text(harmony, wanted, SEED)
        drawn = [prompt_ids(problem.prompt(), harmony) for problem in draw_mixed(PROBLEMS, SEED)]
        most = min(LONGEST, target.config.max_position_embeddings - STEADY)
        prompts = [ids for ids in drawn if len(ids) <= most]  # none: places of the text serve as well
    else:
        text = _source(tokenizer, wanted)
    return calibrate(
        target,
        draft,
        text,
        contexts=contexts,
        batches=batches,
        seconds=seconds,
        rule=rule,
        prompts=prompts,
        on_progress=on_progress,
    )


def _source(tokenizer: Tokenizer, wanted: int) -> list[int]:
    text: list[int] = []
    for document in split(read_corpus())[1]:
        if len(text) >= wanted:
            break
        text += tokenizer.encode(document.text[:20000], add_special_tokens=False).ids
    return text


def auto_controller(
    target: Target, tokenizer: Tokenizer, draft: Draft, rule: str, folder: Path, rows: int = ROWS
) -> tuple[Controller | None, str]:
    """The controller with the costs of this target, draft, machine and acceptance rule, of up to `rows`
    sequences at once, and a note for the user. None, the draft's full length, where measuring them would
    take more than QUICK seconds, and where processes hold the target together: each would measure other
    costs, and choose another length."""
    if target.decoder.group is not None:
        return None, "full draft length in every step: costs are measured in one process only"
    for_rows = partial(shared, most=rows, one_draft=bool(draft.target_layer_ids))
    costs, unusable = stored_costs(target.decoder, draft, folder, rule)
    if costs is not None:
        return Adaptive(for_rows(costs)), "draft length chosen by measured costs"
    more = f"; {unusable}" if unusable else ""
    expected = quick(target, draft, enough=QUICK)
    if expected > QUICK:
        greedy = None if rule == GREEDY else stored_costs(target.decoder, draft, folder)[0]
        if greedy is not None:
            note = f"draft length chosen by greedy costs (outpace calibrate --acceptance {rule})"
            return Adaptive(for_rows(greedy)), note
        note = f"a cost table would take {expected:.0f} s or more (outpace calibrate)"
        return None, f"full draft length in every step: {note}{more}"
    # rounds of one row may be native calls, those of many are not
    batches = [1, 2] if rows > 1 and 2 * expected <= QUICK else [1]
    costs = measure_costs(target, tokenizer, draft, rule, [256], batches, 0.5)
    if costs.busy:  # a target that is measured so soon is fast: drafting costs more than it, if in doubt
        return Fixed(1), "no draft tokens: the machine is too busy to measure costs (outpace calibrate)"
    note = f"draft length chosen by costs measured in about {len(batches) * expected:.1f} s"
    try:
        write_costs(costs, folder)
    except OSError as error:
        note += f", which could not be saved ({error})"
    return Adaptive(for_rows(costs)), note + more
