"""A forward over a tree against every root-to-leaf path run as plain text: logits, aux states, the cache."""

import copy
import functools

import pytest
import tiny
import torch
import trees

from outpace.kv.tree import Tree
from outpace.models.load import build, named_tensors

HEADS = {"qwen3": 16, "qwen3_moe": 24}  # dims of heads that the kernels take: multiples of 8
PREFIXES = (23, 5, 12)  # of the rows; the tiny windows are 7


@pytest.fixture(params=["kernels", "reference"])
def way(request, force_kernels):
    """Both attention paths. What the kernels give must be autoregressive decoding's to the bit."""
    force_kernels(request.param == "kernels")
    return request.param


@functools.cache
@torch.inference_mode(False)
def target(family, window=True):
    model = build(tiny.config(family, window=window, head_dim=HEADS.get(family, 8)))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


def prefilled(model, prompts, headroom, slack=1):
    cache = model.make_cache(len(prompts), max(map(len, prompts)) + headroom, slack=slack)
    for at in range(0, max(map(len, prompts)), 7):
        part = [p[at : at + 7] for p in prompts]
        ids = torch.tensor([p + [0] * (7 - len(p)) for p in part])
        model(ids, cache, counts=[len(p) for p in part])
    return cache


def plainly(model, prompts, texts):
    """Each text after its prompt, token by token -> per text logits [n, V] and aux [L, n, C]; the cache."""
    cache = prefilled(model, prompts, max(map(len, texts)) + 1)
    layers = tuple(range(model.config.num_layers))
    logits, aux = [[] for _ in texts], [[] for _ in texts]
    for i in range(max(map(len, texts))):
        going = [i < len(text) for text in texts]
        ids = torch.tensor([[text[i] if i < len(text) else 0] for text in texts])
        out = model(ids, cache, counts=[int(on) for on in going], aux=layers)
        value = model.logits(out.hidden)
        for b, on in enumerate(going):
            if on:
                logits[b].append(value[b, 0])
                aux[b].append(out.aux[:, b, 0])
    return [torch.stack(x) for x in logits], [torch.stack(x, 1) for x in aux], cache


def close(got, wanted, way, scale=1.0):
    if way == "kernels":
        assert torch.equal(got, wanted)
    else:
        assert (got - wanted).abs().max() <= 1e-4 * scale


def held(memory, b, n, window):
    """The keys and values that a query after n tokens may need, in order."""
    index = torch.arange(max(0, n - window + 1) if window else 0, n)
    return memory.k[b][:, index % memory.size], memory.v[b][:, index % memory.size]


def same_memory(model, ours, b, theirs, other, n, way):
    for i, (x, y) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        window = model.config.window(i)
        for got, wanted in zip(held(x, b, n, window), held(y, other, n, window), strict=True):
            close(got, wanted, way)


def run(model, shapes, seed, way, commit_seed=0):
    """One tree per row; every path of every row is a row of its own for autoregressive decoding."""
    rows = [trees.parents_of(shape, n, seed + b) for b, (shape, n) in enumerate(shapes)]
    counts, N = [len(row) for row in rows], max(map(len, rows))
    prompts = [tiny.tokens(n, seed=n + seed).tolist() for n in PREFIXES[: len(rows)]]
    ids = tiny.tokens(len(rows), N, seed=seed + 50)
    cache = prefilled(model, prompts, N + 2, slack=N)
    layers = tuple(range(model.config.num_layers))
    out = model(ids, cache, counts=counts, tree=Tree(trees.padded(rows, N)), aux=layers)
    logits = model.logits(out.hidden)

    paths = [(b, path) for b, row in enumerate(rows) for path in trees.leaf_paths(row, counts[b])]
    texts = [ids[b, path].tolist() for b, path in paths]
    theirs, aux, _ = plainly(model, [prompts[b] for b, _ in paths], texts)
    for (b, path), want, state in zip(paths, theirs, aux, strict=True):
        close(logits[b, path], want, way)
        close(out.aux[:, b, path], state, way, scale=float(state.abs().max()))  # not normed, as logits are

    # commit a path of every row, cut somewhere: the cache is that of the text, and goes on as it does
    rng = torch.Generator().manual_seed(commit_seed)
    chosen = []
    for b in range(len(rows)):
        mine = [i for i, (row, _) in enumerate(paths) if row == b]
        one = mine[int(torch.randint(len(mine), (1,), generator=rng))]
        chosen.append((one, paths[one][1][: 1 + int(torch.randint(len(paths[one][1]), (1,), generator=rng))]))
    cache.commit([path for _, path in chosen])
    texts = [ids[b, path].tolist() for b, (_, path) in enumerate(chosen)]
    alone = plainly(model, prompts, texts)[2]
    assert cache.lengths == alone.lengths
    for b, n in enumerate(cache.lengths):
        same_memory(model, cache, b, alone, b, n, way)
    following = tiny.tokens(len(rows), 1, seed=seed + 99)
    ours, theirs = (model.logits(model(following, c).hidden) for c in (cache, alone))
    close(ours, theirs, way)


SHAPES = {
    "mixed": [("any", 12), ("deep", 7), ("wide", 9)],
    "deeper than the window": [("chain", 12), ("deep", 15), ("any", 3)],
    "wider than 64": [("any", 80), ("wide", 70), ("deep", 66)],
    "one row": [("any", 10)],
    "roots alone": [("any", 1), ("any", 1), ("any", 5)],
}


@torch.inference_mode()
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_path_says_what_plain_decoding_says(family, shapes, way):
    run(target(family), SHAPES[shapes], seed=len(shapes), way=way)


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("window", [False, True])
def test_random_trees(window, seed, way):
    shapes = [(shape, 3 + (seed * 5 + b * 4) % 13) for b, shape in enumerate(("deep", "any", "wide"))]
    run(target("gpt_oss", window), shapes, seed=seed + 100, way=way, commit_seed=seed)


@torch.inference_mode()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_tree_grown_level_by_level_is_the_tree_at_once(family, batch, way):
    """What is held is behind the verified tokens and in front of the new ones, in rings too."""
    model, N = target(family), 13
    rows = [trees.parents_of(shape, N, 3) for shape in ("any", "deep")][:batch]
    parents = trees.padded(rows, N)
    ids, prompts = tiny.tokens(batch, N, seed=9), [tiny.tokens(n, seed=n).tolist() for n in PREFIXES[:batch]]
    wanted = model(ids, prefilled(model, prompts, N, slack=N), tree=Tree(parents)).hidden
    cache, got = prefilled(model, prompts, N, slack=N), []
    for begin, end in ((0, 1), (1, 5), (5, 6), (6, N)):
        step = cache.begin(end - begin, tree=Tree(parents[:, :end], begin))
        got.append(forward(model, ids[:, begin:end], cache, step))
    close(torch.cat(got, 1), wanted, way)


def forward(model, tokens, cache, step):
    """A forward where the tokens are not remembered."""
    cos, sin = model.rope(step.positions)
    x = model.embed(tokens)
    for block, memory in zip(model.layers, cache.layers, strict=True):
        x = block(x, cos, sin, memory, step, None)
    return model.norm(x)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [4, 12, 70])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_what_a_prompt_leaves_does_not_depend_on_the_slack(family, chunk, way):
    """A plain loop keeps no slack and a tree much: both must go on from the same keys and logits."""
    model, states = target(family), []
    prompts = tiny.tokens(2, 83)
    for slack in (1, 5, 30, 66):
        cache = model.make_cache(2, 100, slack=slack)
        parts = [
            model(part, cache, counts=[part.shape[1], part.shape[1] // 2]).hidden
            for part in prompts.split(chunk, 1)
        ]
        states.append([x[0, -1] for x in parts])
    for other in states[1:]:
        for got, wanted in zip(other, states[0], strict=True):
            close(got, wanted, way)


@torch.inference_mode()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tree_on_a_device(device):
    """There masks are formed without looking at the parents; a commit moves the same columns."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    N, prompt = 13, tiny.tokens(2, 20, seed=4)
    parents, ids = trees.padded([trees.parents_of(s, N) for s in ("deep", "any")], N), tiny.tokens(2, N)
    path, items = [trees.ancestors(row, N - 1) for row in parents.tolist()], []
    for place in ("cpu", device):
        model = copy.deepcopy(target("gpt_oss")).to(place)
        cache = model.make_cache(2, 40, slack=N)
        model(prompt.to(place), cache)
        value = model(ids.to(place), cache, tree=Tree(parents.to(place))).hidden
        cache.commit(path)
        after = model(torch.tensor([[7], [8]], device=place), cache).hidden
        items.append((value.cpu(), after.cpu()))
    for got, wanted in zip(items[1], items[0], strict=True):
        assert (got - wanted).abs().max() < 1e-3
