"""Text <-> token ids, through a tokenizer.json; and the training of a byte-level BPE."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MASK = "<|MASK|>"
MOST_BYTES = 256 * 2**20  # of a tokenizer.json; the largest published ones have 40 MiB
SPECIAL = (
    "<|startoftext|>",
    END_OF_TEXT,
    MASK,
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
# words with one leading sign, numbers of up to three digits, signs, line ends with what precedes them
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` ids, the special tokens first. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts yield a vocabulary of {tokenizer.get_vocab_size()}, not {vocab_size}: "
            "ask for a smaller one or give more text"
        )
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """The `tokenizer.json` of a checkpoint folder. Raises ValueError where it is missing or damaged."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokenizer.json: copy the target's next to its weights")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size / 2**20:.0f} MiB, the limit is {MOST_BYTES >> 20}: "
            "it is no tokenizer; fetch it again"
        )
    return parse_tokenizer(path.read_bytes(), str(path))


def parse_tokenizer(text: bytes | str, where: str) -> Tokenizer:
    """A tokenizer.json's text; `where` is what a ValueError calls it.

    Truncation and padding that the file asks for are switched off: a prompt is never cut in silence.
    """
    with plain_errors(f"{where} is not a tokenizer.json that can be read"):
        tokenizer = Tokenizer.from_str(text if isinstance(text, str) else text.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """ValueErrors out of a library that raises bare Exceptions, and panics, which are not even Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Every id that the tokenizer can give must have a row of the embedding [vocab_size, C]; rows that
    no token uses are common. Raises ValueError, naming the first token that has none."""
    beyond = [(i, token) for token, i in tokenizer.get_vocab().items() if i >= vocab_size]
    if beyond:
        first, token = min(beyond)
        raise ValueError(
            f"the tokenizer gives {token!r} the id {first} ({len(beyond)} tokens are past the end), the model"
            f" has a vocab_size of {vocab_size}: they are not of one model; copy the target's own tokenizer"
        )


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Raises ValueError where the tokenizer does not know the token."""
    result: int | None = tokenizer.token_to_id(token)
    if result is None:
        raise ValueError(f"the tokenizer knows no {token}: it needs one that text never uses")
    return result


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's own tokens, nothing put around them. A special token written out is read as that token."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Like `encode`, after what the tokenizer puts before a text: Llama's begin-of-text token, unless the
    text begins with it. What some put behind a text is left out: it would end the answer."""
    ids, (before, _) = encode(tokenizer, text), surroundings(tokenizer)
    return ids if ids[: len(before)] == before else before + ids


def surroundings(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before a text, and behind it."""
    ids = encode(tokenizer, "a")
    whole = tokenizer.encode("a").ids
    headroom = range(len(whole) - len(ids) + 1)
    before = next((n for n in headroom if whole[n : n + len(ids)] == ids), 0)
    return whole[:before], whole[before + len(ids) :]
