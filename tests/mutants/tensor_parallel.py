"""Mutants of a target over several processes."""

TESTS = "tests/models/test_tensor_parallel.py"
PARALLEL = "outpace/models/tensor_parallel.py"

# name, file, source text (once in the file), replacement, the tests that must fail
MUTANTS = [
    (
        "a bias that every process adds",
        PARALLEL,
        "    if group.rank:\n        layer.bias = None\n",
        "",
        TESTS,
    ),
    (
        "the first process's experts in all",
        PARALLEL,
        "own = chosen - self.group.rank * count",
        "own = chosen",
        TESTS,
    ),
    (
        "the first process's kv heads in all",
        PARALLEL,
        "return [whole[_own(whole.shape[0], group)] for whole in wholes]",
        """groups = [group] + 2 * [Group(group.size, 0)]
        return [w[_own(w.shape[0], g)] for w, g in zip(wholes, groups, strict=False)]""",
        TESTS,
    ),
    (
        "the first process's sinks in all",
        PARALLEL,
        "    names = entry.names\n",
        """    names = entry.names
    if group is not None and entry.param.endswith("sinks"):
        group = Group(group.size, 0)
""",
        TESTS,
    ),
    (
        "the first process's columns of blocks in all",
        PARALLEL,
        "Quant(weight.data[:, _own(weight.data.shape[1], group)]",
        "Quant(weight.data[:, _own(weight.data.shape[1], Group(group.size, 0))]",
        TESTS,
    ),
    (
        "a sum in the order of an all-reduce",
        "outpace/ops/ranks.py",
        "        total = parts[0].float()\n",
        "        x = x.clone()\n        dist.all_reduce(x)\n        return x\n",
        f"{TESTS}::test_three_processes",
    ),
    (
        "a seed of each process",
        "outpace/api.py",
        "group.leaders(secrets.randbits(63))",
        "secrets.randbits(63)",
        TESTS,
    ),
    (
        "the fingerprint of a part",
        "outpace/models/load.py",
        'checkpoint = getattr(model, "checkpoint", None)',
        "checkpoint = None",
        TESTS,
    ),
    (
        "a native step that adds nothing up",
        "outpace/models/native_step.py",
        "self.y.copy_(part.sum(self.y))",
        "pass",
        TESTS,
    ),
]
