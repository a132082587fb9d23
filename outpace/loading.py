"""Paths or names -> target, draft, tokenizer.

The names of what ships in the package are in `checkpoint/shipped.py`.
"""

import datetime
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.open import Checkpoint, open_checkpoint
from outpace.checkpoint.shipped import draft_path, target_path
from outpace.checkpoint.tokenizer import generation_stops, open_template, open_tokenizer
from outpace.decode.exactness import why_inexact
from outpace.drafts.dflash import BoundDFlash, DFlash
from outpace.drafts.eagle3 import Eagle3
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.drafts.lookup import NODES, NGram, Suffix, is_suffix, load_suffix
from outpace.drafts.tree import DDTree
from outpace.formats.load import load_dflash, load_draft, target_fingerprints
from outpace.formats.spec import TargetFiles
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.decoder import Decoder
from outpace.models.load import first_layers, layout_of, load_target, parse_config
from outpace.models.memory import check_memory
from outpace.ops.dispatch import product_dtype
from outpace.ops.quant import dense
from outpace.ops.ranks import join
from outpace.text.chat_format import ChatFormat
from outpace.text.gguf_tokenizer import gguf_vocabulary
from outpace.text.harmony import has_harmony_tokens, prompt_ids
from outpace.text.harmony_parser import HarmonyChat
from outpace.text.messages import Developer, System, parse_conversation, parse_tools
from outpace.text.sft_rows import read_lines
from outpace.text.template import TemplateChat
from outpace.text.tokenizer import check_vocabulary

LOG = logging.getLogger("outpace")


def open_target(
    path: str,
    layers: int | None = None,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: torch.dtype | None = None,
    activation_dtype: torch.dtype = torch.float32,
) -> tuple[Decoder, Tokenizer]:
    """`layers`: number of layers to keep, for debugging. `tensor_parallel_size`: number of processes, started
    by torchrun, of which each loads a part. `kv_cache_dtype`: of the target's caches. `activation_dtype`: see
    `Decoder.use_activation_dtype`. Stop tokens of generation_config.json are added.

    Raises ValueError where the tokenizer has ids that the model has no rows for, and where the target or the
    processes that run cannot be divided so.
    """
    group = None if tensor_parallel_size == 1 else join(tensor_parallel_size)  # one each: they may train
    checkpoint = open_checkpoint(target_path(path))
    target, tokenizer = load_target(checkpoint, layers=layers, group=group), open_tokenizer(checkpoint)
    target.kv_cache_dtype = kv_cache_dtype
    target.use_activation_dtype(activation_dtype)
    return _finished(checkpoint, target, tokenizer)


def open_on_device(
    path: str,
    device: torch.device,
    sequences: int,
    length: int,
    layers: int | None,
    deterministic: bool,
    kv_cache_dtype: torch.dtype | None = None,
) -> tuple[GraphTarget, Tokenizer, str | None]:
    """A target on a GPU, with activations of bfloat16; its tokenizer; and why drafts are declined, None where
    they change nothing. Raises ValueError, before anything is loaded, where there is no memory for so many
    sequences of so many tokens."""
    checkpoint = open_checkpoint(target_path(path))
    config, dtype = parse_config(checkpoint.config), product_dtype(device)
    layout = layout_of(checkpoint.names(), config)
    config = config if layers is None else first_layers(config, layers)
    free = torch.cuda.mem_get_info(device)[0]
    check_memory(config, layout, free, sequences, length, dtype, kv_cache_dtype)
    target = load_target(checkpoint, layers=layers, device=device, dtype=dtype)
    target.kv_cache_dtype = kv_cache_dtype
    target, tokenizer = _finished(checkpoint, target, open_tokenizer(checkpoint))
    graphs = GraphTarget(target, deterministic=deterministic)
    declined = why_inexact(graphs, sequences)
    if declined is not None:
        LOG.warning("drafts are not used: %s%s", declined, "" if deterministic else "; try deterministic")
    return graphs, tokenizer, declined


def _finished(checkpoint: Checkpoint, target: Decoder, tokenizer: Tokenizer) -> tuple[Decoder, Tokenizer]:
    check_vocabulary(tokenizer, target.config.vocab_size)
    stops = (*target.config.eos_token_ids, *generation_stops(checkpoint.folder))
    target.config = replace(target.config, eos_token_ids=tuple(dict.fromkeys(stops)))
    return target, tokenizer


def open_draft(
    path: str,
    target: Decoder,
    tokenizer: Tokenizer,
    *,
    num_draft_tokens: int = 0,
    num_steps: int = 0,
    topk: int = 0,
    quantize: str | None = None,
) -> BoundDFlash | BoundEagle3 | DDTree | NGram | Suffix | None:
    """The draft `path`: "none", "ngram", an embedded one (`checkpoint/shipped.py`), or the path of a DFlash
    or EAGLE-3 in any known format, or of a suffix index.

    num_draft_tokens: nodes of the draft tree, root included; 0: a chain, of a suffix index its usual tree.
    num_steps: tokens of an EAGLE-3's longest branch. topk: children per node (EAGLE-3) or candidates per
    position (DFlash). 0: the usual number. quantize: "q8_0" packs its matrices in 8-bit blocks.

    Raises ValueError for options that this kind of draft does not have.
    """
    if not weightless(path, quantize) and is_suffix(draft_path(path)):
        if quantize is not None or num_steps or topk:
            raise ValueError(
                f"{path} is a suffix index, without num_steps, topk and weights to quantize: leave these "
                "out, or name a DFlash or an EAGLE-3"
            )
        return load_suffix(draft_path(path), target.config.vocab_size, num_draft_tokens or NODES)
    if quantize is not None and target.device.type != "cpu":
        raise ValueError(f"draft weights {quantize!r}: packed drafts are for CPUs; leave the format out")
    draft = open_weights(path, target, tokenizer, quantize)
    if draft is not None:
        draft.to(target.device)
        draft.use_activation_dtype(torch.bfloat16)  # the target verifies its tokens
    if isinstance(draft, Eagle3):
        return BoundEagle3(draft, target, TreeShape.of(num_draft_tokens, num_steps, topk))
    if num_steps:
        raise ValueError(f"num_steps {num_steps}: only an EAGLE-3 has it, and {path!r} is none")
    if num_draft_tokens and draft is None:
        raise ValueError(f"num_draft_tokens {num_draft_tokens}: {path!r} proposes no trees")
    if topk and not num_draft_tokens:
        raise ValueError(f"topk {topk}: it is for trees; give num_draft_tokens too")
    if draft is None:
        return NGram() if path == "ngram" else None
    bound = draft.bind(target)
    return DDTree(bound, num_draft_tokens, topk or DDTree.branch) if num_draft_tokens else bound


def open_weights(
    path: str, target: Decoder, tokenizer: Tokenizer, quantize: str | None = None
) -> DFlash | Eagle3 | None:
    """The draft by itself; None for the names that mean no weights. Raises ValueError where these are to
    be packed."""
    if weightless(path, quantize):
        return None
    return load_draft(draft_path(path), tokenizer, loaded_files(target, tokenizer), quantize=quantize)


def open_dflash(
    path: str, tokenizer: Tokenizer, quantize: str | None = None, target: Decoder | None = None
) -> DFlash | None:
    """`open_weights` for callers that can use nothing but a DFlash. Raises LoadError for another kind, and
    for the draft of another target than `target`."""
    if weightless(path, quantize):
        return None
    files = None if target is None else loaded_files(target, tokenizer)
    return load_dflash(draft_path(path), tokenizer, files, quantize=quantize)


def weightless(path: str, quantize: str | None) -> bool:
    if path in ("none", "ngram") and quantize is not None:
        raise ValueError(f"draft weights {quantize!r}: {path!r} has no weights; name a DFlash or an EAGLE-3")
    return path in ("none", "ngram")


def loaded_files(target: Decoder, tokenizer: Tokenizer) -> TargetFiles:
    """A target in memory, as a draft's files ask for it."""
    embedding = target.embed_tokens.weight
    return TargetFiles(
        path="this target",
        config=target.config,
        embedding=lambda: embedding if isinstance(embedding, Tensor) else dense(embedding),
        head=lambda: target.dense_head,
        tokenizer=lambda: tokenizer,
        vocabulary=lambda: gguf_vocabulary(tokenizer, target.config.vocab_size),
        fingerprints=lambda: target_fingerprints(target),
        packed=not (isinstance(target.head, Tensor) and isinstance(embedding, Tensor)),
    )


def open_chat(
    name: str,
    tokenizer: Tokenizer,
    eos: frozenset[int],
    *,
    messages: list[Mapping[str, Any]] | None = None,
    instructions: str | None = None,
    reasoning: str = "medium",
    functions: list[dict[str, Any]] | None = None,
    date: str | None = None,
) -> ChatFormat:
    """A chat in the format of the checkpoint `name`: Harmony if the tokenizer has its tokens, else the chat
    template. It begins with `messages` (as in the OpenAI API), or with `instructions` and `functions`.

    Raises ValueError for a model without a chat format.
    """
    tools = parse_tools(functions, "--tools") if functions else ()
    if has_harmony_tokens(tokenizer):
        system = System(reasoning=reasoning, current_date=date or f"{datetime.date.today():%Y-%m-%d}")
        harmony = HarmonyChat(tokenizer, system, Developer(instructions=instructions, tools=tools))
        if messages is not None:
            given = {"messages": messages, "tools": functions}
            harmony.conversation = parse_conversation(given, system=system)
        return harmony
    template = open_template(open_checkpoint(target_path(name)))
    if template is None:
        raise ValueError(
            f"{name} has neither Harmony's tokens nor a chat template: give a text (outpace generate)"
        )
    wrapped = [f if "function" in f else {"type": "function", "function": f} for f in functions or []]
    chat = TemplateChat(
        tokenizer,
        template,
        eos,
        instructions=instructions,
        tools=wrapped or None,
        reasoning_effort=reasoning,
    )
    if messages is not None:
        chat.messages = [dict(message) for message in messages]
    return chat


def chat_prompts(
    path: Path, name: str, tokenizer: Tokenizer, eos: frozenset[int]
) -> tuple[list[list[int]], frozenset[int]]:
    """A JSONL file of conversations (OpenAI's `messages` and `tools` on every line) -> token ids, in the chat
    format of the checkpoint `name`, of each up to every message of a user or a tool that the model answers;
    and the tokens where an answer ends.

    Raises ValueError that names the file, the line and the field.
    """
    chat = open_chat(name, tokenizer, eos)

    def of_line(value: Any) -> list[list[int]]:
        conversation = parse_conversation(value, system=System(current_date=None))
        if isinstance(chat, HarmonyChat):
            turns = _turns([m.role for m in conversation.messages])
            return [
                prompt_ids(replace(conversation, messages=conversation.messages[:turn]), chat.tokens)
                for turn in turns
            ]
        assert isinstance(chat, TemplateChat)
        messages = value if isinstance(value, list) else value["messages"]
        chat.tools = None if isinstance(value, list) else value.get("tools")
        some = []
        for turn in _turns([m["role"] for m in messages]):
            chat.messages = [dict(m) for m in messages[:turn]]
            some.append(chat.prompt())
        return some

    prompts = [ids for _, some in read_lines(path, of_line) for ids in some]
    if not prompts:
        raise ValueError(f"{path} holds no conversation: write one on every line")
    return prompts, chat.stop


def _turns(roles: list[str]) -> list[int]:
    """How many messages there are up to each that the model answers: the last of a user or a tool before an
    assistant's, or before the end."""
    turns, asked = list[int](), 0
    for i, role in enumerate([*roles, "assistant"]):
        if role in ("user", "tool"):
            asked = i + 1
        elif role == "assistant" and asked:
            turns.append(asked)
            asked = 0
    if not turns:
        raise ValueError("messages: none is a user's or a tool's, so there is nothing to answer")
    return turns
