"""Mutants of plans for several devices."""

TESTS = "tests/test_plan_cluster.py"
SIZES, JOBS = "outpace/plan/sizes.py", "outpace/plan/jobs.py"

# name, file, source text (once in the file), replacement, the tests that must fail
MUTANTS = [
    (
        "a sharded draft gathers nothing",
        "outpace/plan/jobs.py",
        """ADAMW * choices.draft_parameters / sharers + gathered""",
        """ADAMW * choices.draft_parameters / sharers""",
        "tests/test_plan_cluster.py",
    ),
    (
        "biases that every process divides",
        SIZES,
        "parts[name][1] * share",
        "parts[name][1] / ranks",
        TESTS,
    ),
    (
        "the mean of the ranks for the busiest",
        SIZES,
        "busiest(self.experts_touched(tokens, rho), E, self.ranks) * self.ranks / E",
        "self.experts_touched(tokens, rho) / E",
        TESTS,
    ),
    (
        "the whole KV in every rank",
        SIZES,
        "return number * numbers / self.ranks",
        "return number * numbers",
        TESTS,
    ),
    (
        "a training that tensor parallel divides",
        JOBS,
        "DRAFT = Job(draft_memory, draft_rate, False,",
        "DRAFT = Job(draft_memory, draft_rate, True,",
        TESTS,
    ),
    (
        "hours of one target for all",
        JOBS,
        " * (devices // ranks) for",
        " for",
        TESTS,
    ),
    (
        "a fix for fewer devices than it takes",
        JOBS,
        'hardware = "" if count == devices else',
        'hardware = "" if count else',
        TESTS,
    ),
]
