"""What is fuzzed: for each kind of input a sound sample, the file to damage, the commands that read it."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import draft_samples
import fuzz_mutate as mutate
import torch
from draft_samples import VOCAB
from fuzz_mutate import Mutator
from safetensors.torch import load_file, save

from outpace.formats.export import export_draft

Argv = list[str]
Change = Callable[[random.Random, Path], None]
Run = Callable[..., None]  # a command of outpace in this process; raises where it fails
PROMPT = "def f(n):"


@dataclass(frozen=True)
class Kind:
    """`change` damages the samples in a folder, then one of `commands` runs there. Without commands the
    arguments of `generate` vary."""

    name: str
    change: Change | None = None
    commands: tuple[Argv, ...] = ()

    def draw(self, rng: random.Random) -> Argv:
        return rng.choice(self.commands) if self.commands else flags(rng)


def of(pattern: str, mutator: Mutator) -> Change:
    """A change of the first file that matches, through `mutator`."""

    def change(rng: random.Random, folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        try:
            data = mutator(rng, path.read_bytes())
        except RecursionError:  # nested too deep for json.dumps
            data = b"[" * 100_000
        replace(path, data)

    return change


def replace(path: Path, data: bytes) -> None:
    path.unlink()  # a link to the sample
    path.write_bytes(data)


def forged_shard(rng: random.Random, folder: Path) -> None:
    """A shard of other numbers or shapes, with the checksum to match."""
    path = sorted(folder.glob("cache/**/*.safetensors"))[0]
    tensors = load_file(path)
    for name in rng.sample(sorted(tensors), rng.choice((1, 1, 2))):
        t = tensors[name]
        match rng.randrange(6):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = t.flatten()
            case 2:
                tensors[name] = t[: rng.randrange(len(t) + 1)]
            case 3:
                tensors[name] = t.to(rng.choice((torch.float32, torch.int64, torch.uint8)))
            case 4:
                value = rng.choice((-1, 2**31 - 1, 10**6, 0, VOCAB))
                t.view(-1)[rng.randrange(t.numel())] = value if not t.is_floating_point() else float("nan")
            case 5:
                tensors[name] = torch.cat((t, t))
    replace(path, save({n: t.contiguous() for n, t in tensors.items()}))
    meta = folder / "cache" / "meta.json"
    values = json.loads(meta.read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    values["shards"][0]["sha256"] = digest
    replace(meta, json.dumps(values).encode())


def generate(*more: str, tokens: int = 4, model: str = "target") -> Argv:
    return ["generate", model, PROMPT, "-n", str(tokens), "--speculate", "always", "--json", *more]


def commands(*argvs: Argv) -> tuple[Argv, ...]:
    return argvs


def plain(model: str) -> Argv:
    return ["generate", model, PROMPT, "-n", "2", "--draft", "none", "--json"]


CHAT = ["generate", "chat-target", "hi there", "--chat", "-n", "2", "--draft", "none", "--json"]
FAST = [x for s in ("rows=1", "eval_prompts=0", "anchors=3") for x in ("--set", s)]
TRAIN = ["train", "dflash", "target", "--cache", "cache", "--corpus", "corpus"]
CONTINUE = [*TRAIN, "--out", "run", "--recipe", "recipe.toml", "--set", "steps=3"]

TEMPLATES = [
    "{{ messages[0].content }}",
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}",
    "{{ ('%(' * 200000) % 1 }}",
    "{{ range(10**9) | list | length }}",
    "{{ 'x' * 10**10 }}",
    "{{ (10**10**9) // 3 }}",
    "{% set l = [range(10**6)|list]|list %}{{ 5 | select('in', l) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a in [b] }}{% endfor %}{% endfor %}",
    "{{ 'a' | indent('x' * 16000) * 100000 }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '{0:9999999999}'.format(1) }}",
    "{{ (2**64).to_bytes(10**10) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ '\x1b[31m' }}{{ raise_exception('\x1b[31mred') }}",
    "{% set n = namespace(x=[]) %}{% for i in range(30) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "(" * 5000,
    "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "{{ messages[0].content | replace('', 'x' * 1000) * 10**6 }}",
    "{% include '/etc/passwd' %}",
]
FRAGMENTS = [
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{% if tools %}",
        "{% endif %}",
        "| tojson",
    ),
    *("{{ bos_token }}", "* 10**8", "| list", "range(10**7)", "% ()", "{% set x = [x, x] %}", "{{ x }}"),
    *(
        "|join('x'*10**6)",
        "[::-1]",
        "**",
        "//0",
        "{{ strftime_now('%Y' * 10**6) }}",
        "<|im_start|>",
        "\x1b[2J",
    ),
]


def template(rng: random.Random, data: bytes) -> bytes:
    """A hostile template, or a damaged one, as tokenizer_config.json has it."""
    text = rng.choice(TEMPLATES)
    if rng.random() < 0.5:
        text = "".join(rng.choice((text, *FRAGMENTS)) for _ in range(rng.randrange(1, 8)))
    if rng.random() < 0.3:
        text = mutate.garbled(rng, text)
    return json.dumps(json.loads(data) | {"chat_template": text}).encode("utf-8", "surrogatepass")


FLAGS = {
    "--temperature": ("0", "1", "1e-45", "1e-300", "1e308", "-1", "nan", "inf", "x"),
    "--repetition-penalty": ("1e-300", "0", "-1", "1e308", "nan", "2"),
    "--presence-penalty": ("3", "-2", "nan", "2"),
    "--frequency-penalty": ("1e9", "-2", "inf"),
    "--top-k": ("-1", "0", "1", "999999999999", "9" * 30),
    "--top-p": ("0", "1e-320", "0.5", "2", "nan"),
    "--min-p": ("-1", "0", "1", "1e308", "nan"),
    "--seed": ("-1", "0", str(2**32), str(2**63), str(2**64 - 1), str(2**64), "9" * 40),
    "--max-tokens": ("-1", "0", "1", "3", "9" * 20),
    "--num-speculative-tokens": ("-1", "0", "1", "3", "999999", "9" * 25),
    "--num-draft-tokens": ("-5", "1", "6", "100000"),
    "--num-steps": ("-1", "2", "99999"),
    "--topk": ("-1", "2", "99999999"),
    "--kv-budget": ("-1", "1", "64", "1000000000", "9" * 20),
    "--kv-budget-set": ("selector=recent", "selector=x", "a", "=", "n_sinks=-1", "block_size=0"),
    "--acceptance": ("match", "rejection", "block", "gumbel", "nothing", ""),
    "--draft": ("ngram", "none", "draft-zlab", "nothing", "/dev/null", "", "\udcff"),
    "--speculate": ("auto", "always", "off", "x"),
    "--prefill-chunk": ("-1", "0", "1", "7", "9" * 20),
    "--layers": ("-1", "0", "1", "2", "99"),
    "--top-logits": ("-1", "0", "3", "99999999"),
    "--draft-temperature": ("0", "1e-45", "nan", "-1"),
    "--draft-quant": ("q8_0", "q4", ""),
    "--prompt-file": ("prompt.txt", "binary.txt", "nothing.txt", ".", "/dev/null"),
}


def flags(rng: random.Random) -> Argv:
    chosen = [
        x for name in rng.sample(sorted(FLAGS), rng.randrange(1, 5)) for x in (name, rng.choice(FLAGS[name]))
    ]
    prompt = rng.choice((PROMPT, "", "x", "é中\U0001f642", "\udcff\udcfe", "a " * 3000, "\x00"))
    given = [] if "--prompt-file" in chosen and rng.random() < 0.8 else [prompt]
    tokens = [] if "--max-tokens" in chosen else ["-n", "3"]
    return ["generate", "target", *given, *tokens, "--json", *chosen]


DRAFTS = {
    "zlab": "dflash",
    "speculators": "dflash",
    "transformers": "dflash",
    "gguf": "dflash",
    "sglang-eagle3": "eagle3",
    "speculators-eagle3": "eagle3",
    "gguf-eagle3": "eagle3",
}


def draft_name(to: str) -> str:
    return f"draft-{to}" + (".gguf" if to.startswith("gguf") else "")


def draft_kinds() -> list[Kind]:
    kinds = []
    for to in DRAFTS:
        name = draft_name(to)
        readers = commands(
            ["preflight", name, "--target", "target", "--json"],
            generate("--draft", name),
            ["import", name, "--target", "target", "--out", "imported"],
        )
        if to.startswith("gguf"):
            kinds.append(Kind(f"draft {to}", of(name, mutate.front_damaged), readers))
        else:
            kinds.append(Kind(f"draft {to} config", of(f"{name}/config.json", mutate.json_mutated), readers))
            weights = f"{name}/model.safetensors"
            kinds.append(Kind(f"draft {to} weights", of(weights, mutate.safetensors_mutated), readers))
    return kinds


KINDS = [
    Kind("target config", of("target/config.json", mutate.json_mutated),
         commands(plain("target"), ["inspect", "target", "--json"], ["plan", "target", "--json"])),
    Kind("target weights", of("target/model.safetensors", mutate.safetensors_mutated),
         commands(plain("target"), ["inspect", "target", "--scan", "--json"])),
    Kind("tokenizer", of("target/tokenizer.json", mutate.json_mutated), commands(plain("target"))),
    Kind("chat template", of("chat-target/tokenizer_config.json", template), commands(CHAT)),
    Kind("tokenizer config", of("chat-target/tokenizer_config.json", mutate.json_mutated), commands(CHAT)),
    Kind("gguf", of("target.gguf", mutate.front_damaged),
         commands(plain("target.gguf"), ["inspect", "target.gguf", "--json"])),
    *draft_kinds(),
    Kind("suffix index", of("suffix/draft/model.safetensors", mutate.safetensors_mutated),
         commands(generate("--draft", "suffix/draft"))),
    Kind("suffix config", of("suffix/draft/config.json", mutate.json_mutated),
         commands(generate("--draft", "suffix/draft"))),
    Kind("cache meta", of("cache/meta.json", mutate.json_mutated),
         commands(["teacher", "info", "cache", "--json"], ["teacher", "verify", "cache"],
                [*TRAIN, "--out", "new", *FAST, "--set", "steps=1"])),
    Kind("cache shard", of("cache/**/*.safetensors", mutate.safetensors_mutated),
         commands(["teacher", "verify", "cache"], [*TRAIN, "--out", "new", *FAST, "--set", "steps=1"])),
    Kind("forged shard", forged_shard,
         commands([*TRAIN, "--out", "new", *FAST, "--set", "steps=1"], ["teacher", "verify", "cache"])),
    Kind("training checkpoint", of("run/checkpoint.pt", mutate.damaged),
         commands(CONTINUE)),
    Kind("training log", of("run/log.jsonl", mutate.jsonl_mutated),
         commands(CONTINUE)),
    Kind("recipe", of("recipe.toml", mutate.toml_mutated),
         commands([*TRAIN, "--out", "new", "--recipe", "recipe.toml", "--set", "steps=1"])),
    Kind("conversations", of("chats.jsonl", mutate.jsonl_mutated),
         commands(["rows", "default", "chats.jsonl", "--json"])),
    Kind("tools", of("tools.json", mutate.json_mutated),
         commands(["chat", "default", "-m", "hi", "-n", "2", "--tools", "tools.json", "--json"])),
    Kind("flags"),
]  # fmt: skip

RECIPE = """\
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
intermediate_size = 16
block_size = 4
anchors = 3
rows = 1
steps = 1
lr = 2e-3
weights = "dpace"
bfloat16 = false
save_every = 1
eval_every = 1
eval_prompts = 0
seed = 1
"""
TOOL = {
    "name": "get_weather",
    "description": "Weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "A city."},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["place"],
    },
}
CONVERSATION = {
    "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "thinking": "Look it up.",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"place": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}


def make_samples(folder: Path, run: Run) -> None:
    """Every sound sample in `folder`, the working directory."""
    draft_samples.target_folder(folder / "target")
    chat_target(folder / "target", folder / "chat-target")
    run("convert", "target", "target.gguf")
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(12):
        (corpus / f"{i}.py").write_text("".join(f"def f{i}_{k}(n):\n    return n + {k}\n" for k in range(40)))
    small = ("samples=3", "prompt_tokens=[8, 12]", "response_tokens=[6, 8]", "shard_samples=3")
    build = ["teacher", "build", "target", "--out", "cache", "--corpus", "corpus"]
    run(*build, *(x for s in small for x in ("--set", s)))
    (folder / "recipe.toml").write_text(RECIPE)
    run(*TRAIN, "--out", "run", "--recipe", "recipe.toml")
    run("train", "suffix", "target", "--cache", "cache", "--out", "suffix")
    files = draft_samples.target_files(folder / "target")
    for to, kind in DRAFTS.items():
        draft = draft_samples.dflash() if kind == "dflash" else draft_samples.eagle3()
        export_draft(draft, to, folder / draft_name(to), files)
    (folder / "chats.jsonl").write_text((json.dumps(CONVERSATION) + "\n") * 2)
    (folder / "tools.json").write_text(json.dumps([TOOL]))
    (folder / "prompt.txt").write_text(PROMPT)
    (folder / "binary.txt").write_bytes(bytes(range(256)))


def chat_target(target: Path, folder: Path) -> None:
    """The target with a chat template, and without one of Harmony's tokens, so that the template is used. Its
    positions are few: a template may make a prompt as long as they allow, and that is no hang."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|channel|>", "<|topic|>"))
    settings = {"chat_template": TEMPLATES[1], "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def lay_out(base: Path, folder: Path) -> None:
    """The samples in another folder; all but the training run's files are links."""
    for path in sorted(base.rglob("*")):
        place = folder / path.relative_to(base)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif "run" in path.parts:
            shutil.copyfile(path, place)
        else:
            place.symlink_to(path)
