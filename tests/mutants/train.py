"""Mutants of training by several processes."""

# name, file, source text (once in the file), replacement, the tests that must fail
MUTANTS = [
    (
        "each process learns from its own rows alone",
        "outpace/train/trainer.py",
        "    ranks.average_gradients(parameters)\n",
        "",
        "tests/train/test_ranks.py",
    ),
    (
        "a mean over a process's rows",
        "outpace/ops/ranks.py",
        "return size() * (weights * x).sum() / total(weights.sum()).clamp(min=TINY)",
        "return (weights * x).sum() / weights.sum().clamp(min=TINY)",
        "tests/train/test_ranks.py",
    ),
    (
        "a mean over a process's draft tokens",
        "outpace/train/eagle3.py",
        "weights * ranks.size() / ranks.total(weights.sum())",
        "weights / weights.sum()",
        "tests/train/test_ranks.py",
    ),
    (
        "anchors that hang on the rows before",
        "outpace/train/dflash.py",
        "rngs = [seeded(self.recipe.seed, 1, step, sample) for sample in samples]",
        "rngs = [seeded(self.recipe.seed, 1, step, n) for n in range(len(samples))]",
        "tests/train/test_ranks.py",
    ),
    (
        "anchors that follow a process's own rows",
        "outpace/train/data.py",
        "in ranks.gathered(list(zip(samples, begins, strict=True))):",
        "in zip(samples, begins, strict=True):",
        "tests/train/test_ranks.py",
    ),
]
