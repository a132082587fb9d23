"""Train a small target on generated problems of all families, from nothing or on from an earlier run.

    python -m examples.tiny_target.make --recipe examples/tiny_target/gpu.toml --device cuda \\
        --workers 13 --out work/target
    torchrun --nproc-per-node 2 -m examples.tiny_target.make \\
        --recipe examples/tiny_target/cpu.toml --out work/target

Two processes of one thread are faster on two cores than one of two. A stopped run resumes from its last
checkpoint. The checkpoint folder is OUT/model.
"""

import argparse
import sys
from pathlib import Path

from examples.tiny_target.model import shape_of
from examples.tiny_target.problem_rows import sample_pieces
from examples.tiny_target.problem_training import ProblemRecipe, train_target
from examples.tiny_target.publish import publish
from outpace.checkpoint.save import write_atomically
from outpace.checkpoint.shipped import target_path
from outpace.config import load_settings, parse_overrides
from outpace.loading import open_target
from outpace.ops import ranks
from outpace.text.tokenizer import read_tokenizer, train_bpe
from outpace.train.drafts import read_provenance

ALONE = "0123456789[]{}()\"'"  # characters that are tokens of their own wherever they stand
SAMPLES = 150  # problems of each family that the vocabulary is learnt from


def make(
    recipe: Path | None,
    overrides: list[str],
    init: str | None,
    out: Path,
    device: str = "cpu",
    workers: int = 0,
) -> str:
    """Train and save; -> a line with the quality of the saved model, "" in all but the first of several
    processes. Raises ValueError for a recipe that cannot be trained."""
    start, known = (None, None) if init is None else open_target(init)
    shape = {} if start is None else shape_of(start.config)
    settings = load_settings(ProblemRecipe, recipe, parse_overrides(ProblemRecipe, overrides) | shape)
    out.mkdir(parents=True, exist_ok=True)
    if ranks.leads() and not (out / "tokenizer.json").exists():
        pieces = sample_pieces(settings.seed, SAMPLES)
        bpe = known or train_bpe(pieces, settings.vocab_size, alone=ALONE)
        write_atomically(out / "tokenizer.json", bpe.to_str(pretty=True).encode())
    with ranks.joined():
        ranks.wait()
        tokenizer = read_tokenizer(out)
        model = train_target(settings, tokenizer, out, init=start, device=device, workers=workers)
    if not ranks.leads():
        return ""
    before = None if init is None else read_provenance(target_path(init))
    quality = publish(model, tokenizer, settings, out, out / "model", before)
    exact = quality["exact"]
    worst = min(exact, key=lambda name: exact[name])
    return (
        f"{out / 'model'}: {sum(exact.values()) / len(exact):.1%} of held-out problems solved word for word "
        f"as in training ({quality['problems']} a family), least {worst} ({exact[worst]:.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--recipe", type=Path, help="TOML recipe (default: the fields' defaults)")
    parser.add_argument("--set", action="append", default=[], help="field of the recipe: --set steps=500")
    parser.add_argument(
        "--init", help="model to start from, of an earlier run; its sizes replace the recipe's"
    )
    parser.add_argument("--device", default="cpu", help="where the model learns, such as cuda (default: cpu)")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that make problems for it (default: none beside it)"
    )
    asked = parser.parse_args()
    try:
        line = make(asked.recipe, asked.set, asked.init, asked.out, asked.device, asked.workers)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if line:
        print(line)


if __name__ == "__main__":
    main()
