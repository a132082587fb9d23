"""Train a small DFlash draft for a target and decode with it: cache, training, generation.

python examples/train_draft.py work/example --samples 400 --steps 600     # some minutes on two cores
"""

import argparse
from pathlib import Path

import outpace
from outpace.models.load import fingerprint
from outpace.tasks.prompts import draw_mixed
from outpace.teacher.build import TeacherRecipe, build
from outpace.teacher.prompts import ChatPrompts
from outpace.teacher.store import TeacherCache
from outpace.text.harmony import HarmonyTokens, prompt_ids
from outpace.train.dflash import DFlashRecipe, train_dflash


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the run; continues what it holds")
    parser.add_argument("--model", default="default", help="target: a folder, a GGUF file or 'default'")
    parser.add_argument("--samples", type=int, default=400, help="answers in the teacher cache")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    asked = parser.parse_args()

    model = outpace.load(asked.model)
    tokens = HarmonyTokens(model.tokenizer)

    def questions(count: int, held_out: bool) -> list[list[int]]:
        """Generated problems; questions of your own come from `outpace.loading.chat_prompts`."""
        return [prompt_ids(p.prompt(), tokens) for p in draw_mixed(count, seed=1, held_out=held_out)]

    # 1. the target answers questions, and its hidden states go to disk
    cache_recipe = TeacherRecipe(samples=asked.samples, response_tokens=(200, 200), shard_samples=100)
    source = ChatPrompts(questions(asked.samples, held_out=False), tokens.stop)
    build(model.target, model.tokenizer, source, asked.folder / "cache", cache_recipe)
    cache = TeacherCache.open(asked.folder / "cache", target_fingerprint=fingerprint(model.target))

    # 2. the draft learns to predict the target's next tokens from them
    recipe = DFlashRecipe(steps=asked.steps, eval_every=asked.steps, eval_prompts=2, eval_new_tokens=32)
    prompts = questions(recipe.eval_prompts, held_out=True)
    train_dflash(recipe, model.target, model.tokenizer, cache, prompts, asked.folder)

    # 3. it proposes, the target verifies
    draft = outpace.load_draft(str(asked.folder / "draft"), model)
    sampling = outpace.SamplingParams(max_tokens=200)
    chat = [{"role": "user", "content": "Write this word in capital letters: mihunagavug"}]
    output = outpace.generate(model, chat, draft=draft, sampling=sampling)
    print(output.text)
    print(f"tau {output.tau:.2f}, {output.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main()
