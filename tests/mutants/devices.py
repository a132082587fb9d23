"""Mutants of memory plans, captured steps and device rounds."""

# name, file, source text (once in the file), replacement, the tests that must fail
MUTANTS = [
    (
        "a plan of memory forgets keys and values",
        "outpace/models/memory.py",
        """return self.weights + self.kv + self.step + SPARE""",
        """return self.weights + self.step + SPARE""",
        "tests/models/test_memory.py",
    ),
    (
        "a plan of memory counts what views show",
        "outpace/models/memory.py",
        """if id(storage) not in given:""",
        """if True:""",
        "tests/models/test_memory.py",
    ),
    (
        "a round observes the states of the last one where its tokens go",
        "outpace/decode/static_drafts.py",
        """step_of(state.aux.shape[2], state.starts - state.kept, state.kept))""",
        """step_of(state.aux.shape[2], state.starts, state.kept))""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "a chain goes on from the state of the last position, kept or not",
        "outpace/decode/static_drafts.py",
        """newest = (state.kept - 1).clamp(min=0)[:, None, None]""",
        """newest = (state.kept * 0 + embeds.shape[1] - 1)[:, None, None]""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "an EAGLE-3 begins without the prompt's last state",
        "outpace/decode/static_drafts.py",
        """        state.kept.fill_(1)""",
        """        state.kept.fill_(0)""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "a controller that learns hears of no round",
        "outpace/decode/device_rounds.py",
        """if not isinstance(controller, Fixed):""",
        """if False:""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "rows that are done go on",
        "outpace/decode/round.py",
        """(state.left - kept).clamp(min=0)""",
        """(state.left - kept).clamp(min=1)""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "an accepted token after a rejected one",
        "outpace/decode/round.py",
        """.long().cumprod(1).sum(1)""",
        """.long().sum(1)""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "the host waits for every round",
        "outpace/decode/device_rounds.py",
        """before, waiting = waiting, (n, self.play(n))""",
        """before = (n, self.play(n))""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "a draft that rests observes nothing",
        "outpace/decode/round.py",
        """state.aux[:, :, :n] = out.aux[:, :, :n]""",
        """state.aux[:, :, :n] = out.aux[:, :, :n] if n > 1 else state.aux[:, :, :n]""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "capturing a round commits it",
        "outpace/decode/device_rounds.py",
        """                self.state.get_buffer(name).copy_(buffer)""",
        """                self.state.get_buffer(name)""",
        "tests/decode/test_device_rounds.py",
    ),
    (
        "a graph is replayed with the lengths of the round before",
        "outpace/models/cuda_graphs.py",
        """        self.numbers.copy_(torch.tensor((starts, counts)), non_blocking=True)
        whole""",
        """        numbers = self.numbers.clone()
        self.numbers.copy_(torch.tensor((starts, counts)), non_blocking=True)
        if numbers[1].any():
            self.numbers[0] = numbers[0]
        whole""",
        "tests/models/test_cuda_graphs.py",
    ),
    (
        "outputs stay in the buffers of a graph",
        "outpace/models/cuda_graphs.py",
        """return x[:, :T].clone() if whole""",
        """return x[:, :T] if whole""",
        "tests/models/test_cuda_graphs.py",
    ),
    (
        "a chain's graph serves a tree",
        "outpace/models/cuda_graphs.py",
        """key = cache.buffers.steps, (width, tree, aux)""",
        """key = cache.buffers.steps, (width, aux)""",
        "tests/models/test_cuda_graphs.py",
    ),
    (
        "rows without a sequence append to the buffers",
        "outpace/models/cuda_graphs.py",
        """starts, counts = [0] * R, [0] * R""",
        """starts, counts = [0] * R, [1] * R""",
        "tests/models/test_cuda_graphs.py",
    ),
    (
        "buffers are lent twice",
        "outpace/models/cuda_graphs.py",
        """            self.free.remove(buffers)""",
        """            buffers.cache.batch""",
        "tests/models/test_cuda_graphs.py",
    ),
    (
        "a deterministic target's cache is longer with a draft",
        "outpace/models/cuda_graphs.py",
        """max(length + FEW - (slack if slack > 1 else 0), LENGTH)""",
        """max(length + FEW, LENGTH)""",
        "tests/models/test_cuda_graphs.py",
    ),
]
