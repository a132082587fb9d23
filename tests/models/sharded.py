"""Targets over all processes that torchrun starts, checked from inside: `sharded.py FOLDER TARGET ..`.

Writes what each process generated to FOLDER/process-N.json. With the target "default", the command line too;
then process 1 kills itself within a generation."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "decode")]
import tiny
import torch
from dflash_drafts import random_dflash
from scripted import Scripted

import outpace
from outpace.cli.main import main
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.drafts.tree import DDTree
from outpace.formats.convert import write_gguf
from outpace.kv.partial import PartialConfig
from outpace.kv.tree import Tree
from outpace.models.load import build, fingerprint, load_target, named_tensors
from outpace.models.native_step import why_modules
from outpace.models.save import save_target
from outpace.ops.ranks import join
from outpace.ops.rope import RopeConfig
from outpace.ops.sampling import Sampling

PROMPTS = [tiny.tokens(n, seed=n).tolist() for n in (23, 5, 12)]
NEW = 24  # past the windows of 7
SAMPLED = Request(max_new_tokens=NEW, sampling=Sampling(temperature=1.0), rule="gumbel")
EXPERTS = {"num_experts": 6}  # the kernels take heads of a multiple of 8
GGUF = {"num_heads": 4, "head_dim": 48, "intermediate_size": 64}  # parts of whole blocks of 32
TARGETS: dict[int, dict[str, dict[str, Any]]] = {  # of two processes, of three
    2: {
        "gpt_oss": EXPERTS,
        "llama": {"attention_bias": True, "mlp_bias": True},
        "qwen3_moe": EXPERTS | {"head_dim": 24},
        "llama.gguf": GGUF | {"hidden_size": 96},
        "gpt_oss.gguf": GGUF | EXPERTS,
    },
    3: {"qwen3": {"head_dim": 16, "intermediate_size": 60}},
}
TEXT, LENGTH = "def fibonacci(n):", 24
CACHE = {"samples": 2, "prompt_tokens": "[9,9]", "response_tokens": "[5,5]", "batch": 2}
COMMANDS = {
    "generate": ["default", TEXT, "-n", str(LENGTH), "--json", "--timing", "--draft", "dflash"],
    "teacher": ["build", *(word for name, value in CACHE.items() for word in ("--set", f"{name}={value}"))],
}


def save(name, folder, **changes):
    """A random target of the family, gpt-oss's experts in MXFP4; in a GGUF file other matrices in Q8_0."""
    family, _, gguf = name.partition(".")
    model = build(tiny.config(family, window=family != "llama", **changes))
    tiny.randomise(named_tensors(model))
    model = tiny.in_mxfp4(model) if family == "gpt_oss" else model.eval()
    if gguf:
        write_gguf(model, folder / name, type="q8_0")
    else:
        save_target(model, folder / name)


def texts(target):
    """Greedy and sampled, without a draft."""
    plain = generate(target, PROMPTS, Request(max_new_tokens=NEW)).tokens
    return plain, generate(target, PROMPTS, SAMPLED, rng=torch.Generator().manual_seed(3)).tokens


def wrong_often(row, position):
    return (position * 7 + row * 3) % 11 < 4


def check_speculation(target, plain, sampled):
    """Chains and trees, of drafts that are often wrong."""
    dflash = random_dflash(target, rope=RopeConfig(theta=700.0)).bind(target)
    for draft in (Scripted(plain, PROMPTS, wrong_often, ragged=True), dflash, DDTree(dflash, 7, 3)):
        got = generate(target, PROMPTS, Request(max_new_tokens=NEW), draft)
        assert got.tokens == plain, type(draft)
    assert generate(target, PROMPTS, SAMPLED, dflash, rng=torch.Generator().manual_seed(3)).tokens == sampled


@torch.inference_mode()
def check_bits(target):
    """A verify pass has the bits of steps of one token, and a native step those of the modules."""
    tokens = tiny.tokens(3, 16)
    once, each = (target.make_cache(3, 40, slack=8) for _ in range(2))
    for cache in (once, each):
        target(tokens[:, :11], cache)
    whole = target(tokens[:, 11:], once, logits=True).logits
    steps = [target(tokens[:, i : i + 1], each, logits=True).logits for i in range(11, 16)]
    assert torch.equal(whole, torch.cat(steps, 1))
    row = target.make_cache(1, 40, slack=8)
    target(tokens[1:2, :11], row)
    tree = target(tokens[1:2, 11:], row, tree=Tree(torch.tensor([[0, 0, 1, 2, 3]])), logits=True).logits
    assert torch.equal(tree[0], whole[1])
    assert why_modules(target, once) is None
    target.native, modules = False, target.make_cache(3, 40, slack=8)
    target(tokens[:, :11], modules)
    assert torch.equal(target(tokens[:, 11:], modules, logits=True).logits, whole)
    target.native = True


def check_package(folder):
    """The API and the commands, over the embedded target -> their outputs."""
    model = outpace.load("default", tensor_parallel_size=2)
    limit = outpace.SamplingParams(max_tokens=LENGTH)
    plain = outpace.generate(model, TEXT, draft=False, sampling=limit).tokens
    assert outpace.generate(model, TEXT, sampling=limit).tokens == plain
    config = PartialConfig(block_size=4, n_retrieval_blocks=2, n_sink_blocks=1, n_window_blocks=1)
    draft = outpace.load_draft("dflash", model)
    pieces = outpace.stream(model, TEXT, draft=draft, sampling=limit, partial=Partial(config=config))
    assert [piece.token for piece in pieces] == plain
    free = outpace.SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=None)
    unseeded = outpace.generate(model, TEXT, sampling=free).tokens
    for command, words in COMMANDS.items():
        out = ["--out", str(folder / "cache")] if command == "teacher" else []
        sys.argv = ["outpace", command, *words, *out, "--tensor-parallel-size", "2"]
        try:
            main()
        except SystemExit as ended:
            assert not ended.code
    return {"plain": plain, "unseeded": unseeded, "fingerprint": fingerprint(model.target)}


def killed(row, tokens):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    group = join(int(os.environ["WORLD_SIZE"]))
    results = {}
    for name in names:
        if name == "default":
            results[name] = check_package(folder)
            continue
        target = load_target(folder / name, group=group)
        plain, sampled = texts(target)
        check_bits(target)
        check_speculation(target, plain, sampled)
        held = sum(tensor.nbytes for _, tensor in named_tensors(target))
        results[name] = {
            "plain": plain,
            "sampled": sampled,
            "bytes": held,
            "fingerprint": fingerprint(target),
        }
    (folder / f"process-{group.rank}.json").write_text(json.dumps(results))
    if "default" in names:
        generate(target, PROMPTS, Request(max_new_tokens=NEW), on_tokens=killed)
