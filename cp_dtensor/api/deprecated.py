"""Old spellings of keyword arguments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def renamed_keywords(**names: str) -> Callable[[F], F]:
    """Lets a function take old keyword names, with a DeprecationWarning: `@renamed_keywords(old="new")`.

    Raises:
        TypeError: a call that passes both spellings.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old in kwargs:
                    owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
                    if new in kwargs:
                        raise TypeError(f"{owner} got {new}= and its old spelling {old}=: pass {new}= only")
                    warnings.warn(f"{owner}: {old}= is now {new}=", DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate
