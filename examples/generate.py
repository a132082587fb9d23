"""Generate text with and without a draft, stream it, and answer a batch.

python examples/generate.py [MODEL]
"""

import sys

import outpace


def main(name: str = "default") -> None:
    model = outpace.load(name)
    sampling = outpace.SamplingParams(max_tokens=48, stop="\n\n\n")
    prompt = "def mean(values):\n"

    plain = outpace.generate(model, prompt, draft=False, sampling=sampling)
    fast = outpace.generate(model, prompt, sampling=sampling)  # the best draft known for the model
    assert fast.tokens == plain.tokens, "greedy output never depends on the draft"
    print(prompt + fast.text)
    print(f"{plain.tokens_per_second:.0f} -> {fast.tokens_per_second:.0f} tokens/s, tau {fast.tau:.2f}\n")

    for piece in outpace.stream(model, prompt, draft="dflash", sampling=sampling):
        # in brackets what the draft proposed
        print(f"[{piece.text}]" if piece.drafted else piece.text, end="", flush=True)
    print("\n")

    batch = outpace.generate(model, ["import os\n", "class Queue:\n"], sampling=sampling)
    for output in batch:
        print(f"{len(output.tokens)} tokens, {output.finish_reason}: {output.text[:60]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
