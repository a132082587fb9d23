"""Pre-tokenizers by their GGUF names: how a text is split before BPE merges.

A GGUF file contains only the name of its rule, in `tokenizer.ggml.pre`. The names and their rules are
llama.cpp's (src/llama-vocab.cpp). Where llama.cpp approximates a model's own tokenizer.json, the rule here is
the model's: letter case outside ASCII and whole-word tokens in `gpt-4o`, letter case in `tekken`, Unicode NFC
in `qwen2`.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Regexes, each applied to the pieces of the ones before it: matches and the gaps between are the pieces.

    `ignore_merges`: a piece that is a token is that token, without merges (tiktoken's rule). `nfc`: text is
    normalised to Unicode NFC first. `bos`: the default of `tokenizer.ggml.add_bos_token`.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    bos: bool = False

    def install(self, tokenizer: Tokenizer) -> None:
        splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in self.splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()


CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# words of a capital and small letters, or of capitals: an inner capital starts a new piece
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITALISED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{SIGNS}|{SPACES}"
NO_CONTRACTIONS = rf"{WORD}|\p{{N}}|{SIGNS}|{SPACES}"
SEED_CODER = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
O200K = f"{CAPITALISED}{CONTRACTION}?|{CAPITALS}{CONTRACTION}?" + rf"|\p{{N}}{{1,3}}|{SIGNS_SLASH}|{SPACES}"
TEKKEN = rf"{CAPITALISED}|{CAPITALS}|\p{{N}}|{SIGNS_SLASH}|{SPACES}"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
DIGIT, DIGITS, THREE_DIGITS = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# the letters with case, range by range, of DeepSeek LLM's tokenizer.json
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    EAST_ASIAN,
    DIGITS,
)
UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, DIGITS, "[0-9][0-9][0-9]")

# Of names with one rule, the first is written.
BY_NAMES = {
    "gpt-2 phi-2 mpt olmo gigachat mellum exaone4 trillion": PreTokenizer(splits=(GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": PreTokenizer(splits=(DIGIT, GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0": PreTokenizer(
        splits=(LLAMA3,), ignore_merges=True, bos=True
    ),
    "smaug-bpe dbrx": PreTokenizer(splits=(LLAMA3,)),
    "qwen2": PreTokenizer(splits=(QWEN2,), nfc=True),
    "deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open": PreTokenizer(splits=(QWEN2,)),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer(splits=(O200K,), ignore_merges=True),
    "tekken": PreTokenizer(splits=(TEKKEN,), ignore_merges=True, bos=True),
    "seed-coder": PreTokenizer(splits=(SEED_CODER,)),
    "ufakzeka": PreTokenizer(splits=(NO_CONTRACTIONS,)),
    "minicpm5": PreTokenizer(splits=(THREE_DIGITS, LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "deepseek-llm": PreTokenizer(splits=DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, DIGIT)),
    "deepseek-v3": PreTokenizer(splits=(THREE_DIGITS, HAN_AND_KANA, DEEPSEEK3)),
    "bloom poro-chat": PreTokenizer(splits=(BLOOM,)),
    "viking": PreTokenizer(splits=(BLOOM, DIGIT)),
    "default": PreTokenizer(splits=UNNAMED),
}
NAMED = {name: rule for names, rule in BY_NAMES.items() for name in names.split()}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """Raises ValueError for an unknown name."""
    if name not in NAMED:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}; known: {', '.join(sorted(NAMED))}. Use the model's safetensors "
            "folder; its tokenizer.json contains the rule itself"
        )
    return NAMED[name]


def pre_tokenizer_of(values: dict[str, Any]) -> PreTokenizer:
    """The rule of a byte-level tokenizer.json. Raises ValueError for anything but byte-level BPE."""
    splits: list[str] = []
    to_bytes = False
    for step in _flat(values["pre_tokenizer"], "pretokenizers"):
        kind, pattern = step["type"], step.get("pattern") or {}
        if kind == "Split" and "Regex" in pattern and step["behavior"] == "Isolated":
            splits.append(_escaped(pattern["Regex"]))
        elif kind == "Digits":
            splits.append(DIGIT if step["individual_digits"] else DIGITS)
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            splits += [GPT2] if step["use_regex"] else []
            to_bytes = True
        else:
            raise ValueError(f"its pre-tokenizer has the step {json.dumps(step)}, for which GGUF has no name")
    forms = [step["type"] for step in _flat(values["normalizer"], "normalizers")]
    if not to_bytes or values["model"]["type"] != "BPE" or forms not in ([], ["NFC"]):
        raise ValueError(
            f"it is a {values['model']['type']} model on {'bytes' if to_bytes else 'characters'} after the "
            f"normalizers {forms}; only byte-level BPE can be written, with NFC or none"
        )
    return PreTokenizer(
        splits=tuple(splits), ignore_merges=values["model"]["ignore_merges"], nfc=forms == ["NFC"]
    )


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [one for part in step[inner] for one in _flat(part, inner)] if inner in step else [step]


def _escaped(regex: str) -> str:
    return regex.replace("\r", r"\r").replace("\n", r"\n")
