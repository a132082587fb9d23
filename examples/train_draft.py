"""Train a small DFlash draft for a target and decode with it: cache, training, generation.

python examples/train_draft.py work/example --samples 400 --steps 600     # some minutes on two cores
"""

import argparse
from pathlib import Path

import outpace
from outpace.bench.prompts import held_out_prompts
from outpace.models.load import fingerprint
from outpace.teacher.build import TeacherRecipe, build
from outpace.teacher.prompts import TextPrompts
from outpace.teacher.store import TeacherCache
from outpace.text.corpus import read_corpus, split
from outpace.train.dflash import DFlashRecipe, train_dflash


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the run; continues what it holds")
    parser.add_argument("--model", default="default", help="target: a folder, a GGUF file or 'default'")
    parser.add_argument("--samples", type=int, default=400, help="texts in the teacher cache")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    asked = parser.parse_args()

    model = outpace.load(asked.model)
    train, held_out = split(read_corpus(None))  # Python's standard library; or a folder of *.py files

    # 1. the target answers prompts, and its hidden states go to disk
    cache_recipe = TeacherRecipe(samples=asked.samples, response_tokens=(64, 64), shard_samples=100)
    source = TextPrompts(train, model.tokenizer)
    build(model.target, model.tokenizer, source, asked.folder / "cache", cache_recipe)
    cache = TeacherCache.open(asked.folder / "cache", target_fingerprint=fingerprint(model.target))

    # 2. the draft learns to predict the target's next tokens from them
    recipe = DFlashRecipe(steps=asked.steps, eval_every=asked.steps, eval_prompts=2, eval_new_tokens=32)
    prompts = held_out_prompts(model.tokenizer, held_out, recipe.eval_prompts, 64)
    train_dflash(recipe, model.target, model.tokenizer, cache, prompts, asked.folder)

    # 3. it proposes, the target verifies
    draft = outpace.load_draft(str(asked.folder / "draft"), model)
    sampling = outpace.SamplingParams(max_tokens=64)
    output = outpace.generate(model, "def mean(values):\n", draft=draft, sampling=sampling)
    print(output.text)
    print(f"tau {output.tau:.2f}, {output.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main()
