"""Does it speak? Growth of the residual stream, how well a text is predicted, what greedy decoding states."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from outpace.doctor.check import Check, Status
from outpace.doctor.reference import relative
from outpace.doctor.sides import Walk
from outpace.models.decoder import Decoder
from outpace.text.tokenizer import encode_prompt

# Of ln V, what a model that knows nothing needs per token. Trained models of any size need less than half
# on plain text; one where the experts are mis-scaled or where the heads are scrambled needs 0.8 and more.
GOOD, CHANCE = 0.7, 0.9
GROWTH = 1000.0  # between two layers; massive activations of real models reach some 100
PROMPT, NEW = 64, 32  # tokens of the greedy continuation
CACHE_LIMIT = 1e-3  # of logits, one token at a time against all at once


def token_losses(logits: Tensor, tokens: list[int]) -> Tensor:
    """logits [T, V] -> what each next token costs, [T-1] nats."""
    return F.cross_entropy(logits[:-1].float(), torch.tensor(tokens[1:]), reduction="none")


def check_growth(ours: Walk) -> Check:
    name = "residual stream"
    sizes = [_rms(ours.embedded), *(_rms(s.out) for s in ours.layers)]
    added = [(_rms(s.attention), _rms(s.mlp)) for s in ours.layers]
    evidence = {
        "rms": [float(f"{s:.4g}") for s in sizes],
        "added": [[float(f"{x:.4g}") for x in pair] for pair in added],
    }
    broken = [i for i, s in enumerate(sizes) if not math.isfinite(s)]
    if broken:
        where = "the embedding" if broken[0] == 0 else f"layer {broken[0] - 1}"
        text = f"NaN or Inf, first out of {where}"
        return Check(name=name, status="fail", message=text, evidence=evidence)
    dead = [i for i, pair in enumerate(added) if min(pair) == 0]
    leaps = [i for i, (a, b) in enumerate(pairwise(sizes)) if b > GROWTH * max(a, 1e-30)]
    text = f"rms {sizes[0]:.3g} after the embedding, {sizes[-1]:.3g} after the last layer"
    if dead:
        text += f"; layer {dead[0]} adds nothing at all"
    if leaps:
        text += f"; it grows {sizes[leaps[0] + 1] / sizes[leaps[0]]:.0f} times in layer {leaps[0]}"
    return Check(name=name, status="warn" if dead or leaps else "pass", message=text, evidence=evidence)


def check_text(logits: Tensor, tokens: list[int]) -> Check:
    """How many nats per token of plain text costs."""
    name = "prediction of a text"
    losses, most = token_losses(logits, tokens), math.log(logits.shape[-1])
    mean = float(losses.mean())
    first = float((logits[:-1].argmax(-1) == torch.tensor(tokens[1:])).float().mean())
    evidence = {"nats_per_token": mean, "of_chance": mean / most, "top_1": first, "tokens": len(losses)}
    text = f"{mean:.2f} nats per token over {len(losses)} (chance: {most:.2f}); top-1 {first:.0%}"
    status: Status = "pass" if mean < GOOD * most else "warn" if mean < CHANCE * most else "fail"
    if not mean < CHANCE * most:
        text += ": no better than chance, so the weights are untrained, or something reaches every layer"
    elif status == "warn":
        text += ": poor, for any trained model"
    return Check(name=name, status=status, message=text, evidence=evidence)


@dataclass(frozen=True, kw_only=True)
class GreedyText:
    tokens: list[int]
    entropies: list[float]  # nats, of the distribution each was taken from
    apart: float  # relative difference of the cached logits from those of one whole forward


@torch.inference_mode()
def speak(model: Decoder, tokens: list[int]) -> GreedyText:
    """A few tokens after the beginning of the text, one at a time through the cache, and all at once."""
    prompt = tokens[: min(PROMPT, len(tokens))]
    cache = model.make_cache(1, len(prompt) + NEW)
    ids, rows = list(prompt), []
    hidden = model(torch.tensor([prompt], device=model.device), cache).hidden[0, -1]
    for _ in range(NEW):
        rows.append(model.logits(hidden[None])[0].float().cpu())
        ids.append(int(rows[-1].argmax()))
        hidden = model(torch.tensor([ids[-1:]], device=model.device), cache).hidden[0, -1]
    whole = model(torch.tensor([ids[:-1]], device=model.device)).hidden[0, len(prompt) - 1 :]
    cached, at_once = torch.stack(rows), model.logits(whole).float().cpu()
    p = cached.softmax(-1)
    entropies = -(p * p.clamp(min=1e-30).log()).sum(-1)
    return GreedyText(
        tokens=ids[len(prompt) :], entropies=entropies.tolist(), apart=relative(cached, at_once)
    )


def check_speech(spoken_by: GreedyText, text: str, vocab_size: int) -> Check:
    name = "greedy continuation"
    tokens, mean = spoken_by.tokens, sum(spoken_by.entropies) / len(spoken_by.entropies)
    loop, most = shortest_loop(tokens), math.log(vocab_size)
    evidence = {
        "text": text,
        "tokens": tokens,
        "entropy": mean,
        "loop": loop,
        "cached_against_whole": spoken_by.apart,
    }
    faults, remarks = [], []
    if not math.isfinite(mean):
        faults.append("the logits hold NaN or Inf")
    if not spoken_by.apart <= CACHE_LIMIT:
        faults.append(f"logits through the cache are off by {spoken_by.apart:.1e} from a whole forward's")
    if mean > CHANCE * most:
        faults.append("the distribution is nearly uniform")
    if loop and loop <= 2:
        remarks.append(f"it repeats the same {'token' if loop == 1 else 'two tokens'}")
    description = "; ".join(faults + remarks + [f"{text!r} (entropy {mean:.2f} of {most:.2f} nats)"])
    status: Status = "fail" if faults else "warn" if remarks else "pass"
    return Check(name=name, status=status, message=description, evidence=evidence)


def shortest_loop(tokens: list[int], least: int = 8) -> int:
    """The period with which the last `least` tokens or more repeat; 0 where they do not."""
    tail = tokens[-least:]
    for period in range(1, least // 2 + 1):
        if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return period
    return 0


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


SAMPLE = '''"""Count the words of a text file and print the most common ones."""

import argparse
from collections import Counter
from pathlib import Path


def count_words(path):
    """Return a Counter of the words in the file, in lower case."""
    counts = Counter()
    with open(path, encoding="utf-8") as file:
        for line in file:
            for word in line.split():
                counts[word.strip(".,;:!?").lower()] += 1
    return counts


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the file to read")
    parser.add_argument("-n", "--number", type=int, default=10, help="how many words to print")
    args = parser.parse_args(argv)
    if not args.path.exists():
        raise FileNotFoundError(f"no such file: {args.path}")
    for word, count in count_words(args.path).most_common(args.number):
        print(f"{count:8d} {word}")


if __name__ == "__main__":
    main()

# The program above reads a file line by line, so that a large file does not have to fit in memory. It was
# written on a rainy afternoon in the library of a small town, where the old man at the next table was
# reading the newspaper. He looked up and asked what the numbers on the screen meant. "They are words," stated
# the young woman, "and how often each of them is used." He thought about it for a while, and then he stated
# that the most common words are always the shortest ones, because people are lazy.
'''


def sample_tokens(tokenizer: Tokenizer | None, vocab_size: int, most: int, file: Path | None) -> list[int]:
    """The first `most` ids of the sample, or of a file, with what the tokenizer puts in front of a text;
    without a tokenizer ids at random, which serve a comparison and nothing else.

    Raises ValueError for a file of less than two tokens.
    """
    if tokenizer is None:
        rng = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (most,), generator=rng).tolist()
    ids = encode_prompt(tokenizer, SAMPLE if file is None else file.read_text(encoding="utf-8"))[:most]
    if len(ids) < 2:
        raise ValueError(f"{file} holds less than two tokens: nothing can be predicted from it")
    return [i for i in ids if i < vocab_size]
