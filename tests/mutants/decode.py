"""Mutants of decode, drafts and the benchmark's checks."""

# name, file, source text (once in the file), replacement, the tests that must fail
MUTANTS = [
    (
        "ties of a tenth of a logit",
        "outpace/bench/metrics.py",
        "TIE = 1e-4  #",
        "TIE = 1e-1  #",
        "tests/bench/test_ties.py",
    ),
    (
        "EAGLE-3's rewind keeps pending states",
        "outpace/drafts/eagle3_decode.py",
        "        self.cache.rewind(lengths)\n        self.pending = []",
        "        self.cache.rewind(lengths)",
        "tests/drafts/test_eagle3_session.py",
    ),
    (
        "EAGLE-3's rewind keeps cached pairs",
        "outpace/drafts/eagle3_decode.py",
        "        self.cache.rewind(lengths)\n        self.pending = []",
        "        self.pending = []",
        "tests/drafts/test_eagle3_session.py",
    ),
    (
        "penalties that ignore draft tokens of the step",
        "outpace/decode/acceptance.py",
        "        way[..., 0] = 0  # the last",
        "        way[...] = 0  # the last",
        "tests/decode/test_penalty.py",
    ),
    (
        "the last verified token penalized twice",
        "outpace/decode/acceptance.py",
        "        way[..., 0] = 0  # the last",
        "        # the last",
        "tests/decode/test_penalty.py",
    ),
    (
        "draft tokens compared with the target's token before",
        "outpace/decode/acceptance.py",
        "parent == path[-1] and tokens[column] == value[parent]",
        "parent == path[-1] and tokens[column] == value[max(parent - 1, 0)]",
        "tests/decode/test_rules.py",
    ),
    (
        "a path that leaves the tree",
        "outpace/decode/acceptance.py",
        "parent == path[-1] and tokens[column] == value[parent]",
        "tokens[column] == value[parent]",
        "tests/decode/test_rules.py",
    ),
]
