"""Train a small target from raw text: one stage of the embedded model, or a model of another recipe.

    python -m examples.tiny_target.make --recipe examples/tiny_target/micro.toml --out work/micro
    python -m examples.tiny_target.make --recipe examples/tiny_target/stage2_few_packages.toml \\
        --init work/1/model --out work/2

A stopped run resumes from its last checkpoint. The checkpoint folder is OUT/model.
"""

import argparse
import sys
from pathlib import Path

from examples.tiny_target.model import shape_of
from examples.tiny_target.publish import publish_target
from examples.tiny_target.training import TargetRecipe, train_target
from outpace.checkpoint.save import write_atomically
from outpace.checkpoint.shipped import target_path
from outpace.config import load_settings, parse_overrides
from outpace.loading import open_target
from outpace.text.corpus import read_corpus, split
from outpace.text.tokenizer import read_tokenizer, train_bpe
from outpace.train.drafts import read_provenance


def make(recipe: Path | None, overrides: list[str], init: str | None, corpus: Path | None, out: Path) -> str:
    """Train and save; -> a line with the quality of the saved model. Raises ValueError for a recipe or a
    corpus that cannot be trained."""
    start, known = (None, None) if init is None else open_target(init)
    shape = {} if start is None else shape_of(start.config)
    settings = load_settings(TargetRecipe, recipe, parse_overrides(TargetRecipe, overrides) | shape)
    train, held_out = split(read_corpus(corpus))
    if not train or not held_out:  # files are split by name
        raise ValueError(
            f"corpus: {len(train)} files to train on and {len(held_out)} held out; each needs one: add files"
        )
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "tokenizer.json").exists():
        bpe = known or train_bpe((d.text for d in train), settings.vocab_size)
        write_atomically(out / "tokenizer.json", bpe.to_str(pretty=True).encode())
    tokenizer = read_tokenizer(out)
    model = train_target(settings, tokenizer, train, held_out, out, init=start)
    before = None if init is None else read_provenance(target_path(init))
    quality = publish_target(model, tokenizer, settings, train, held_out, out, out / "model", before)
    return (
        f"{out / 'model'}: held-out {quality['held_out_bits_per_byte']} bits per byte, "
        f"{quality['repeated_share']:.1%} repeated {quality['repeated_ngram']}-grams in greedy text "
        f"({quality['repeated_share_of_real_text']:.1%} in real text), "
        f"mean probability of its greedy tokens {quality['greedy_probability']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--recipe", type=Path, help="TOML recipe (default: the fields' defaults)")
    parser.add_argument("--set", action="append", default=[], help="field of the recipe: --set steps=500")
    parser.add_argument("--init", help="model to start from, or 'default'; its sizes replace the recipe's")
    parser.add_argument("--corpus", type=Path, help="folder of *.py files (default: the standard library)")
    asked = parser.parse_args()
    try:
        print(make(asked.recipe, asked.set, asked.init, asked.corpus, asked.out))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
