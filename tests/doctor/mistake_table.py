"""Mistakes planted one by one and in pairs, and which of them the doctor names: the tables of docs/doctor.md.

python tests/doctor/mistake_table.py            # the tables of what was measured
python tests/doctor/mistake_table.py --write    # measures what mistake_table.json lacks; then the page
"""

import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import every_two
import planted
import tiny
import torch
from planted import both, each, plant

from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.shipped import target_path
from outpace.checkpoint.tokenizer import open_tokenizer
from outpace.doctor.compare import Reference, check_logits
from outpace.doctor.engine import walk
from outpace.doctor.examine import Examination, examine
from outpace.doctor.mistakes import AS_IS
from outpace.doctor.prediction import gains, known_mistakes, read_with
from outpace.doctor.reference import rms_norm
from outpace.doctor.sample import sample
from outpace.doctor.search import EXACT
from outpace.models import attention
from outpace.models.load import load_target
from outpace.models.save import save_target

DEFAULT = target_path("default")
MEASURED = Path(__file__).with_name("mistake_table.json")
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN, END = "<!-- mistakes: make doctor-table -->\n", "<!-- end of mistakes -->\n"
TOKENS = 192
HALF_ROPE = "RoPE in half the heads"


def rope(config, **message):
    return {key: config[key] | message for key in ("rope_parameters", "rope_scaling") if config.get(key)}


# mistake -> edit of the tensors, keys of config.json, the names that the doctor has for it (either direction)
WINDOW = ("window off by one: one key longer", "window off by one: one key shorter")
MISTAKES = {
    "high nibble first": (each("_blocks", planted.exchanged), None, ("high nibble first",)),
    "scale exponent off by one": (
        each("_scales", lambda x, config: x + 1), None,
        ("scale exponent off by one: halved", "scale exponent off by one: doubled"),
    ),
    "blocks of a row reversed": (
        both(each("_blocks", planted.backwards), each("_scales", planted.backwards)), None,
        ("blocks of each row reversed",),
    ),
    "gate and up exchanged": (
        both(*(each(f"gate_up_proj_{x}", planted.swapped_rows) for x in ("blocks", "scales", "bias"))), None,
        ("gate and up exchanged",),
    ),
    "query heads grouped cyclically": (
        planted.cyclic_heads, None,
        ("cyclic GQA mapping (query head h reads kv head h % K)", "cyclic GQA mapping, inverse order"),
    ),
    "sinks dropped": (each("sinks", planted.lost), None, ("sinks dropped",)),
    "window off by one": (None, lambda c: {"sliding_window": c["sliding_window"] - 1}, WINDOW),
    "YaRN's attention factor missing": (
        None, lambda c: rope(c, attention_factor=1.0), ("YaRN's attention factor missing",)
    ),
    HALF_ROPE: (None, None, ("RoPE in the first half of the heads alone",)),  # of the engine: see half_rope
    # other forms of the same, alone
    "blocks of a row reversed, scales in place": (
        each("_blocks", planted.backwards), None, ("blocks of each row reversed under their scales",)
    ),
    "scale exponent off by one, downwards": (
        each("_scales", lambda x, config: x - 1), None,
        ("scale exponent off by one: halved", "scale exponent off by one: doubled"),
    ),
    "window off by one, upwards": (None, lambda c: {"sliding_window": c["sliding_window"] + 1}, WINDOW),
    "RoPE pairs interleaved in half the heads": (
        planted.on_q_and_k(planted.half_to_neighbours), None,
        ("interleaved RoPE pairs in the first half of the heads",)
    ),
}  # fmt: skip
IN_PAIRS = list(MISTAKES)[:9]
PAIRS = list(itertools.combinations(IN_PAIRS, 2))
ROWS = [*((name,) for name in MISTAKES), *PAIRS]


@contextlib.contextmanager
def half_rope():
    """The engine rotates the first half of the query heads and of the kv heads alone."""
    right = attention.rotate_heads

    def wrong(qkv, cos, sin, H, K, norms):
        q, k, v = right(qkv.clone(), cos, sin, H, K, norms)
        still_q, still_k, _ = right(qkv, torch.ones_like(cos), torch.zeros_like(sin), H, K, norms)
        return _half(q, still_q), _half(k, still_k), v

    attention.rotate_heads = wrong
    try:
        yield
    finally:
        attention.rotate_heads = right


def _half(rotated, still):
    """[B, T, heads, D]"""
    first = torch.arange(rotated.shape[2]) < -(-rotated.shape[2] // 2)
    return torch.where(first[:, None], rotated, still)


def checks(names, folder, healthy=DEFAULT, tokens=TOKENS):
    """The doctor's checks on a copy of `healthy` with mistakes planted in it."""
    edits = [MISTAKES[n][0] for n in names if MISTAKES[n][0] is not None]
    config = {}
    for name in names:
        if MISTAKES[name][1] is not None:
            config |= MISTAKES[name][1](planted.config_of(healthy))
    wrong = plant(healthy, folder, both(*edits), **config)
    with half_rope() if HALF_ROPE in names else contextlib.nullcontext():
        # thorough: on a busy machine the text's search would not be run at all
        what = Examination(path=str(wrong), reference=str(healthy), tokens=tokens, thorough=True)
        return list(examine(what))


def named(results):
    """Names of a run without the comparison with the reference, and of the comparison and the engine's check
    alone."""
    start = next(i for i, c in enumerate(results) if c.name == "configs")
    engine = [c for c in results if c.name == "engine against a plain forward"]
    return tuple(
        {name for c in part if c.status in ("warn", "fail") for name in c.mistakes}
        for part in (results[:start], engine + results[start:])
    )


def answers(names, results):
    """For both runs: the planted mistakes that are named, and names that were not planted."""
    right = {n for name in names for n in MISTAKES[name][2]}
    return [
        {
            "named": [name for name in names if named_fields & set(MISTAKES[name][2])],
            "others": sorted(named_fields - right),
        }
        for named_fields in named(results)
    ]


# ---- measuring -------------------------------------------------------------------------------------


def label(names):
    return " + ".join(names)


def tiny_model(folder):
    """gpt-oss of random weights, with its experts in MXFP4."""
    save_target(tiny.target("gpt_oss"), folder, pack=True)
    return folder


def measure_row(model, names):
    """`model`: "embedded" or "tiny"."""
    with tempfile.TemporaryDirectory() as place:
        healthy = DEFAULT if model == "embedded" else tiny_model(Path(place) / "healthy")
        return answers(names, checks(names, Path(place) / "wrong", healthy))


@torch.inference_mode()
def measure_heads():
    """name -> as in measure_known: of final norm and head."""
    model = every_two.model_of("llama")
    ours = walk(model, tiny.tokens(1, every_two.TOKENS)[0].tolist())
    last, eps = ours.layers[-1].out, model.config.rms_norm_eps
    normed = rms_norm(last, model.norm.weight, eps)
    logits = {
        "no final norm": model.logits(last),
        "final norm without its weights": model.logits(rms_norm(last, None, eps)),
        "tied head (the embedding used as the head)": normed @ model.embed_tokens.weight.mT,
    }
    result = {}
    for name, wrong in logits.items():
        reference = Reference(walk=dataclasses.replace(ours, logits=wrong))
        check = check_logits(model, ours, reference, layers_agree=True)
        explained = {n: e for n, e in check.evidence["head_mistakes"].items() if e <= EXACT}
        assert f"explained by {min(explained, key=explained.get)}" in check.message
        result[name] = {"against": {"llama head": list(explained)}}
    return result


def measure_known():
    """name -> where it is named against a reference that makes it, and what it costs the embedded model's
    text."""
    result = measure_heads()
    for family, half in every_two.SIDES:
        side = every_two.side_of(family, half)
        for name in side.known:
            ours = [label(names) for names in every_two.explained(side, (name,))]
            result.setdefault(name, {"against": {}})["against"][f"{family} {half}"] = ours
    model = load_target(DEFAULT)
    known = known_mistakes(model)
    text = sample(open_tokenizer(open_checkpoint(DEFAULT)), model.config.vocab_size, TOKENS, None)
    for gain in gains(read_with(model, text, [AS_IS, *((name,) for name in known)])):
        cost = {"nats": round(-gain.gain, 3), "z": round(-gain.z, 2), "decides": gain.worse}
        result.setdefault(gain.names[0], {"against": {}})["text"] = cost
    return dict(sorted(result.items()))


def measure_every_two():
    """side -> number of pairs, and those that are not both named alone."""
    result = {}
    for family, half in every_two.IN_PAIRS:
        measured = every_two.verdicts(every_two.side_of(family, half))
        others = {two: verdict for two, verdict in measured.items() if verdict != every_two.BOTH}
        result[f"{family} {half}"] = {"pairs": len(measured), "not both alone": others}
    return result


def measure(workers):
    """What the file lacks; it is written after each part."""
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    wanted = [(model, names) for model in ("tiny", "embedded") for names in ROWS]
    wanted = [(m, names) for m, names in wanted if label(names) not in measured.get(m, {})]
    with ProcessPoolExecutor(workers) as pool:
        jobs = {pool.submit(measure_row, m, names): (m, names) for m, names in wanted}
        for job in as_completed(jobs):
            m, names = jobs[job]
            measured.setdefault(m, {})[label(names)] = job.result()
            print(m, label(names), flush=True)
            write(measured)
    measured["known"] = measured.get("known") or measure_known()
    measured["every two"] = measured.get("every two") or measure_every_two()
    write(measured)
    return measured


def write(measured):
    for model in ("tiny", "embedded"):
        rows = measured.get(model, {})
        measured[model] = {label(n): rows[label(n)] for n in ROWS if label(n) in rows}
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")


# ---- the tables ------------------------------------------------------------------------------------


def cell(names, answer):
    """ "yes", or what is missing, and what was named though it was not planted."""
    missing = [name for name in names if name not in answer["named"]]
    text = "yes" if not missing else "no" if len(missing) == len(names) else f"not {label(missing)}"
    return text + "".join(f", and {other}" for other in answer["others"])


def complete(names, answer):
    return cell(names, answer) == "yes"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def planted_tables(measured):
    rows = []
    for names in [names for names in ROWS if label(names) in measured["embedded"]]:
        answer = measured["embedded"][label(names)]
        if len(names) == 1 or not all(complete(names, a) for a in answer):
            rows.append([label(names), *(cell(names, a) for a in answer)])
    for model, title in (("embedded", "embedded model"), ("tiny", "tiny MXFP4 gpt-oss, random weights")):
        for kind, some in (("single mistakes", [(n,) for n in MISTAKES]), ("pairs of the first nine", PAIRS)):
            missing = [names for names in some if label(names) not in measured[model]]
            some = [names for names in some if names not in missing]
            both = [measured[model][label(names)] for names in some]
            shares = []
            for i in (0, 1):
                whole = sum(len(a[i]["named"]) == len(n) for a, n in zip(both, some, strict=True))
                exact = sum(complete(n, a[i]) for a, n in zip(both, some, strict=True))
                shares.append(f"{whole} of {len(some)}" + ("" if exact == whole else f", {exact} alone"))
            left = f" ({len(missing)} not measured yet)" if missing else ""
            rows.append([f"{title}: {kind}{left}", *shares])
    return table(["planted", "named without a reference", "named with it"], rows)


def known_table(measured):
    rows = []
    for name, row in measured["known"].items():
        text = row.get("text")
        cost = "not in this model" if text is None else f"{text['nats']:+.2f} (z {text['z']:.0f})"
        decides = "" if text is None else "yes" if text["decides"] else "no"
        named = [ours == [name] for ours in row["against"].values()]
        with_it = f"{sum(named)} of {len(named)}" if named else "not tried"
        rows.append([name, cost, decides, with_it])
    return table(["known mistake", "nats per token", "the text decides", "named with a reference"], rows)


def every_two_table(measured):
    rows = []
    for key, value in measured["every two"].items():
        others = list(value["not both alone"].values())
        kinds = [others.count(kind) for kind in (every_two.OTHERS, every_two.ONE)]
        counts = [value["pairs"] - len(others), *kinds, len(others) - sum(kinds)]
        rows.append([key, str(value["pairs"]), *map(str, counts)])
    head = ["layer of", "pairs", "both named", "both, or two others that compute the same"]
    return table([*head, "one that computes the same", "not named"], rows)


def render(measured):
    return "\n".join(part(measured) for part in (planted_tables, every_two_table, known_table))


def update(page, text):
    """The page with `text` between the marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--write" in sys.argv:
        text = render(measure(workers=2))
        PAGE.write_text(update(PAGE.read_text(), text))
    else:
        print(render(json.loads(MEASURED.read_text())))
