"""The cost of a draft against context: the parts are the product's, the variants differ where they must."""

import dataclasses
import io
import json

import pytest
import tiny
import torch
from rich.console import Console

from outpace.bench import draft_context, draft_steps
from outpace.bench.draft_context import PAGE, QUICK, DraftContextSettings, operations_table, run_draft_context
from outpace.bench.draft_steps import (
    OPERATIONS,
    SESSIONS,
    VARIANTS,
    NoiseCached,
    Recomputed,
    StepTimer,
    VariantDraft,
    needed_bytes,
    published_draft,
    taken_apart,
    work_of_step,
)
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.quantize import quantised
from outpace.drafts.sampler import Greedy
from outpace.loading import open_dflash, open_target
from outpace.models.config import FULL, WINDOW
from outpace.models.load import named_tensors
from outpace.tasks.prompts import problem_prompts
from outpace.text.harmony import HarmonyTokens

PUBLISHED_DRAFT = published_draft()
PROMPTS = [tiny.tokens(n, seed=n).tolist() for n in (9, 23)]


CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 4}


def made(window, **parts):
    c = tiny.target("gpt_oss").config
    draft = DFlash(
        DFlashConfig(
            hidden_size=c.hidden_size,
            num_layers=3,
            num_heads=6,
            num_kv_heads=2,
            head_dim=10,
            intermediate_size=44,
            vocab_size=c.vocab_size,
            rope=c.rope,
            rms_norm_eps=1e-5,
            block_size=5,
            target_layer_ids=(0, 2),
            num_target_layers=c.num_layers,
            mask_token_id=2,
            layer_types=(WINDOW,) * 3 if window == 6 else (WINDOW, FULL, WINDOW) if window else (),
            sliding_window=window,
            **parts,
        )
    ).eval()
    tiny.randomise(named_tensors(draft), seed=4)
    return draft


def session_after(variant, draft, rounds):
    """A session that saw two ragged prompts and then `rounds` rounds, of 2 and 4 tokens each."""
    target = tiny.target("gpt_oss")
    session = SESSIONS[variant](draft, target, 2, 60, 0)
    rng = torch.Generator().manual_seed(3)
    proposals = []
    with torch.inference_mode():
        for counts in ([23, 9], [7, 12], *[[2, 4]] * rounds):
            if len(proposals) or counts == [2, 4]:
                proposals.append(session.propose(tiny.tokens(2, seed=len(proposals)), 5, Greedy()))
            aux = torch.randn(2, 2, max(counts), 96, generator=rng)
            session.observe(tiny.tokens(2, max(counts)), aux, counts)
        hidden = session_hidden(session)
    return session, hidden, proposals


def session_hidden(session):
    if isinstance(session, Recomputed):
        session.project()
    return session.block_hidden(torch.tensor([11, 31]))


@pytest.mark.parametrize("window", [0, 6, 7])
def test_recomputing_the_context_changes_nothing(window):
    draft = made(window)
    _, served, note = session_after("cached", draft, 3)
    _, recomputed, same = session_after("recomputed", draft, 3)
    torch.testing.assert_close(recomputed, served, rtol=0, atol=1e-4)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(note, same, strict=True))


def test_noise_rows_are_other_rows():
    draft = made(0)
    first, _, _ = session_after("cached", draft, 2)
    noisy, _, _ = session_after("noise cached", draft, 2)
    assert noisy.cache.lengths == first.cache.lengths == [34, 29]
    for ours, theirs in zip(first.cache.layers, noisy.cache.layers, strict=True):
        assert torch.equal(ours.k[0, :, :30], theirs.k[0, :, :30])  # of the prompt
        assert not torch.isclose(ours.k[0, :, 30:34], theirs.k[0, :, 30:34], atol=1e-2).all()
    # a MASK's row of the first layer knows nothing but its position
    step = noisy.cache.begin(1)
    cos, sin = draft.rope(step.storage[:1] * 0 + 31)
    with torch.inference_mode():
        mask = tiny.target("gpt_oss").embed(torch.tensor([[2]]))
        layer = draft.layers[0]
        k, _ = layer.context_kv(layer.input_layernorm(mask), cos, sin)
    torch.testing.assert_close(noisy.cache.layers[0].k[0, :, 31], k[0, :, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_says_what_plain_decoding_says(variant):
    target = tiny.target("gpt_oss")
    request = Request(max_new_tokens=25)
    answer = generate(target, PROMPTS, request).tokens
    bound = VariantDraft(made(6), target, variant)
    assert generate(target, PROMPTS, request, bound).tokens == answer


def test_caching_noise_costs_acceptance():
    """The embedded draft, which really answers a problem."""
    target, tokenizer = open_target("default")
    draft = open_dflash("dflash", tokenizer)
    (prompt,) = problem_prompts(HarmonyTokens(tokenizer), 1, 3, 256)
    request, taus = Request(max_new_tokens=100, stop=frozenset(target.config.eos_token_ids)), {}
    for variant in VARIANTS:
        bound = VariantDraft(draft, target, variant)
        taus[variant] = generate(target, [prompt], request, bound).trace.tau
    assert taus["recomputed"] == taus["cached"] > 4
    assert taus["noise cached"] < taus["cached"] / 2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("window", "parts"), [(0, {}), (6, {}), (6, CONVOLVED), (7, {"causal": True, "causal_full": True})]
)
def test_a_step_taken_apart_is_the_served_step(variant, window, parts):
    draft = made(window, **parts)
    served, timed = (session_after(variant, draft, 1)[0] for _ in range(2))
    last, aux, timer = tiny.tokens(2), torch.randn(2, 2, 3, 96), StepTimer()
    with torch.inference_mode():
        proposal = served.propose(last, 5, Greedy())
        served.observe(tiny.tokens(2, 3), aux, [3, 3])
        with taken_apart(timed, timer):
            assert torch.equal(timed.propose(last, 5, Greedy()).tokens, proposal.tokens)
            timed.observe(tiny.tokens(2, 3), aux, [3, 3])
        assert torch.equal(session_hidden(served), session_hidden(timed))
        before = dict(timer.seconds)
        timed.propose(last, 5, Greedy())  # outside, nothing is timed any more
    assert timer.seconds == before and timed.in_one_piece == served.in_one_piece
    idle = {name for name, seconds in timer.seconds.items() if not seconds}
    expected = {"fc", "context kv"} if variant == "noise cached" else set()
    assert idle == expected | (set() if "conv_kernel_size" in parts else {"convolution"})


def test_the_work_of_a_round_is_counted_by_hand():
    """C 96, 3 layers of 6 heads of 10 over 2, MLP 44, V 97, blocks of 5, two features; float32."""
    draft, target = made(0), tiny.target("gpt_oss")
    work = work_of_step(draft, target, "cached", 1000, 3)
    assert set(work) == set(OPERATIONS)
    assert work["fc"].nbytes == 4 * (96 * 192 + 3 * 192)
    assert work["fc"].flops == 2 * 96 * 192 * 3
    assert work["context kv"].nbytes == pytest.approx(3 * 4 * (40 * 96 + 3 * 96))
    assert work["q/k/v"].nbytes == 3 * 4 * (100 * 96 + 5 * 96)
    assert work["attention"].nbytes == 3 * 4 * 2 * 1005 * 2 * 10
    assert work["attention"].flops == 3 * 4 * 5 * 1005 * 6 * 10
    assert work["o"].nbytes == 3 * 4 * (96 * 60 + 5 * 60)
    assert work["mlp"].flops == 3 * 2 * 5 * (88 * 96 + 96 * 44)
    assert work["head"].nbytes == 4 * (97 * 96 + 4 * 96)
    assert work["embedding"].nbytes == 4 * 5 * 96
    again = work_of_step(draft, target, "recomputed", 1000, 3)
    assert again["context kv"].nbytes == pytest.approx(3 * 4 * (40 * 96 + 1000 * 96))
    assert again["q/k/v"] == work["q/k/v"]
    lean = work_of_step(made(0, draft_vocab_size=31, **CONVOLVED), target, "cached", 1000, 3)
    assert lean["head"].nbytes == pytest.approx(4 * (31 * 96 + 4 * 96))
    assert lean["convolution"].nbytes == 3 * 2 * 4 * (2 * 2 * 6 * 96 + 5 * 96)
    noisy = work_of_step(draft, target, "noise cached", 1000, 3)
    assert noisy["fc"].nbytes == noisy["context kv"].nbytes == 0
    windowed = work_of_step(made(6), target, "recomputed", 1000, 3)
    assert windowed["attention"].nbytes == 3 * 4 * 2 * (5 + 5) * 2 * 10
    assert windowed["context kv"].nbytes == pytest.approx(3 * 4 * (40 * 96 + 6 * 96))


def test_the_published_shape_fits_the_machine_it_is_meant_for():
    config = published_draft()
    with torch.device("meta"):
        draft = DFlash(config)
    parameters = sum(p.numel() for p in draft.parameters())
    assert 0.75e9 < parameters < 0.85e9
    needed = needed_bytes(draft, tiny.target("gpt_oss"), 120 * 1024)
    assert needed["keys and values"] == 8 * 120 * 1024 * 2 * 8 * 64 * 4  # 3.75 GiB in float32
    windowed = needed_bytes(made(6), tiny.target("gpt_oss"), 900)
    assert windowed["keys and values"] == 3 * (6 + 5) * 2 * 2 * 10 * 4
    assert needed["fused states"] == 120 * 1024 * 2880 * 4


def settings(**changes):
    values = {"shapes": ("draft", "draft, full attention"), "contexts": (20, 50), "repeats": 2, "prompts": 2}
    return DraftContextSettings(**values | {"acceptance": ("9+12",)} | changes)


def quiet():
    return Console(file=io.StringIO(), width=80)


@pytest.fixture
def calm(monkeypatch):
    monkeypatch.setattr(draft_context, "read_bandwidth", lambda repeats: 1e10)
    monkeypatch.setattr(draft_context, "multiply_rate", lambda: 1e11)


def run(folder, window=6, draft=None, **changes):
    texts = {"9+12": [p[:9] for p in PROMPTS]}
    draft = made(window) if draft is None else draft
    return run_draft_context(tiny.target("gpt_oss"), draft, texts, settings(**changes), folder, quiet())


def test_the_report_is_whole(tmp_path, calm):
    report = run(tmp_path)
    cells = [(c["shape"], c["context"], c["variant"]) for c in report["cells"]]
    assert cells == [(s, n, v) for s in settings().shapes for n in (20, 50) for v in VARIANTS]
    for c in report["cells"]:
        assert [r["operation"] for r in c["operations"]] == list(OPERATIONS)
        assert 2 <= c["repeats"] <= 2 and c["fastest"] <= c["seconds"] <= c["slowest"]
        assert c["taken_apart_seconds"] == pytest.approx(sum(r["seconds"] for r in c["operations"]))
        for r in c["operations"]:
            if r["seconds"]:
                assert r["bytes_per_s"] == pytest.approx(r["bytes"] / r["seconds"], abs=1)
                limit = max(r["bytes"] / 1e10, r["flops"] / 1e11)
                assert r["share_of_floor"] == pytest.approx(limit / r["seconds"], abs=1e-3)
                assert limit == max(r["read_seconds"], r["multiply_seconds"])
    assert report["shapes"]["draft"]["windows"] == [6, 6, 6]
    assert report["shapes"]["draft, full attention"]["windows"] == [0, 0, 0]
    assert [r["variant"] for r in report["acceptance"]] == list(VARIANTS)
    assert all(r["texts_that_differ_from_plain"] == 0 for r in report["acceptance"])
    assert json.loads(json.dumps(report)) == report
    PAGE.write(report, tmp_path)
    assert not (tmp_path / "progress.jsonl").exists()
    text = (tmp_path / "report.md").read_text()
    assert "## draft, full attention" in text and "| 9+12 | noise cached |" in text
    assert text.count("whole step (taken apart") == 2 * 3
    last = operations_table(report)[-2]
    cell = next(c for c in reversed(report["cells"]) if c["variant"] == "cached")
    assert last.startswith("| whole step") and f"| {1000 * cell['seconds']:,.3f} |" in last


def test_a_packed_draft_is_measured_as_it_lies(tmp_path, calm):
    draft = made(6)
    items = [run(tmp_path / d, draft=x, contexts=(20,)) for d, x in (("a", draft), ("b", quantised(draft)))]
    for whole, packed in zip(*(report["cells"] for report in items), strict=True):
        nbytes = [{r["operation"]: r["bytes"] for r in c["operations"]} for c in (whole, packed)]
        assert nbytes[1]["mlp"] < 0.7 * nbytes[0]["mlp"] and packed["bytes"] < whole["bytes"]
        assert nbytes[1]["o"] == nbytes[0]["o"]  # 60 columns: no block divides them
    shapes = [report["shapes"] for report in items]
    for name, windows in (("draft", [6] * 3), ("draft, full attention", [0] * 3)):
        assert shapes[1][name]["windows"] == windows
        assert shapes[1][name]["parameters"] == shapes[0][name]["parameters"]
    assert shapes[1]["draft"]["weights"] == ["float32", "uint8"]


def test_a_draft_without_a_window_is_not_measured_twice(tmp_path, calm):
    report = run(tmp_path, window=0, contexts=(20,))
    assert set(report["shapes"]) == {"draft"}
    assert report["remarks"] == ["draft, full attention left out: this draft has no window"]


def test_a_stopped_run_goes_on(tmp_path, calm, monkeypatch):
    honest, seen = draft_context.measure, []

    def stopping(name, sessions, context, asked):
        if name != "warm-up":
            seen.append((name, context))
            if len(seen) == 3:
                raise RuntimeError("the power failed")
        return honest(name, sessions, context, asked)

    monkeypatch.setattr(draft_context, "measure", stopping)
    with pytest.raises(RuntimeError, match="the power failed"):
        run(tmp_path)
    lines = (tmp_path / "progress.jsonl").read_text().splitlines()[1:]
    kept = dict(x for line in lines for x in json.loads(line).items())
    report = run(tmp_path)
    assert [name for name, _ in seen] == ["draft", "draft", *["draft, full attention"] * 3]
    assert len(report["cells"]) == 2 * 2 * 3
    assert report["cells"][0]["seconds"] == kept["cell draft 20"][0]["seconds"]
    seen.clear()
    monkeypatch.setattr(draft_context, "measure", honest)
    other = '{"key":{"of":"another"}}\n{"floor draft 20":1e12}\n'
    (tmp_path / "progress.jsonl").write_text(other)
    assert run(tmp_path, contexts=(20,))["floor"]["read_bytes_per_s"] == 10**10


def test_the_large_shape_is_made_and_measured(tmp_path, calm, monkeypatch):
    """Its path with its sizes divided: bfloat16 weights, a target that is only embedding and head."""
    like = dict(draft_steps.PUBLISHED["gpt-oss-20b"]) | {"hidden_size": 64, "vocab_size": 300}
    monkeypatch.setitem(draft_steps.PUBLISHED, "gpt-oss-20b", like)
    monkeypatch.setattr(draft_steps, "published_draft", small_published)
    report = run(tmp_path, shapes=("gpt-oss-20b",), contexts=(5000,), acceptance=())
    about = report["shapes"]["gpt-oss-20b"]
    assert (about["weights"], about["keys_and_values"]) == (["bfloat16"], "float32")
    assert all(c["context"] == 5000 for c in report["cells"])


def small_published():
    sizes = {"num_layers": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "intermediate_size": 72}
    return dataclasses.replace(PUBLISHED_DRAFT, hidden_size=64, vocab_size=300, mask_token_id=20, **sizes)


def test_a_shape_too_large_is_refused_before_it_is_measured(tmp_path, calm):
    with pytest.raises(ValueError, match=r"draft takes 0\.0 GiB \(weights 0\.0, keys and values"):
        run(tmp_path, memory_gib=1e-6)


def test_a_context_past_the_last_position_is_refused(tmp_path, calm):
    with pytest.raises(
        ValueError, match=r"context 131070 reaches position 131075, .* of draft end at 131072"
    ):
        run(tmp_path, contexts=(20, 131070))


def test_a_dear_round_is_measured_once(tmp_path, calm):
    """What one round alone exceeds is not rehearsed and not repeated."""
    once = run(tmp_path, contexts=(20,), cell_s=0.0, repeats=5, shapes=("draft",))
    assert [c["repeats"] for c in once["cells"]] == [1, 1, 1]
    often = run(tmp_path, contexts=(20,), cell_s=100.0, repeats=5, shapes=("draft",))
    assert [c["repeats"] for c in often["cells"]] == [5, 5, 5]


def test_a_foreign_draft_is_refused(tmp_path, calm):
    other = tiny.target("llama")
    with pytest.raises(ValueError, match="made for a target with hidden_size 96; this one has 42"):
        run_draft_context(other, made(0), {}, settings(), tmp_path, quiet())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": ("gpt-5",)}, "no shape 'gpt-5'; known: draft, "),
        ({"variants": ()}, "name at least one of variants"),
        ({"contexts": ()}, r"contexts \[\]: give counts"),
        ({"contexts": (8, 4)}, "ascending"),
        ({"contexts": (0, 4)}, "give counts"),
        ({"repeats": 0}, "repeats 0: it must be at least 1"),
        ({"acceptance": ("256",)}, 'write "P\\+D"'),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_the_quick_form_is_a_form_of_it():
    quick = DraftContextSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in QUICK.items()})
    assert max(quick.contexts) < max(DraftContextSettings().contexts) == 120 * 1024
    assert issubclass(NoiseCached, SESSIONS["cached"])
