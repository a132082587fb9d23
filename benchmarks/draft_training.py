"""Training of a DFlash draft: Outpace, speculators and SpecForge on the same texts, in turn.

    make peers          # speculators and SpecForge
    runs/drafts.sh      # makes work/drafts/cache first: answers of the embedded model, with its states
    python -m benchmarks.draft_training --cache work/drafts/cache --out reports/draft-training

All begin with the weights of one plain DFlash (no part of DFlash 2, full attention) and take the same texts
in the same order, the same AdamW and schedule; each draws its own anchors and has its own default loss. Steps
take turns, each engine in its own process: a busy minute meets all, and memory is a process's peak. What
each has trained is read from its own format and decodes held-out problems with our loop, which gives tau.
speculators and SpecForge compute attention with torch's SDPA over a dense mask: FlexAttention, their default,
has no backward on a CPU. In bfloat16 they run under autocast.
"""

import argparse
import multiprocessing
import pickle
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outpace.api import Model, load, load_draft
from outpace.bench.machine import machine, provenance, versions
from outpace.checkpoint.save import write_json
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.formats.export import export_draft, open_target_files
from outpace.formats.load import describe_draft
from outpace.ops.rope import RopeConfig
from outpace.ops.sampling import shuffled
from outpace.tasks.prompts import draw_mixed, harmony_of
from outpace.teacher.store import TeacherCache, TeacherSample
from outpace.text.harmony import prompt_ids
from outpace.train.dflash import DFlashRecipe, DFlashTrainer, init_dflash
from outpace.train.drafts import optimizers
from outpace.train.losses import default_gamma
from outpace.train.trainer import backward, keep_heap, take_step, warmup_cosine

OURS, SPECULATORS, SPECFORGE = "outpace", "speculators", "specforge"
FORMATS = {OURS: "zlab", SPECULATORS: "speculators", SPECFORGE: "zlab"}
LOSSES = {
    OURS: "cross-entropy, D-PACE",
    SPECULATORS: "KL to the target's distribution, decay",
    SPECFORGE: "cross-entropy, decay",
}
WEIGHTS = "model.safetensors"
TURN = 5  # steps before the next engine's turn
ROW = 4  # texts of a step
BLOCK = 8

# of a step's number, samples of the cache and their rows -> the loss
Step = Callable[[int, list[int], list[TeacherSample]], float]


@dataclass(frozen=True)
class Setting:
    """One comparison: so many anchors a step, all texts together."""

    anchors: int
    steps: int
    dtype: str
    threads: int
    cache: Path
    start: Path  # of each format's name, the draft that all begin with

    @property
    def recipe(self) -> DFlashRecipe:
        return DFlashRecipe(
            num_layers=2,
            intermediate_size=768,
            block_size=BLOCK,
            anchors=self.anchors // ROW,
            rows=ROW,
            steps=self.steps,
            lr=2e-3,
            bfloat16=self.dtype == "bfloat16",
        )


def write_start(folder: Path, model: Model, cache: TeacherCache) -> None:
    """The first weights, in every format; with a plain rotary embedding: no peer has this target's YaRN."""
    recipe = Setting(64, 1, "float32", 1, folder, folder).recipe
    config = recipe.config(model.target, model.tokenizer, tuple(cache.meta.target_layer_ids))
    draft = init_dflash(replace(config, rope=RopeConfig(theta=config.rope.theta)), recipe.seed)
    for name in sorted(set(FORMATS.values())):
        export_draft(describe_draft(draft, torch.float32), name, folder / name, open_target_files("default"))


def ours(setting: Setting, model: Model) -> tuple[Step, nn.Module]:
    """The step of `outpace train dflash`."""
    start = load_draft(str(setting.start / FORMATS[OURS]), model)
    cache = TeacherCache.open(setting.cache)
    trainer = DFlashTrainer(setting.recipe, model.target, model.tokenizer, cache, cast(Any, start).draft)

    def loss(n: int, samples: list[int], rows: list[TeacherSample]) -> float:
        return float(backward([lambda: trainer.loss(n, samples, rows)])["loss"])

    return stepping(loss, trainer.draft, setting), trainer.draft


def theirs(loss: Callable[[list[TeacherSample]], Tensor], dtype: str) -> Step:
    def gradients(n: int, samples: list[int], rows: list[TeacherSample]) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(rows)
        value.backward()
        return value.item()

    return gradients


def stepping(loss: Step, network: nn.Module, setting: Setting) -> Step:
    """With the optimizer and schedule of `outpace train`."""
    recipe, learners = setting.recipe, optimizers(network, setting.recipe, ())
    warmup = max(1, round(recipe.steps * recipe.warmup_share))

    def step(n: int, samples: list[int], rows: list[TeacherSample]) -> float:
        for group in learners["adam"].param_groups:
            group["lr"] = recipe.lr * warmup_cosine(n, recipe.steps, warmup)
        value = loss(n, samples, rows)
        take_step(list(network.parameters()), learners.values(), recipe.clip)
        return value

    return step


def by_speculators(setting: Setting, model: Model) -> tuple[Step, nn.Module]:
    """All texts of a step in one row, as its trainer packs them."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.core import DFlashDraftModel

    folder = setting.start / FORMATS[SPECULATORS]
    config = DFlashDraftModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    network = DFlashDraftModel(config)
    network.load_state_dict(load_file(folder / WEIGHTS), strict=False)
    network.verifier_lm_head.weight.data.copy_(model.target.dense_head)
    network.verifier_norm = nn.Identity()  # the cache's final states are behind it
    for part in (network.embed_tokens, network.lm_head, network.verifier_lm_head):
        part.requires_grad_(False)
    kl = resolve_loss_config("kl_div", "eager")
    gamma = default_gamma(BLOCK)

    def loss(rows: list[TeacherSample]) -> Tensor:
        lengths = [len(row.tokens) for row in rows]
        within = torch.cat([torch.arange(length) for length in lengths])
        prompts = torch.cat([torch.full((len(row.tokens),), row.prompt_length) for row in rows])
        finals = [row.final for row in rows if row.final is not None]
        _, value, _ = network(
            torch.cat([row.aux.transpose(0, 1).flatten(1) for row in rows]).float()[None],
            torch.cat([row.tokens for row in rows])[None],
            (within >= prompts).float()[None],
            torch.cat(finals).float()[None],
            torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))[None],
            within[None],
            loss_config=kl,
            gamma=gamma,
            max_anchors=setting.anchors,
        )
        return cast(Tensor, value)

    return stepping(theirs(loss, setting.dtype), network, setting), network


def by_specforge(setting: Setting, model: Model) -> tuple[Step, nn.Module]:
    """Texts are rows of a batch, padded to the longest."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    folder = setting.start / FORMATS[SPECFORGE]
    config = DFlashDraftModel.config_class.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    draft = DFlashDraftModel(config)
    draft.load_state_dict(load_file(folder / WEIGHTS))
    head, embedding = (nn.Linear(1, 1, bias=False), nn.Embedding(1, 1))
    head.weight = nn.Parameter(model.target.dense_head.detach().float(), requires_grad=False)
    everything = torch.arange(model.target.config.vocab_size)
    embedding.weight = nn.Parameter(model.target.embed(everything).float(), requires_grad=False)
    network = OnlineDFlashModel(
        draft,
        head,
        embedding,
        draft.mask_token_id,
        block_size=BLOCK,
        attention_backend="sdpa",
        num_anchors=setting.anchors // ROW,
        loss_decay_gamma=default_gamma(BLOCK),
    )

    def loss(rows: list[TeacherSample]) -> Tensor:
        pad = nn.utils.rnn.pad_sequence
        masks = [(torch.arange(len(row.tokens)) >= row.prompt_length).float() for row in rows]
        value, _, _ = network(
            pad([row.tokens for row in rows], batch_first=True),
            pad([row.aux.transpose(0, 1).flatten(1).float() for row in rows], batch_first=True),
            pad(masks, batch_first=True),
        )
        return cast(Tensor, value)

    return stepping(theirs(loss, setting.dtype), network, setting), draft


MAKERS = {OURS: ours, SPECULATORS: by_speculators, SPECFORGE: by_specforge}


def work(engine: str, setting: Setting, pipe: Connection) -> None:
    """One engine's process: steps on command, then its draft's tensors in a folder of its format."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(setting.recipe.seed)
    if engine == OURS:
        keep_heap()
    step, network = MAKERS[engine](setting, load("default"))
    while not isinstance(command := pickle.loads(pipe.recv_bytes()), Path):
        began = time.perf_counter()
        value = step(*command)
        pipe.send((time.perf_counter() - began, value))
    shutil.copytree(setting.start / FORMATS[engine], command)
    if engine == OURS:
        export_draft(describe_draft(cast(Any, network), torch.float32), FORMATS[OURS], command)
    else:
        stored = load_file(command / WEIGHTS)
        learnt = {k: v.detach().contiguous() for k, v in network.state_dict().items() if k in stored}
        save_file(stored | learnt, command / WEIGHTS, metadata={"format": "pt"})
    pipe.send(peak_gib())


def peak_gib() -> float:
    """Of this process; Linux counts in `ru_maxrss` what its parent held when it began."""
    status = Path("/proc/self/status")
    if status.is_file():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def compare(
    setting: Setting, engines: list[str], model: Model, folder: Path, problems: int
) -> list[dict[str, Any]]:
    """Every engine's steps, in turn -> a row of each. Texts come through the pipes: the pages of a cache that
    a process maps would count as its memory."""
    context = multiprocessing.get_context("spawn")
    cache = TeacherCache.open(setting.cache)
    training, _ = setting.recipe.split(cache)
    pipes, tokens = {}, list[int]()
    done: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
    for engine in engines:
        pipes[engine], other = context.Pipe()
        context.Process(target=work, args=(engine, setting, other), daemon=True).start()
        other.close()  # so that a process that dies ends its pipe
    for first in range(0, setting.steps, TURN):
        commands = []
        for n in range(first, min(first + TURN, setting.steps)):
            samples = [training[i] for i in shuffled(n * ROW, ROW, len(training), setting.recipe.seed, 0)]
            texts = [own(cache.sample(i)) for i in samples]
            tokens.append(sum(len(row.tokens) for row in texts))
            commands.append(pickle.dumps((n, samples, texts)))
        for engine in engines:
            for command in commands:
                done[engine].append(ask(engine, pipes[engine], command))
    rows = []
    for engine in engines:
        out = folder / f"{engine}-{setting.anchors}-{setting.dtype}"
        memory = ask(engine, pipes[engine], pickle.dumps(out))
        seconds, losses = zip(*done[engine], strict=True)
        rows.append(
            {
                "engine": engine,
                "loss": LOSSES[engine],
                "anchors": setting.anchors,
                "dtype": setting.dtype,
                "steps": setting.steps,
                "steps_per_s": 1 / statistics.median(seconds),
                "tokens_per_s": statistics.median(tokens) / statistics.median(seconds),
                "outpace_over_it": statistics.median(
                    theirs / own for (theirs, *_), (own, *_) in zip(done[engine], done[OURS], strict=True)
                ),
                "peak_gib": memory,
                "last_losses": losses[-10:],
                **decoded(out, model, problems),
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def ask(engine: str, pipe: Connection, command: bytes) -> Any:
    """-> what the engine's process answers. Raises RuntimeError where it has died."""
    try:
        pipe.send_bytes(command)
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError(f"the process of {engine} has ended: its error is above") from error


def own(row: TeacherSample) -> TeacherSample:
    """With tensors of its size: a pickled view takes all of its shard along."""
    final = None if row.final is None else row.final.clone()
    return replace(row, tokens=row.tokens.clone(), aux=row.aux.clone(), final=final)


def decoded(draft: Path, model: Model, problems: int) -> dict[str, Any]:
    """tau over answers to held-out problems, and how many of the tokens differ from plain decoding's."""
    harmony = harmony_of(model.tokenizer) or model.tokenizer
    stop = frozenset(model.target.config.eos_token_ids)
    bound = load_draft(str(draft), model)
    request = Request(max_new_tokens=200, stop=stop)
    tokens = rounds = mismatched = 0
    for problem in draw_mixed(problems, 77):
        prompt = [prompt_ids(problem.prompt(), harmony)]
        plain = generate(model.target, prompt, request).tokens[0]
        drafted = generate(model.target, prompt, request, bound)
        tokens += len(drafted.tokens[0])
        rounds += len(drafted.trace.accepted)
        mismatched += sum(a != b for a, b in zip(plain, drafted.tokens[0], strict=True))
    return {"tau": tokens / rounds, "tokens": tokens, "mismatched_tokens": mismatched}


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['anchors']:4d} anchors  {row['dtype']:9} {row['engine']:12} "
        f"{row['steps_per_s']:6.2f} steps/s  "
        f"{row['tokens_per_s']:7.0f} tokens/s  {row['peak_gib']:5.2f} GiB  tau {row['tau']:.2f}  "
        f"{row['mismatched_tokens']} of {row['tokens']} tokens differ"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("work/drafts/cache"), help="a teacher cache with final states"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for report.json")
    parser.add_argument(
        "--anchors", type=int, nargs="+", default=[64, 512], help="of a step, all texts together"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[400, 80], help="for each of --anchors")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--engines", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--problems", type=int, default=48, help="held out, decoded with every draft")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    if len(arguments.anchors) != len(arguments.steps):
        parser.error(f"--steps {arguments.steps}: one number for each of --anchors {arguments.anchors}")
    for engine in arguments.engines:
        if engine != OURS and find_spec(engine) is None:
            parser.error(f"{engine} is not installed: make peers, or leave it out of --engines")
    model, cache = load("default"), TeacherCache.open(arguments.cache)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        **provenance(),
        "machine": machine(torch.device("cpu")),
        "versions": versions() | {name: metadata.version(name) for name in arguments.engines if name != OURS},
        "threads": arguments.threads,
        "texts": ROW,
        "block_size": BLOCK,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        start = Path(temporary) / "start"
        write_start(start, model, cache)
        for dtype in arguments.dtypes:
            for anchors, steps in zip(arguments.anchors, arguments.steps, strict=True):
                setting = Setting(anchors, steps, dtype, arguments.threads, arguments.cache, start)
                report["rows"] += compare(
                    setting, arguments.engines, model, Path(temporary), arguments.problems
                )
                write_json(arguments.out / "report.json", report)


if __name__ == "__main__":
    main()
