"""Mutants of training by several processes, and of its teacher caches."""

# name, file, source text (once in the file), replacement, the tests that must fail
MUTANTS = [
    (
        "vLLM's layer k is our layer k",
        "outpace/teacher/vllm_files.py",
        "return tuple(k - 1 for k in (ids[:-1] if self.final else ids))",
        "return tuple(min(k, layers - 1) for k in (ids[:-1] if self.final else ids))",
        "tests/teacher/test_vllm_files.py",
    ),
    (
        "imported states are compared with nothing",
        "outpace/teacher/vllm_files.py",
        "        if path == checked:\n",
        "        if path == first:\n",
        "tests/teacher/test_vllm_files.py",
    ),
    (
        "imported final states without the final norm",
        "outpace/teacher/vllm_files.py",
        "target.norm(states[:, -1].to(target.device, target.dtype))",
        "states[:, -1].to(target.device, target.dtype)",
        "tests/teacher/test_vllm_files.py",
    ),
    (
        "a batch's states are compared with themselves",
        "outpace/teacher/build.py",
        "check_states(name, layer_ids, alone, out.aux[:, b, :n], TOLERANCE[target.dtype])",
        "check_states(name, layer_ids, alone, alone, TOLERANCE[target.dtype])",
        "tests/teacher/test_build.py",
    ),
    (
        "each process learns from its own rows alone",
        "outpace/train/trainer.py",
        "    ranks.add_gradients(parameters)\n",
        "",
        "tests/train/test_ranks.py",
    ),
    (
        "a mean over a process's rows",
        "outpace/ops/ranks.py",
        "return Mean((weights * x).sum(), weights.sum())",
        "return Mean((weights * x).sum() / weights.sum() / size(), weights.sum() / weights.sum() / size())",
        "tests/train/test_ranks.py",
    ),
    (
        "a mean over a process's draft tokens",
        "outpace/train/eagle3.py",
        "Mean(rows.total, weights.sum())",
        "Mean(rows.total / weights.sum(), weights.sum() / weights.sum())",
        "tests/train/test_ranks.py",
    ),
    (
        "a micro-batch's loss by its own weight",
        "outpace/train/trainer.py",
        "weight = ranks.total(_weights(result)) if weights is None else weights",
        "weight = ranks.total(_weights(result)) * len(parts)",
        "tests/train/test_ranks.py",
    ),
    (
        "anchors that move between two runs of a micro-batch",
        "outpace/train/dflash.py",
        "after=partial(self.followed.update, samples, packed.layout, result.hits)",
        "tokens=loss.tokens + 0 * id(self.followed.update(samples, packed.layout, result.hits))",
        "tests/train/test_ranks.py::test_micro_batches_are_one_batch",
    ),
    (
        "indices that hang on the rows before",
        "outpace/train/eagle3.py",
        "rngs = [seeded(self.recipe.seed, 1, step, sample) for sample in samples]",
        "rngs = [seeded(self.recipe.seed, 1, step, n) for n in range(len(samples))]",
        "tests/train/test_ranks.py::test_micro_batches_are_one_batch",
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
