"""Vocabularies trained by the tests; one has tokens across every pre-tokenizer boundary."""

import functools

import nasty
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from outpace.text.gguf_tokenizer import WHOLE, gguf_vocabulary
from outpace.text.pre_tokenizers import NAMED

KEY = "tokenizer.ggml."
RULES = list({pieces: name for name, pieces in reversed(NAMED.items())}.values())  # one name a rule
WORDS = " ".join(nasty.TEXTS).split()


@functools.cache
def trained(name=None):
    """A byte-level BPE under one rule; without a name, one where the tokens reach over all that a rule would
    cut, so that every cut shows."""
    made = Tokenizer(models.BPE(ignore_merges=name is not None and NAMED[name].ignore_merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name is not None:
        NAMED[name].install(made)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*nasty.TEXTS, *nasty.TEXTS, *WORDS], trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return made


def sentencepiece():
    """Metadata of a vocabulary with scores, spaces as U+2581 and tokens for single bytes."""
    plain = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=700, max_token_length=16, show_progress=False)
    texts = [text.replace(" ", "\u2581") for text in [*nasty.TEXTS, *nasty.TEXTS, *WORDS]]
    texts = [text for text in texts if "<" not in text and "\0" not in text]
    plain.train_from_iterator(texts, trainer)
    learned = sorted(plain.get_vocab(), key=plain.get_vocab().get)
    single = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *single, *(t for t in learned if t not in single)]
    return {
        f"{KEY}model": "llama",
        f"{KEY}tokens": tokens,
        f"{KEY}scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        f"{KEY}token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        f"{KEY}bos_token_id": 1,
        f"{KEY}eos_token_id": 2,
        f"{KEY}unknown_token_id": 0,
    }


def cut_by(name):
    """The vocabulary without a rule of its own, read under a rule's name."""
    return gguf_vocabulary(trained(), trained().get_vocab_size(), pre=name) | {f"{KEY}pre": name, WHOLE: None}
