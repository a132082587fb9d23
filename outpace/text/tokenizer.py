"""Text <-> token ids, through a tokenizer.json; and the training of a byte-level BPE."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from outpace.config import cache_folder
from outpace.text.sandbox import SANDBOX, printable

END_OF_TEXT = "<|endoftext|>"
MASK = "<|MASK|>"
PACKAGE = Path(__file__).resolve().parents[1]
MAX_BYTES = 256 * 2**20  # of a tokenizer.json; the largest published ones have 40 MiB
CHECK_SECONDS = 60.0
CHECK_MEMORY = 3 * 2**30  # bytes of address space; the largest published ones take 1 GiB
CHECKED = "checked_tokenizers.txt"  # in the cache folder, one line per tokenizer.json
MAX_VOCABULARY = 2**20
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


def train_bpe(texts: Iterable[str], vocab_size: int, *, alone: str = "") -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` ids, the special tokens first. Deterministic.

    `alone`: characters that no token joins to another, such as digits. Only the merges know of them, so the
    pattern by which text is split stays the usual one."""
    if not len(SPECIAL) + 256 <= vocab_size <= MAX_VOCABULARY:  # the library aborts the process
        raise ValueError(f"vocab_size {vocab_size}: it must be {len(SPECIAL) + 256} to {MAX_VOCABULARY:,}")
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cuts = [pre_tokenizers.Split(character, behavior="isolated") for character in alone]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, *cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
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
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size / 2**20:.0f} MiB, the limit is {MAX_BYTES >> 20}: "
            "it is no tokenizer; fetch it again"
        )
    own = path.resolve().is_relative_to(PACKAGE)
    return parse_tokenizer(path.read_bytes(), str(path), trusted=own)


def parse_tokenizer(text: bytes | str, where: str, trusted: bool = False) -> Tokenizer:
    """A tokenizer.json's text; `where` is its name in a ValueError.

    Some files crash the library or make it fill the memory. Unless `trusted`, a text is first loaded and used
    in a child process with limits; the cache folder keeps the hashes of those that passed.
    Truncation and padding that the file asks for are switched off: a prompt is never cut in silence.
    """
    with wrapped_errors(f"{where} is not a tokenizer.json that can be read"):
        text = text if isinstance(text, str) else text.decode("utf-8")
        if not trusted:
            _check(text)
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _check(text: str) -> None:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    line, path = f"{tokenizers.__version__} {digest}\n", cache_folder() / CHECKED
    with suppress(OSError, UnicodeDecodeError):
        if line in path.read_text():
            return
    SANDBOX.run("check_tokenizer", seconds=CHECK_SECONDS, memory=CHECK_MEMORY, text=text)
    with suppress(OSError):  # a read-only home: it is checked each time
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line)


@contextmanager
def wrapped_errors(what: str) -> Iterator[None]:
    """ValueErrors from a library that raises bare Exceptions, and panics, which are not even Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {printable(str(error)[:1000])}") from error


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
        raise ValueError(f"the tokenizer has no {token} token: it needs one that text never uses")
    return result


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's own tokens, without begin and end tokens. A special token written out is read as that token.
    Raises ValueError where the tokenizer fails."""
    with wrapped_errors("the tokenizer cannot encode the text"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> list[tuple[int, tuple[int, int]]]:
    """`encode`, each id with the characters [begin, end) that it came from."""
    with wrapped_errors("the tokenizer cannot encode the text"):
        encoding = tokenizer.encode(text, add_special_tokens=False)
    return list(zip(encoding.ids, encoding.offsets, strict=True))


class PlainEncoder:
    """Encodes text in which nothing is a special token: `<|start|>` is nine characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.added = frozenset(tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        ids = encode(self.tokenizer, text)
        return ids if self.added.isdisjoint(ids) else encode(self._without_added, text)

    @cached_property
    def _without_added(self) -> Tokenizer:
        """A copy: the library's own switch would change the tokenizer of everyone else too. Made only when a
        text needs it, as large vocabularies take long."""
        data = json.loads(self.tokenizer.to_str())
        return Tokenizer.from_str(json.dumps(data | {"added_tokens": [], "post_processor": None}))


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """`encode`, after the tokens that the tokenizer puts before a text: Llama's begin-of-text token, unless
    the text begins with it. Tokens after a text are left out: they would end the answer."""
    ids, (before, _) = encode(tokenizer, text), surroundings(tokenizer)
    return ids if ids[: len(before)] == before else before + ids


def surroundings(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before a text, and after it."""
    ids = encode(tokenizer, "a")
    with wrapped_errors("the tokenizer cannot encode a text"):
        whole = tokenizer.encode("a").ids
    headroom = range(len(whole) - len(ids) + 1)
    before = next((n for n in headroom if whole[n : n + len(ids)] == ids), 0)
    return whole[:before], whole[before + len(ids) :]
