"""A draft session that many texts share: a row of its cache each, and one forward for those that propose."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Self

from outpace.kv.base import KVCache


class CacheRows:
    """See `RowsSession`: of a session that remembers in a `KVCache`."""

    cache: KVCache

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    @contextmanager
    def of(self, rows: Sequence[int]) -> Iterator[Self]:
        own, lengths = copy(self), self.cache.lengths
        own.cache = self.cache.of(rows, [lengths[row] for row in rows])
        yield own
        for row, n in zip(rows, own.cache.lengths, strict=True):
            lengths[row] = n

    def flush(self) -> None:
        """Nothing waits: what is observed is remembered at once."""

    def reuse(self, source: int, row: int, count: int) -> None:
        assert count <= self.cache.lengths[source]
        if source != row:
            self.cache.copy(source, row, count)
        self.cache.lengths[row] = count
