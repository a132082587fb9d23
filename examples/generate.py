"""Answer a question with and without a draft, stream the answer, and answer several at once.

python examples/generate.py [MODEL]
"""

import sys

import outpace


def main(name: str = "default") -> None:
    model = outpace.load(name)
    sampling = outpace.SamplingParams(max_tokens=200)
    question = (
        'Rename the key "page" of this JSON to "age": {"page": "blue", "unit": "red", "year": "Nairobi"}'
    )
    chat = [{"role": "user", "content": question}]

    plain = outpace.generate(model, chat, draft=False, sampling=sampling)
    fast = outpace.generate(model, chat, sampling=sampling)  # the best draft known for the model
    assert fast.tokens == plain.tokens, "greedy output never depends on the draft"
    print(fast.text)
    print(f"{plain.tokens_per_second:.0f} -> {fast.tokens_per_second:.0f} tokens/s, tau {fast.tau:.2f}\n")

    for piece in outpace.stream(model, chat, draft="dflash", sampling=sampling):
        # in brackets what the draft proposed
        print(f"[{piece.text}]" if piece.drafted else piece.text, end="", flush=True)
    print("\n")

    questions = "What is 12 + 7?", "Who are you?"
    chats = [[{"role": "user", "content": each}] for each in questions]
    batch = outpace.generate(model, chats, sampling=sampling)
    for output in batch:
        print(f"{len(output.tokens)} tokens, {output.finish_reason}: {output.text[:60]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
