"""A draft on disk -> one that runs, and back: a DFlash into z-lab's format, an EAGLE-3 into SGLang's."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer

from outpace.checkpoint.gguf_header import read_header
from outpace.checkpoint.hf import read_config
from outpace.checkpoint.open import LoadError, is_gguf, to_tensor
from outpace.drafts.dflash import DFlash
from outpace.drafts.eagle3 import Eagle3
from outpace.drafts.lookup import ARCHITECTURE
from outpace.drafts.quantize import check_format, quantised
from outpace.formats import gguf, sglang_eagle3, speculators, transformers, zlab
from outpace.formats.base import Format
from outpace.formats.fields import TokenId
from outpace.formats.spec import (
    DFLASH,
    EAGLE3,
    EMBEDDING,
    HEAD,
    Description,
    DFlashDraft,
    TargetFiles,
    TensorShape,
    converted,
    describe,
    dflash_shapes,
    eagle3_shapes,
    marks,
)
from outpace.models.decoder import Decoder
from outpace.models.load import assign, check_finite, fingerprint, named_tensors
from outpace.models.weights import Entry

LOG = logging.getLogger(__name__)

FORMATS: dict[str, Format] = {
    "zlab": zlab.FORMAT,
    "speculators": speculators.DFLASH_FORMAT,
    "gguf": gguf.DFLASH_FORMAT,
    "transformers": transformers.FORMAT,
    "sglang-eagle3": sglang_eagle3.FORMAT,
    "speculators-eagle3": speculators.EAGLE3_FORMAT,
    "gguf-eagle3": gguf.EAGLE3_FORMAT,
}
CANONICAL = {DFLASH: "zlab", EAGLE3: "sglang-eagle3"}
OF_SPECULATORS = {"dflash": "speculators", "eagle3": "speculators-eagle3", "peagle": "speculators-eagle3"}
OF_GGUF = {"dflash": "gguf", "eagle3": "gguf-eagle3"}
# drafts of other kinds, which look much like these
OTHERS = {
    ARCHITECTURE: "answers that are looked up: it has no weights",
    "DSparkDraftModel": "a DSpark: it has a Markov head",
    "Qwen3DSparkModel": "a DSpark: it has a Markov head",
    "Eagle3Qwen3ForCausalLM": "an EAGLE-3 with q/k norms",
    "EagleLlamaForCausalLM": "an EAGLE-1",
    "LlamaForCausalLMEagle": "an EAGLE-1",
}


def kind_of(draft: Description) -> str:
    return DFLASH if isinstance(draft, DFlashDraft) else EAGLE3


def detect(path: Path) -> str:
    """The name of the format of a draft's files. Raises LoadError for files in none of them."""
    if is_gguf(path):
        architecture = str(read_header(path).metadata.get("general.architecture"))[:60]
        if architecture not in OF_GGUF:
            raise LoadError(f"{path} is a GGUF of {architecture!r}; drafts are 'dflash' or 'eagle3'")
        return OF_GGUF[architecture]
    if path.is_file():
        raise LoadError(f"{path} is a file: name the folder that holds config.json, or a GGUF file")
    hf = read_config(path)
    kind = hf.get("speculators_model_type")
    if kind is not None:
        if not isinstance(kind, str) or kind not in OF_SPECULATORS:
            raise LoadError(f"{path}: speculators' {str(kind)[:60]!r} is neither a DFlash nor an EAGLE-3")
        return OF_SPECULATORS[kind]
    if hf.get("model_type") == transformers.MODEL_TYPE:
        return "transformers"
    architectures = hf.get("architectures") or [""]
    architecture = str(architectures[0])[:60] if isinstance(architectures, list) else ""
    if architecture in zlab.ARCHITECTURES:
        return "zlab"
    if architecture in sglang_eagle3.ARCHITECTURES:
        return "sglang-eagle3"
    other = f" ({OTHERS[architecture]})" if architecture in OTHERS else ""
    raise LoadError(
        f"{path}: architectures [{architecture!r}]{other} is no draft that is known here; known are DFlash "
        f"and EAGLE-3, in the formats {', '.join(FORMATS)}"
    )


def read_draft(
    path: Path, target: TargetFiles | None = None, token_id: TokenId | None = None
) -> tuple[str, Description, list[str]]:
    """(format, draft, notes on its files). `token_id` finds a MASK that is named by its text; default: in the
    target's tokenizer. Raises LoadError or ValueError."""
    name = detect(path)
    if token_id is None and target is not None:
        files = target
        token_id = lambda token: files.tokenizer().token_to_id(token)  # noqa: E731
    draft, notes = FORMATS[name].read(path, target, token_id)
    return name, draft, notes


def weight_map(shapes: Mapping[str, TensorShape]) -> list[Entry]:
    """The parameters of the module, and the tensors of a file that each joins: q, k and v are one matrix on
    our side, and so are gate and up. `shapes`: of z-lab's names, or SGLang's."""
    joined: dict[str, list[str]] = {}
    for name in shapes:
        param = name.replace("midlayer.", "layers.0.").replace("markov_w1.weight", "markov_w1")
        param = re.sub(r"self_attn\.[qkv]_proj", "qkv_proj", param).replace("self_attn.", "")
        param = re.sub(r"mlp\.(gate|up)_proj", "mlp.gate_up_proj", param)
        if name != "t2d":  # it follows from d2t
            joined.setdefault(param, []).append(name)
    return [
        Entry(param, tuple(names), tuple(shapes[name][0] for name in names) if len(names) > 1 else ())
        for param, names in joined.items()
    ]


def load_draft(
    path: Path | str,
    tokenizer: Tokenizer | None = None,
    target: TargetFiles | None = None,
    *,
    quantize: str | None = None,
) -> DFlash | Eagle3:
    """A draft in any format. Raises LoadError where tensors are missing, left over or misshapen (`fc` is
    checked against the number of layers it reads), where the config contradicts itself, where a DFlash's MASK
    token cannot be resolved, where an EAGLE-3 leaves its layers to the depth of a target that is not
    given, and where it was made for another target (`check_target`). An EAGLE-3's embedding or head that is a
    copy of the target's is not kept. `quantize` "q8_0" packs a draft's matrices in 8-bit blocks; ValueError
    for another, and where blocks divide no row of it."""
    path = Path(path)
    check_format(quantize)
    # a DFlash has neither embedding nor head to compare
    files = None if FORMATS[detect(path)].kind == DFLASH else target
    value = read_draft(path, files, None if tokenizer is None else tokenizer.token_to_id)[1]
    check_finite(f"{path}", value.tensors.items())
    check_target(path, value, target)
    draft = build_draft(value)
    return draft if quantize is None else quantised(draft, quantize)


def check_target(path: Path, draft: Description, target: TargetFiles | None) -> None:
    """Raises LoadError where the draft was made for another target than `target`, by the fingerprints of
    their weights; logs a warning where the draft has none, which costs no hashing."""
    if target is None or target.fingerprints is None:
        return
    if not draft.target_fingerprint:
        LOG.warning(
            "%s does not name its target by fingerprint: check that it is %s's draft", path, target.path
        )
        return
    actual = target.fingerprints()
    if draft.target_fingerprint not in actual:
        raise LoadError(
            f"{path} was made for the target with fingerprint {draft.target_fingerprint[:12]}, and "
            f"{target.path} has {actual[0][:12]}: name the draft of this target. If {target.path} is a "
            "conversion of the draft's target, bind the draft to it: outpace import DRAFT --target MODEL "
            "--out NEW"
        )


def load_dflash(
    path: Path | str,
    tokenizer: Tokenizer | None = None,
    target: TargetFiles | None = None,
    *,
    quantize: str | None = None,
) -> DFlash:
    """`load_draft` for callers that can use nothing but a DFlash; raises LoadError for another kind too."""
    if FORMATS[detect(Path(path))].kind != DFLASH:
        raise LoadError(f"{path} is an EAGLE-3, where a DFlash is needed")
    draft = load_draft(path, tokenizer, target, quantize=quantize)
    assert isinstance(draft, DFlash)
    return draft


_FINGERPRINTS: WeakKeyDictionary[Decoder, list[str]] = WeakKeyDictionary()


def target_fingerprints(target: Decoder) -> list[str]:
    """Those that a draft of this target may carry: its own, and of a retrofit that of the original. Hashed
    once per target."""
    if target not in _FINGERPRINTS:
        values = (fingerprint(target), fingerprint(target, retrofits=False))
        _FINGERPRINTS[target] = list(dict.fromkeys(values))
    return _FINGERPRINTS[target]


def build_draft(description: Description) -> DFlash | Eagle3:
    """A description -> the module."""
    tensors = description.tensors
    with torch.device("meta"):
        if isinstance(description, DFlashDraft):
            draft: DFlash | Eagle3 = DFlash(description.config)
        else:
            draft = Eagle3(
                description.config,
                own_embedding=description.own_embedding,
                own_head=description.own_head,
                mapped="d2t" in tensors,
            )
    for entry in weight_map({name: tuple(t.shape) for name, t in tensors.items()}):
        assign(draft, entry.param, entry.join([to_tensor(tensors[name]) for name in entry.names]))
    return draft.eval()


def describe_draft(draft: DFlash | Eagle3, dtype: torch.dtype | None = None) -> Description:
    """The module -> what any format can be written from; `dtype` None keeps each tensor's precision."""
    ours = dict(named_tensors(draft))
    if isinstance(draft, DFlash):
        shapes, ids = dflash_shapes(draft.config), None
        if draft.d2t is not None:
            ids = draft.d2t + torch.arange(len(draft.d2t))
    else:
        ids = draft.target_ids()
        shapes = eagle3_shapes(
            draft.config, embedding=EMBEDDING in ours, head=HEAD in ours, mapped=ids is not None
        )
    tensors = {
        name: part.contiguous()
        for entry in weight_map(shapes)
        for name, part in zip(entry.names, entry.split(ours[entry.param].detach()), strict=True)
    }
    if ids is not None:
        tensors["t2d"] = marks(ids, draft.config.vocab_size)
    return describe(draft.config, converted(tensors, dtype))


def save_draft(draft: DFlash | Eagle3, folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """A DFlash in z-lab's format, an EAGLE-3 in SGLang's. Embedding and head are written where the draft has
    its own."""
    description = describe_draft(draft, dtype)
    FORMATS[CANONICAL[kind_of(description)]].write(description, Path(folder))
