"""The native step against the modules, bit for bit: hidden states, aux states and what the cache holds."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import tiny
import torch
from gguf_blocks import blocks
from indexers import indexed_target
from latents import latent_target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import outpace
from outpace.kernels import bindings
from outpace.kv.partial import PartialCache, PartialConfig
from outpace.kv.tree import Tree
from outpace.models.blocks import Embedding, ExpertMatrix, Linear
from outpace.models.load import build, named_tensors
from outpace.models.native_step import ALONE, NativeStep, module_attention, step_bytes, why_modules
from outpace.ops.quant import Joined

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")

HEADS = {"qwen3": 16, "qwen3_moe": 24}  # dims that the kernels take: multiples of 8
FORMATS = ("Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "expert_size": 768}  # K-quants have blocks of 256
PARENTS = [0, 0, 0, 1, 2, 3]


def plain(family, dtype=torch.float32, **changes):
    model = build(tiny.config(family, head_dim=HEADS.get(family, 8), **changes))
    tiny.randomise(named_tensors(model), 3)
    return model.to(dtype).eval()


def in_blocks(family, format):
    """Every matrix in GGUF's blocks: experts apart, q, k and v as three matrices in two formats."""
    config = tiny.config(family, head_dim=128, **WIDE)
    model = build(config, "split" if config.num_experts else "dense")
    tiny.randomise(named_tensors(model), 3)
    for number, part in enumerate(model.modules()):
        name = next((n for n, m in model.named_modules() if m is part), "")
        if isinstance(part, (Linear, Embedding, ExpertMatrix)) and "router" not in name:
            shape = part.weight.shape
            del part.weight
            part.weight = blocks(format, *shape, seed=number)
        if name.endswith("qkv_proj"):
            q, kv = config.num_heads * 128, config.num_kv_heads * 128
            rows = [blocks(f, n, 256, seed=number) for f, n in ((format, q), ("Q8_0", kv), (format, kv))]
            del part.weight
            part.weight = Joined(rows)
    return model.eval()


def steps_of(model, cache):
    """Forwards of every kind on one cache -> what each gives, padding left out."""
    layers = (0, model.config.num_layers - 1)
    tree = torch.tensor([PARENTS, [0, 1, 0, 1, 1, 4], [0, 0, 1, 2, 3, 5]])

    def run(tokens, counts=None, tree=None):
        out = model(tokens, cache, counts=counts, tree=tree, aux=layers)
        real = counts or [tokens.shape[1]] * len(tokens)
        for b, n in enumerate(real):
            results.extend((out.hidden[b, :n], out.aux[:, b, :n]))

    results = []
    run(tiny.tokens(3, 6), [6, 2, 4])
    run(tiny.tokens(3, 1, seed=2))
    for seed in range(3):  # past the windows of 7, whose rings hold 7 + 6
        run(tiny.tokens(3, 5, seed=seed), [5, 1, 3])
        cache.commit([[0, 1, 2], [0], [0, 1]])
    run(tiny.tokens(3, 6, seed=7), tree=Tree(tree))
    cache.commit([[0, 1, 3], [0, 2], [0, 1, 2, 3]])
    cache.select([2, 0])
    run(tiny.tokens(2, 1, seed=8))
    run(tiny.tokens(2, 3, seed=9), tree=Tree(tree[:2, :3]))
    return results


def both_ways(model, offset):
    values = []
    for model.native in (True, False):
        cache = model.make_cache(3, 64, slack=6, offset=offset)
        values.append((steps_of(model, cache), cache))
    return values


def compare(model, offset=0):
    assert model.native
    (mine, cache), (theirs, other) = both_ways(model, offset)
    model.native = True
    made = model.native_steps.values()
    assert sum(step.knows(cache) for step in made) == 2  # those since the last `select`
    assert len(made) == 6 and not any(step.knows(other) for step in made)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for a, b in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(a.k[:, :, :-1], b.k[:, :, :-1]) and torch.equal(a.v[:, :, :-1], b.v[:, :, :-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_a_native_step_is_the_modules_forward(family, dtype):
    compare(plain(family, dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_a_native_step_over_keys_of_two_bytes(family, dtype):
    model = plain(family)
    model.kv_cache_dtype = dtype
    compare(model)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_a_native_step_with_rounded_activations(family):
    model = plain(family, torch.bfloat16)
    model.use_activation_dtype(torch.bfloat16)
    compare(model)
    if family == "gpt_oss":
        packed = tiny.in_mxfp4(plain("gpt_oss", torch.bfloat16, hidden_size=96))
        packed.use_activation_dtype(torch.bfloat16)
        compare(packed)
    if family in ("gpt_oss", "llama"):  # programs between which modules attend
        indexed = indexed_target(family)[1].to(torch.bfloat16)
        indexed.use_activation_dtype(torch.bfloat16)
        compare(indexed)


@torch.inference_mode()
def test_rounded_activations_are_a_choice_that_can_be_taken_back():
    model, tokens = plain("gpt_oss", torch.bfloat16), tiny.tokens(2, 9)

    def logits():
        return model(tokens, model.make_cache(2, 9), logits=True).logits

    exact = logits()
    model.use_activation_dtype(torch.bfloat16)
    rounded = logits()
    model.native = False
    assert torch.equal(logits(), rounded)
    model.native = True
    error = (exact - rounded).abs().max() / exact.abs().max()
    assert 0 < error < 8 * torch.finfo(torch.bfloat16).eps
    model.use_activation_dtype(torch.float32)
    assert torch.equal(logits(), exact)


@pytest.mark.parametrize("kind", [latent_target, indexed_target])
@torch.inference_mode()
def test_other_memories_and_windows_of_two_bytes(kind):
    model = kind("gpt_oss")[1]
    model.kv_cache_dtype = torch.float16
    compare(model)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_positions_begin_at_the_caches_offset(family):
    compare(plain(family), offset=130_688)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3", "qwen3_moe"])
@torch.inference_mode()
def test_a_native_step_over_the_blocks_of_gguf(family, format):
    compare(in_blocks(family, format))


@torch.inference_mode()
def test_a_native_step_over_mxfp4_of_safetensors():
    compare(tiny.in_mxfp4(plain("gpt_oss", hidden_size=96)))


@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("kind", ["latent", "index", "both"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
@torch.inference_mode()
def test_attention_of_other_memories_is_its_modules_between_programs(family, kind, rank):
    model = (
        latent_target(family, rank)[1]
        if kind == "latent"
        else indexed_target(family, rank=(rank or 16) if kind == "both" else None)[1]
    )
    compare(model)
    full = {i for i in range(model.config.num_layers) if not model.config.window(i)}
    for step in model.native_steps.values():
        assert {part[0] for part in step.parts if isinstance(part, tuple)} == full


@torch.inference_mode()
def test_recorded_queries_and_a_partial_view_of_them():
    model, config = plain("gpt_oss"), PartialConfig(block_size=4)
    values = []
    for model.native in (True, False):
        full = model.make_cache(2, 90, slack=12)
        model(tiny.tokens(2, 9), full, counts=[9, 4])  # before anything is recorded
        partial, outputs = PartialCache(full, config, 12), []
        for i in range(9):
            outputs += [model(tiny.tokens(len(full.lengths), 5, seed=i), full).hidden]
            partial.refresh()
            outputs += [model(tiny.tokens(len(full.lengths), 2, seed=i + 50), partial).hidden]
            if i == 6:
                for cache in (full, partial):
                    cache.select([1])
        values.append((outputs, [memory.recorded.q for memory in full.layers if memory.record_queries]))
    for mine, theirs in zip(*values, strict=True):
        assert mine and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@torch.inference_mode()
def test_a_batch_wider_than_one_call_of_the_experts():
    model = plain("gpt_oss")
    values = []
    for model.native in (True, False):
        cache = model.make_cache(40, 20)
        values.append(model(tiny.tokens(40, 5), cache).hidden)
    assert torch.equal(*values)


WIDE_BATCH = 22


def in_company(model):
    """Chains of a batch wider than a native step takes, of long and short rows -> what each token has."""
    cache, seen = model.make_cache(WIDE_BATCH, 800, slack=40), [[] for _ in range(WIDE_BATCH)]
    for tokens, counts in chains():
        out = model(tokens, cache, counts=counts, aux=(0, 2), logits=True)
        assert out.best is None or torch.equal(out.best, out.logits.argmax(-1))
        for b, n in enumerate(counts):
            seen[b].append(torch.cat((out.hidden[b, :n], *out.aux[:, b, :n], out.logits[b, :n]), -1))
    cache.commit([list(range(n // 2)) for n in counts])
    tokens, counts, parents = branches()
    out = model(tokens, cache, counts=counts, tree=Tree(parents), aux=(0, 2))
    for b, n in enumerate(counts):
        seen[b].append(torch.cat((out.hidden[b, :n], *out.aux[:, b, :n]), -1))
    cache.commit([[0, n - 1][:n] for n in counts])
    rows = [21, 1, 20, 3]
    cache.select(rows)
    for b, hidden in zip(rows, model(tiny.tokens(4, 2, seed=5), cache).hidden, strict=True):
        seen[b].append(hidden)
    return seen


def chains():
    for T, seed in ((600, 1), (1, 2), (40, 3), (70, 4)):
        yield tiny.tokens(WIDE_BATCH, T, seed=seed), [T * (b % 4) // 3 for b in range(WIDE_BATCH)]


def branches():
    """Trees of a wide batch: every node follows one of the first few."""
    rng, T = torch.Generator().manual_seed(6), 26
    parents = torch.minimum(torch.randint(0, 3, (WIDE_BATCH, T), generator=rng), torch.arange(T) - 1).clamp(0)
    return tiny.tokens(WIDE_BATCH, T, seed=6), [1 + b % T for b in range(WIDE_BATCH)], parents


def alone(model, b):
    cache, seen = model.make_cache(1, 800, slack=40), []
    for tokens, counts in chains():
        if n := counts[b]:
            out = model(tokens[b : b + 1, :n], cache, aux=(0, 2), logits=True)
            seen.append(torch.cat((out.hidden[0], *out.aux[:, 0], out.logits[0]), -1))
    if n:
        cache.commit([list(range(n // 2))])
    tokens, counts, parents = branches()
    n = counts[b]
    out = model(tokens[b : b + 1, :n], cache, tree=Tree(parents[b : b + 1, :n]), aux=(0, 2))
    seen.append(torch.cat((out.hidden[0], *out.aux[:, 0]), -1))
    cache.commit([[0, n - 1][:n]])
    if b in (21, 1, 20, 3):
        at = (21, 1, 20, 3).index(b)
        seen.append(model(tiny.tokens(4, 2, seed=5)[at : at + 1], cache).hidden[0])
    return seen


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_rows_of_a_wide_batch_are_rows_alone(family, monkeypatch):
    model = plain(family)
    monkeypatch.setattr(type(model), "walk", None)  # the modules' forward: all is native
    for b, mine in enumerate(in_company(model)):
        theirs = alone(model, b)
        mine = [x for x in mine if len(x)]
        assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_a_number_that_is_none_is_seen_wherever_it_is(family):
    model = plain(family)
    for name, tensor in list(named_tensors(model)):
        known, numbers = tensor.clone(), tensor.view(len(tensor), -1)
        numbers[:, numbers.shape[1] // 2] = torch.nan  # of every token and expert
        for T in (1, 9):
            cache = model.make_cache(2, 20)
            model(tiny.tokens(2, 1), cache)
            assert model(tiny.tokens(2, T), cache, logits=True).finite is False, name
        tensor.copy_(known)


@torch.inference_mode()
def test_a_tree_that_grows_over_several_forwards():
    model, parents = plain("gpt_oss"), torch.tensor([PARENTS, [0, 1, 0, 1, 1, 4]])
    values = []
    for model.native in (True, False):
        cache = model.make_cache(2, 40, slack=8)
        model(tiny.tokens(2, 9), cache, counts=[9, 4])
        hidden = []
        for held, new in ((0, 2), (2, 3), (5, 1)):
            step = cache.begin(new, tree=Tree(parents[:, : held + new], held))
            tokens = tiny.tokens(2, new, seed=held)
            if model.native:
                hidden.append(NativeStep(model, cache, step, (), False).run(tokens, step, cache).hidden)
            else:
                cos, sin = model.rope(step.positions + cache.offset)
                x = model.embed(tokens)
                for block, memory in zip(model.layers, cache.layers, strict=True):
                    x = block(x, cos, sin, memory, step, None)
                hidden.append(model.norm(x))
        values.append(torch.cat(hidden, 1))
    assert torch.equal(*values)


@torch.inference_mode()
def test_what_a_program_does_not_cover_runs_through_the_modules():
    model = plain("gpt_oss")
    cache = model.make_cache(1, 100, slack=4)
    model(
        tiny.tokens(1, 6), cache, tree=Tree(torch.zeros(1, 6, dtype=torch.int64))
    )  # its ring takes 5 at once
    cache.commit([[0]])
    assert model(tiny.tokens(1, 2), cache, routing=True).routing
    for block in model.layers:
        block.mlp.up.round_to_mxfp4 = True
    model(tiny.tokens(1, 2), cache)
    assert not model.native_steps
    for block in model.layers:
        block.mlp.up.round_to_mxfp4 = False
    model(tiny.tokens(1, 2), cache)
    assert len(model.native_steps) == 1


@torch.inference_mode()
def test_a_step_serves_one_cache_after_another():
    """Of other sizes, in turn, and after the first is gone."""
    model, texts = plain("gpt_oss"), (tiny.tokens(1, 9, seed=1), tiny.tokens(1, 9, seed=2))
    remembered = []

    def run():
        caches, hidden = [model.make_cache(1, n, slack=3) for n in (12, 30)], []
        remembered.extend(map(ref, caches))
        for at in range(9):
            for text, cache in zip(texts, caches, strict=True):
                hidden.append(model(text[:, at : at + 1], cache).hidden)
        return torch.cat(hidden)

    first = run()
    (step,) = model.native_steps.values()
    gc.collect()
    assert [cache() for cache in remembered] == [None, None], (
        "a step keeps the keys and values of a text that is done"
    )
    assert torch.equal(first, run()) and list(model.native_steps.values()) == [step]
    model.native = False
    assert torch.equal(first, run())


@torch.inference_mode()
def test_threads_that_share_a_model():
    model = plain("gpt_oss")
    texts = [tiny.tokens(1, 40, seed=seed) for seed in range(4)]

    @torch.inference_mode()
    def run(text):
        cache = model.make_cache(1, 40, slack=3)
        return torch.cat([model(text[:, at : at + 1], cache).hidden for at in range(40)], dim=1)

    alone = [run(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, texts))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@torch.inference_mode()
def test_copies_and_other_weights_have_steps_of_their_own():
    model = plain("llama")
    before = model(tiny.tokens(1, 2), model.make_cache(1, 9)).hidden
    other = copy.deepcopy(model)
    other.layers[0].mlp.down_proj.weight.mul_(2)
    changed = other(tiny.tokens(1, 2), other.make_cache(1, 9)).hidden
    assert model.native_steps and other.native_steps and not torch.equal(before, changed)
    assert torch.equal(model(tiny.tokens(1, 2), model.make_cache(1, 9)).hidden, before)
    rounded = model.to(torch.bfloat16)(tiny.tokens(1, 2), model.make_cache(1, 9)).hidden
    model.native = False
    assert torch.equal(model(tiny.tokens(1, 2), model.make_cache(1, 9)).hidden, rounded)
    assert not torch.equal(rounded, before)


@torch.inference_mode()
def test_a_layer_that_is_not_there_is_refused():
    model = plain("llama")
    with pytest.raises(KeyError):
        model(tiny.tokens(1, 2), model.make_cache(1, 9), aux=(0, model.config.num_layers))


@torch.inference_mode()
def test_queries_are_recorded_once_a_partial_view_wants_them():
    model = plain("gpt_oss")
    cache = model.make_cache(1, 40, slack=4)
    model(tiny.tokens(1, 2), cache)
    PartialCache(cache, PartialConfig(block_size=4), 4)
    model(tiny.tokens(1, 2), cache)
    recorded = [memory.recorded is not None for memory in cache.layers]
    assert recorded == [not window for window in cache.windows]


@pytest.mark.parametrize("token", [-1, tiny.VOCAB])
@torch.inference_mode()
def test_a_token_outside_the_vocabulary_is_refused(token):
    model = plain("llama")
    cache = model.make_cache(1, 9)
    for model.native in (True, False):
        with pytest.raises(IndexError):
            model(torch.tensor([[3, token]]), cache)
        assert cache.lengths == [0]


@torch.inference_mode()
def test_results_stay_what_they_were_after_the_next_step():
    model = plain("llama")
    cache = model.make_cache(1, 20)
    first = model(tiny.tokens(1, 2), cache, aux=(1,))
    hidden, aux = first.hidden.clone(), first.aux.clone()
    model(tiny.tokens(1, 2, seed=4), cache, aux=(1,))
    assert torch.equal(first.hidden, hidden) and torch.equal(first.aux, aux)


@torch.no_grad()
def test_what_runs_through_the_modules_says_why(monkeypatch):
    dense = plain("gpt_oss")
    assert why_modules(dense, dense.make_cache(1, 9)) is None
    odd = build(tiny.config("llama", head_dim=12)).eval()
    assert why_modules(odd, odd.make_cache(1, 9)) == "head_dim 12 is no multiple of 8"
    latent = latent_target("gpt_oss", 8)[1]
    assert module_attention(latent.make_cache(1, 9)).startswith("latent KV in layers ")
    indexed = indexed_target("gpt_oss")[1]
    assert module_attention(indexed.make_cache(1, 9)).startswith("an index in layers ")
    cache = dense.make_cache(1, 9, slack=4)
    assert not module_attention(cache)
    PartialCache(cache, PartialConfig(block_size=4), 4)
    assert module_attention(cache).startswith("partial KV in layers ")
    with torch.enable_grad():
        assert "without gradients" in why_modules(dense, dense.make_cache(1, 9))
    monkeypatch.setattr(bindings, "available", lambda: False)
    assert why_modules(dense, dense.make_cache(1, 9)) is not None


@torch.inference_mode()
def test_steps_share_buffers_that_grow():
    """So that a step for each size of prompt and proposal takes the memory of the largest few."""
    model = plain("gpt_oss")
    steps, cache, wanted = model.native_steps, model.make_cache(1, 300, slack=64), []
    for tokens in (*range(1, 30), 128, 128, 3):
        wanted.append(model(tiny.tokens(1, tokens, seed=tokens), cache, logits=True))
        cache.rewind([0])
    rows = steps.buffers["logits"].numel() // model.config.vocab_size
    assert rows == 128 and len(steps) == 30
    alive = {step.logits.untyped_storage().data_ptr() for step in steps.values()}
    assert len(alive) == 7  # of 1, 2, 4, 8, 16, 32 and 128 rows
    for tokens, out in zip((*range(1, 30), 128, 128, 3), wanted, strict=True):
        again = model(tiny.tokens(1, tokens, seed=tokens), cache, logits=True)
        cache.rewind([0])
        assert torch.equal(again.logits, out.logits) and torch.equal(again.hidden, out.hidden)


def test_threads_take_turns_with_the_buffers():
    """Steps of other sizes, at once: each has the logits that it has alone."""
    model = plain("gpt_oss")

    @torch.inference_mode()
    def run(tokens):
        cache, ids = model.make_cache(1, 40, slack=8), tiny.tokens(1, tokens, seed=tokens)
        outs = []
        for _ in range(40):
            outs.append(model(ids, cache, logits=True).logits)
            cache.rewind([0])
        return outs

    alone = {tokens: run(tokens)[0] for tokens in range(1, 9)}
    with ThreadPoolExecutor(8) as pool:
        for tokens, outs in zip(alone, pool.map(run, alone), strict=True):
            assert all(torch.equal(out, alone[tokens]) for out in outs)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_the_bytes_of_a_step_are_known_before(family):
    model, few, many = plain(family), 6, 128
    cache = model.make_cache(1, 300, slack=8)
    model(tiny.tokens(1, many), cache, aux=(0, 2))
    out = model(tiny.tokens(1, few), cache, logits=True)
    held = sum(buffer.nbytes for buffer in model.native_steps.buffers.values())
    returned = 4 * (many * 3 * model.config.hidden_size) + out.logits.nbytes
    assert step_bytes(model.config, many, 2, few) == held + returned


class OneThread(TorchDispatchMode):
    """Fails on operators over so many numbers that torch wakes its threads for them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in (args, out))
        known = {x.untyped_storage().data_ptr() for x in given}
        for x in made:
            view = x.untyped_storage().data_ptr() in known and not func._schema.is_mutable
            assert view or x.numel() <= ALONE, f"{func} of {x.numel()} numbers"
        return out


@torch.inference_mode()
def test_torchs_threads_rest_in_a_prompt():
    """They would spin on the cores that the next steps need."""
    model = outpace.load().target
    tokens = torch.arange(300)[None] % model.config.vocab_size
    caches = [model.make_cache(1, 400, slack=8) for _ in range(2)]
    wanted = model(tokens, caches[0], aux=(1, 3))
    assert wanted.hidden.numel() > ALONE
    with OneThread():
        out = model(tokens, caches[1], aux=(1, 3))
    assert torch.equal(out.hidden, wanted.hidden) and torch.equal(out.aux, wanted.aux)
    model(tokens[:, :64], caches[0])
    assert torch.equal(out.hidden, wanted.hidden), "an output is no buffer of the step"
