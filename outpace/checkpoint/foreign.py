"""Formats that are recognised and not read: each is refused with the command that makes one that is."""

import struct
from pathlib import Path
from reprlib import repr  # short, however long or deep the value

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.strict_json import read_object

METAL_MAGIC = b"GPT-OSS v1.0\0\0\0\0"  # openai/gpt-oss, gpt_oss/metal
PUBLISHED = {24: "openai/gpt-oss-20b", 36: "openai/gpt-oss-120b"}  # by number of layers
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def foreign_file(path: Path) -> LoadError:
    """What to say of a file that is neither a folder nor a GGUF file."""
    if is_metal(path):
        return _metal(path)
    if path.suffix == ".safetensors":
        return LoadError(f"{path} is one file of a checkpoint: name its folder, {path.parent}", "one_file")
    if path.suffix in PICKLES:
        return _pickle(path)
    return LoadError(
        f"{path} is no checkpoint: name a folder of HF safetensors, or a GGUF file", "no_weights"
    )


def foreign_folder(folder: Path) -> LoadError | None:
    """What to say of a folder without HF's files, where something else in it is recognised."""
    for path in (folder / "model.bin", folder / "metal" / "model.bin"):
        if is_metal(path):
            return _metal(path)
    if (folder / "adapter_config.json").is_file():
        return _adapter(folder)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            return _pickle(folder / name)
    for inner in (folder, folder / "original"):
        if any(inner.glob("consolidated.*.pth")):
            return LoadError(
                f"{inner} holds Meta's own files (consolidated.*.pth): fetch the safetensors of the same "
                "repository, `hf download REPOSITORY --exclude 'original/*' --local-dir FOLDER`",
                "original",
            )
    files = sorted(folder.glob("*.gguf"))
    if files:
        several = f" and {len(files) - 1} more GGUF files" if len(files) > 1 else ", a GGUF file"
        return LoadError(f"{folder} holds {files[0].name}{several}: name the file itself", "gguf_folder")
    if (folder / "original").is_dir() and any((folder / "original").glob("*.safetensors")):
        return openai_layout(folder / "original")
    return None


def openai_names(names: list[str]) -> bool:
    """True for OpenAI's own layout of gpt-oss, published alongside HF's in `original/`."""
    return any(name.startswith("block.0.attn.") for name in names) and "unembedding.weight" in names


def is_metal(path: Path) -> bool:
    """True for the file of OpenAI's Metal implementation."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(METAL_MAGIC)) == METAL_MAGIC


def _metal(path: Path) -> LoadError:
    """After the magic come a UUID of 16 bytes, the context length and the number of layers (uint32)."""
    with path.open("rb") as file:
        head = file.read(40)
    layers = struct.unpack_from("<I", head, 36)[0] if len(head) == 40 else 0
    return LoadError(
        f"{path} is a model.bin of OpenAI's Metal implementation (q and k permuted and scaled, the "
        f"vocabulary cut), which is not read: {_fetch(PUBLISHED.get(layers))}",
        "metal",
    )


def openai_layout(folder: Path) -> LoadError:
    return LoadError(
        f"{folder} holds gpt-oss in OpenAI's own layout (block.0.attn.qkv ..), which is not read: "
        f"its parent folder may hold HF's layout; else {_fetch(None)}",
        "original",
    )


def _fetch(repository: str | None) -> str:
    name = repository or " or ".join(PUBLISHED.values())
    command = f"hf download {repository or 'openai/gpt-oss-20b'} --local-dir FOLDER"
    return f"fetch {name} as safetensors, `{command} --exclude 'original/*' --exclude 'metal/*'`"


def _pickle(path: Path) -> LoadError:
    return LoadError(
        f"{path} is a pickle, which is not read (unpickling runs code); convert it: "
        '`python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{path.parent}', dtype='auto').save_pretrained('OUT')\"`",
        "pickle",
    )


def _adapter(folder: Path) -> LoadError:
    base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
    of = repr(base) if base else "another model"
    return LoadError(
        f"{folder} holds an adapter (LoRA) of {of}, not a model; merge the two: "
        '`python -c "from peft import AutoPeftModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').merge_and_unload().save_pretrained('OUT')\"`",
        "adapter",
    )
