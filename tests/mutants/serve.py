"""Mutants of the server: batching, reuse, and what it says."""

# name, file, source text (once in the file), replacement, the tests that must fail
MUTANTS = [
    (
        "a row that claims its last token, which is not in the cache",
        "outpace/serve/sequence.py",
        "return (self.prompt + self.tokens)[: self.cached]",
        "return self.prompt + self.tokens",
        "tests/serve/test_engine.py",
    ),
    (
        "a prompt that lies in the cache to its end",
        "outpace/serve/engine.py",
        "_alike(busy.get(row, held), prompt[:-1])",
        "_alike(busy.get(row, held), prompt)",
        "tests/serve/test_engine.py",
    ),
    (
        "rows that forget who left them",
        "outpace/serve/engine.py",
        "self.held[sequence.row] = [] if error else sequence.in_cache",
        "pass",
        "tests/serve/test_engine.py",
    ),
    (
        "a copied beginning without its last token",
        "outpace/kv/base.py",
        "part[target, :, :count] = part[source, :, :count]",
        "part[target, :, : count - 1] = part[source, :, : count - 1]",
        "tests/serve/test_engine.py",
    ),
    (
        "accepted nodes moved in the first rows of the cache",
        "outpace/kv/base.py",
        "start = [starts.get(row, 0) for row in range(R)]",
        "start = [0] * R",
        "tests/kv/test_cache_rows.py",
    ),
    (
        "a step in the rows of the step before",
        "outpace/models/native_step.py",
        "self.rows[:] = list(step.cache_rows or range(len(step.start)))",
        "self.rows[:] = list(range(len(step.start)))",
        "tests/kv/test_cache_rows.py",
    ),
    (
        "a request without speculation that is drafted for",
        "outpace/serve/server.py",
        "if asked is False:",
        "if asked is None:",
        "tests/serve/test_http.py",
    ),
    (
        "reasoning in the content",
        "outpace/serve/wire.py",
        'return {"reasoning": part.text} if part.text else {}',
        'return {"content": part.text} if part.text else {}',
        "tests/serve/test_wire.py",
    ),
    (
        "a response that is kept without its question",
        "outpace/serve/responses.py",
        "[*before, *messages_of(body.input), *answered]",
        "[*before, *answered]",
        "tests/serve/test_responses.py",
    ),
    (
        "drafts that cost many what they cost one",
        "outpace/serve/costs.py",
        "draft=tuple(times * seconds for seconds in p.draft)",
        "draft=p.draft",
        "tests/serve/test_shared_costs.py",
    ),
]
