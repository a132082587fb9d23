"""A tokenizer from the metadata of a GGUF file, and the metadata of a GGUF file from a tokenizer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from outpace.text.pre_tokenizers import NAMED, PreTokenizer, pre_tokenizer_named, pre_tokenizer_of
from outpace.text.tokenizer import PIECES, check_vocabulary, parse_tokenizer, surroundings, wrapped_errors

KEY = "tokenizer.ggml."
WHOLE = "tokenizer.huggingface.json"  # the GGUF specification's key for a whole tokenizer.json
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
# Rules without a GGUF name, and the name with the nearest rule. For the embedded tokenizer's, `llama-bpe`
# differs only where an apostrophe after a letter, a digit or nothing opens a word that begins like a
# contraction: r'test' is split r|'test here, r|'t|est there.
NEAREST: dict[tuple[str, ...], str] = {(PIECES,): "llama-bpe"}
LONGEST = 512  # characters of a SentencePiece token: every split of it is tried
# Control tokens that end a turn, whether or not the file names them.
ENDS = {
    *("<|return|>", "<|call|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<|end|>", "<end_of_turn>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
}


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """`stop`: every id that ends a generation, the end-of-sequence token first."""

    bos: int | None
    eos: int | None
    pad: int | None
    stop: tuple[int, ...]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's `tokenizer.ggml.*` (values as Python's own types): byte-level BPE
    ("gpt2") with a pre-tokenizer by name, or SentencePiece BPE ("llama").

    A `tokenizer.huggingface.json` in the metadata takes precedence; its ids must be the file's. Raises
    ValueError for other kinds of vocabulary, unknown pre-tokenizers, and lists that do not match.
    """
    model = metadata.get(f"{KEY}model")
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"{KEY}model is {str(model)[:40]!r}; of GGUF vocabularies byte-level BPE ('gpt2') and "
            "SentencePiece BPE ('llama') are supported: use the safetensors folder, with its tokenizer.json"
        )
    tokens, types = _tokens(metadata)
    if metadata.get(WHOLE) is not None:
        return _whole(metadata[WHOLE], tokens, types)
    with wrapped_errors("the GGUF vocabulary cannot be read"):
        build = _byte_level if model == "gpt2" else _sentencepiece
        tokenizer = build(metadata, tokens, types)
        added = [(AddedToken(t, normalized=False), types[i]) for i, t in enumerate(tokens)]
        tokenizer.add_special_tokens([t for t, kind in added if kind in (CONTROL, UNKNOWN)])
        tokenizer.add_tokens([t for t, kind in added if kind == USER_DEFINED])
        _add_surroundings(tokenizer, metadata, tokens)
    return tokenizer


def special_ids(metadata: Mapping[str, Any]) -> SpecialIds:
    """The ids that a GGUF file names, and for `stop` also its control tokens that are known to end a turn:
    gpt-oss files name `<|return|>` alone, and `<|call|>` ends a turn too.

    Raises ValueError for an id outside the vocabulary.
    """
    tokens, types = _tokens(metadata)

    def named(kind: str) -> int | None:
        i = _typed(metadata, f"{kind}_token_id", int, None)
        if i is not None and not 0 <= i < len(tokens):
            raise ValueError(f"{KEY}{kind}_token_id is {i}, the vocabulary has {len(tokens)} tokens")
        return i

    held = {t: i for i, t in enumerate(tokens) if t in ENDS and types[i] in (CONTROL, USER_DEFINED)}
    if "<|return|>" in held:
        held.pop("<|end|>", None)  # it ends a turn of Phi-3, and of Harmony only a message
    ends = [i for i in map(named, ("eos", "eot", "eom")) if i is not None]
    stop = tuple(dict.fromkeys([*ends, *held.values()]))
    return SpecialIds(bos=named("bos"), eos=named("eos"), pad=named("padding"), stop=stop)


def gguf_vocabulary(tokenizer: Tokenizer, vocab_size: int, *, pre: str | None = None) -> dict[str, Any]:
    """A byte-level BPE as `tokenizer.ggml.*` metadata; `tokenizer_from_gguf` of it gives every text the same
    tokens. Ids without a token, up to `vocab_size`, get unused names. The begin and end tokens are those that
    the tokenizer adds; others come from the config.

    The pre-tokenizer's name is found by its regexes. Where none fits exactly, `pre` must name the nearest,
    and the whole tokenizer.json is included: this package reads it, llama.cpp uses the named rule. Raises
    ValueError, naming the obstacle.
    """
    check_vocabulary(tokenizer, vocab_size)
    data = json.loads(tokenizer.to_str())
    try:
        rule = pre_tokenizer_of(data)
    except ValueError as error:
        raise ValueError(f"the tokenizer cannot be written into a GGUF file: {error}") from error
    exact = _names(rule, data)
    name = pre or (exact[0] if exact else NEAREST.get(rule.splits))
    if name is None:
        raise ValueError(
            f"the tokenizer's pre-tokenizer {list(rule.splits)} has no GGUF name: give the nearest, "
            f"pre= one of {', '.join(sorted(NAMED))}"
        )
    pre_tokenizer_named(name)
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    if any(merge.count(" ") != 1 for merge in merges):
        raise ValueError("the tokenizer merges tokens with spaces in them: it is not a byte-level BPE")
    kinds = {t["id"]: CONTROL if t["special"] else USER_DEFINED for t in data["added_tokens"]}
    held = {i: token for token, i in tokenizer.get_vocab().items()}
    before, after = surroundings(tokenizer)
    values = {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": name,
        f"{KEY}tokens": [held.get(i, unused(i)) for i in range(vocab_size)],
        f"{KEY}token_type": [kinds.get(i, NORMAL if i in held else UNUSED) for i in range(vocab_size)],
        f"{KEY}merges": merges,
        f"{KEY}add_bos_token": bool(before),
        f"{KEY}add_eos_token": bool(after),
    }
    if before:
        values[f"{KEY}bos_token_id"] = before[0]
    if after:
        values[f"{KEY}eos_token_id"] = after[0]
    if name not in exact or not _expressible(data) or max(len(before), len(after)) > 1:
        values[WHOLE] = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return values


def unused(i: int) -> str:
    """The name of an id without a token, as converters write it."""
    return f"[PAD{i}]"


def _typed(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = metadata.get(KEY + key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ValueError(
            f"{KEY}{key} is {str(value)[:40]!r}, not of type {kind.__name__}: the file is damaged"
        )
    return value


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Token and type of every id. Raises ValueError where they are not lists of one length."""
    tokens = _typed(metadata, "tokens", list, None)
    if not tokens:
        raise ValueError(f"the GGUF file has no {KEY}tokens: it was written without a vocabulary")
    types = _typed(metadata, "token_type", list, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"{KEY}token_type has {len(types)} entries for {len(tokens)} tokens: the file is damaged"
        )
    if not all(isinstance(t, str) for t in tokens) or not all(isinstance(t, int) for t in types):
        raise ValueError(f"{KEY}tokens must be strings and {KEY}token_type integers: the file is damaged")
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)]  # llama.cpp's names
    if len(set(tokens)) < len(tokens):
        first: dict[str, int] = {}
        twice = next((t, i) for i, t in enumerate(tokens) if first.setdefault(t, i) != i)
        raise ValueError(f"{KEY}tokens has {twice[0]!r} twice, as {first[twice[0]]} and {twice[1]}")
    return tokens, types


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = _typed(metadata, "merges", list, None)
    if merges is None:
        raise ValueError(f"the GGUF file has no {KEY}merges, which a BPE needs: convert the model again")
    pairs = []
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not (left and space and right):
            raise ValueError(f"{KEY}merges[{i}] is {str(merge)[:40]!r}, not two tokens with a space between")
        pairs.append((left, right))
    return pairs


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    pieces = pre_tokenizer_named(_typed(metadata, "pre", str, "default"))
    vocab = {t: i for i, t in enumerate(tokens) if types[i] != UNUSED or t != unused(i)}
    bpe = models.BPE(vocab=vocab, merges=_merges(metadata), ignore_merges=pieces.ignore_merges)
    tokenizer = Tokenizer(bpe)
    pieces.install(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece merges any two neighbours that form a token, the best score first; here, every such pair
    becomes a merge. A space is U+2581; one is added before a text and after each special token."""
    scores = _typed(metadata, "scores", list, None)
    if scores is None or len(scores) != len(tokens) or not all(isinstance(x, float | int) for x in scores):
        raise ValueError(f"{KEY}scores must be a number for each of the {len(tokens)} tokens")
    if (longest := max(map(len, tokens))) > LONGEST:
        raise ValueError(f"{KEY}tokens has one of {longest:,} characters: the file is damaged")
    vocab = {t: i for i, t in enumerate(tokens)}
    splits = (
        (-scores[i], vocab[t[:k]], vocab[t[k:]], (t[:k], t[k:]))
        for t, i in vocab.items()
        if types[i] in (NORMAL, USER_DEFINED)
        for k in range(1, len(t))
        if t[:k] in vocab and t[k:] in vocab
    )
    merges = [pair for *_, pair in sorted(splits)]
    unknown = next((t for i, t in enumerate(tokens) if types[i] == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    first = [normalizers.Prepend("\u2581")] if _typed(metadata, "add_space_prefix", bool, True) else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if first else []
    spaces = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _add_surroundings(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Add the begin and end tokens that the file asks for. Without a statement, kinds of vocabulary that were
    always used with a begin token get one."""
    ids = special_ids(metadata)
    name = _typed(metadata, "pre", str, "default")
    usual = metadata[f"{KEY}model"] == "llama" or (name in NAMED and NAMED[name].bos)
    parts, used = ["$A"], []
    if _typed(metadata, "add_bos_token", bool, usual) and ids.bos is not None:
        parts, used = [tokens[ids.bos], *parts], [(tokens[ids.bos], ids.bos)]
    if _typed(metadata, "add_eos_token", bool, False) and ids.eos is not None:
        parts, used = [*parts, tokens[ids.eos]], [*used, (tokens[ids.eos], ids.eos)]
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=used)


def _whole(text: Any, tokens: list[str], types: list[int]) -> Tokenizer:
    if not isinstance(text, str):
        raise ValueError(f"{WHOLE} is of type {type(text).__name__}, not a string: the file is damaged")
    tokenizer = parse_tokenizer(text, WHOLE)
    held = tokenizer.get_vocab()
    wanted = {t: i for i, t in enumerate(tokens) if types[i] != UNUSED}
    if wanted != held:
        odd = next(iter(dict(wanted.items() ^ held.items())))
        raise ValueError(
            f"the file's {WHOLE} and {KEY}tokens are not one vocabulary: {odd!r} is {held.get(odd)} in the "
            f"one and {wanted.get(odd)} in the other; convert the model again"
        )
    return tokenizer


def _names(rule: PreTokenizer, values: dict[str, Any]) -> list[str]:
    """The pre-tokenizers with the same splits, normalisation and treatment of whole-word tokens: by the same
    rule, or because the merges lead to every token anyway."""
    same = [n for n, p in NAMED.items() if (p.splits, p.nfc) == (rule.splits, rule.nfc)]
    exact = [n for n in same if NAMED[n].ignore_merges == rule.ignore_merges]
    return exact or (same if same and _merges_reach_all(values) else [])


def _merges_reach_all(values: dict[str, Any]) -> bool:
    """All but added tokens, which are found before anything is merged."""
    pairs = [m.split(" ") if isinstance(m, str) else m for m in values["model"]["merges"]]
    vocab = values["model"]["vocab"]
    bpe = models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs])
    merged = vocab.keys() - {t["content"] for t in values["added_tokens"]}
    return all(len(bpe.tokenize(token)) == 1 for token in merged)


def _expressible(values: dict[str, Any]) -> bool:
    """False for properties of a tokenizer.json that `tokenizer.ggml.*` does not have."""
    kinds = ["lstrip", "rstrip", "single_word"] + (["normalized"] if values["normalizer"] else [])
    odd_model = ("unk_token", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return not (
        any(t[kind] for t in values["added_tokens"] for kind in kinds)
        or any(values["model"].get(key) for key in odd_model)
        or (values["decoder"] or {}).get("type") != "ByteLevel"
    )
