"""A value formed at its first use, in code that torch.compile captures."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):
    """functools.cached_property without a lock: in Python 3.11 it has one, which torch.compile cannot enter.
    Two threads may form the value twice, so it must not matter which of the two is kept."""

    def __init__(self, form: Callable[[Any], T]) -> None:
        self.form, self.__doc__ = form, form.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value = self.form(instance)
        object.__setattr__(instance, self.name, value)  # from now on found before this: it has no __set__
        return value
