"""Counters in Prometheus's text format; names end as vLLM's do."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from outpace.serve.engine import Engine
from outpace.serve.sequence import Sequence

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """`ended` is called once for each sequence, by whoever answers for it, from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"outpace_{name}", what, labels, registry=self.registry)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"outpace_{name}", what, registry=self.registry, buckets=SECONDS)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens that were looked for in the cache"
        )
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens that lay in the cache")
        self.drafts = counter("spec_decode_num_drafts", "Rounds of sequences that have a draft")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.finished = counter("request_success", "Requests that ended", "finished_reason")
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token")
        self.between = histogram("inter_token_latency_seconds", "Mean time between the tokens of a request")
        self.queued = histogram("request_queue_time_seconds", "From arrival to a row of the cache")
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end")
        self.registry.register(_Now(engine))

    def ended(self, sequence: Sequence, reason: str) -> None:
        times, tokens = sequence.times, len(sequence.tokens)
        self.finished.labels(reason).inc()
        self.prompt_tokens.inc(len(sequence.prompt))
        self.generation_tokens.inc(tokens)
        self.cache_queries.inc(len(sequence.prompt))
        self.cache_hits.inc(sequence.reused)
        if sequence.draft is not None:
            self.drafts.inc(sequence.rounds)
            self.draft_tokens.inc(sequence.drafted)
            self.accepted_tokens.inc(sequence.accepted)
        # the engine's thread writes "ended" when it next looks, which for a client that went away is later
        arrived, ended = times["arrived"], times.get("ended", time.perf_counter())
        if "admitted" in times:
            self.queued.observe(times["admitted"] - arrived)
        if "first" in times:
            self.first.observe(times["first"] - arrived)
            self.whole.observe(ended - arrived)
        if tokens > 1:
            self.between.observe((ended - times["first"]) / (tokens - 1))

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _Now:
    """Gauges that are read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        running, config = list(self.engine.running), self.engine.config
        held = sum(sequence.cached for sequence in running)
        for name, what, value in (
            ("num_requests_running", "Requests that have a row of the cache", len(running)),
            ("num_requests_waiting", "Requests that wait for one", len(self.engine.waiting)),
            (
                "kv_cache_usage_perc",
                "Share of the cache's tokens that running requests hold",
                held / (config.max_num_seqs * config.max_model_len),
            ),
        ):
            gauge = GaugeMetricFamily(f"outpace_{name}", what)
            gauge.add_metric([], value)
            yield gauge
