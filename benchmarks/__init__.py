"""The benchmarks: each file says what it measures and how to run it."""

import outpace  # noqa: F401 - before torch is loaded: it sets how long torch's threads spin
