"""Masks and layouts by the names that the commands take."""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, reduce, wraps
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cp_dtensor import (
    Balanced,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    MirroredBatch,
    PerDocument,
    PrefixLM,
    SlidingWindow,
    Striped,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
MASK_HELP = (
    "causal, full, window:LEFT,RIGHT (keys before and after a query, 'none' for no limit), window N (a query and the "
    "N - 1 keys before it), documents:0,40,64 (cumulative lengths), documents N (causal documents of lognormal "
    "lengths, median N, sigma 1), prefix:N, or several joined by &, such as 'documents:0,40,64 & causal'"
)
LAYOUTS: dict[str, Callable[[Any, int], Layout]] = {
    "HeadTail": lambda mask, seq_len: HeadTail(), "Contiguous": lambda mask, seq_len: Contiguous(),
    "Striped": lambda mask, seq_len: Striped(1), "MirroredBatch": lambda mask, seq_len: MirroredBatch(),
    "Balanced": Balanced, "PerDocument": lambda mask, seq_len: PerDocument(mask.cu_seqlens, seq_len=seq_len),
}  # fmt: skip
"""Layouts of a mask and a length, by name."""


@lru_cache
def mask_by_name(name: str, seq_len: int) -> Mask:
    """Return the mask of a name (see `MASK_HELP`) over `seq_len` tokens.

    >>> mask_by_name("window 4096", 8192)
    SlidingWindow(left=4095, right=0, alignment='top_left')

    Raises:
        ValueError: no mask has this name.
    """
    return reduce(and_, (_single_mask(part.strip(), seq_len) for part in name.split("&")))


def _single_mask(name: str, seq_len: int) -> Mask:
    masks: dict[str, Callable[..., Mask]] = {
        "causal": Causal,
        "full": Full,
        "window:": SlidingWindow,
        "window ": lambda width: SlidingWindow(width - 1, 0),
        "documents:": lambda first, second, *others: Documents((first, second, *others)),
        "documents ": lambda median: lognormal_documents(seq_len, median, sigma=1.0),
        "prefix:": PrefixLM,
    }
    found = re.fullmatch(r"(\w+[: ]?)((?:\d+|none)(?:,\s*(?:\d+|none))*)?", name)
    if found and found[1] in masks:
        numbers = (None if part.strip() == "none" else int(part) for part in (found[2] or "").split(",") if part)
        with suppress(TypeError, ValueError):  # another number of numbers, or numbers that no such mask has
            return masks[found[1]](*numbers)
    raise ValueError(
        "expected a mask such as causal, full, 'documents 2048' (of that median length), 'window 4096', window:3,0, "
        f"documents:0,40,64 or prefix:8, or several joined by &, got {name!r}"
    )


def lognormal_documents(seq_len: int, median: int, sigma: float, seed: int = 0) -> Documents:
    """Return documents of lognormal lengths that fill a sequence, causal within each document.

    >>> lognormal_documents(10, median=4, sigma=0.0).lengths
    (4, 4, 2)
    """
    generator = random.Random(seed)
    lengths: list[int] = []
    left = seq_len
    while left > 0:
        # Rounded with a little slack, since exp(log(4)) need not be 4.
        length = math.floor(math.exp(generator.gauss(math.log(median), sigma)) + 1e-6)
        lengths.append(min(max(length, 1), left))
        left -= lengths[-1]
    return Documents.from_lengths(lengths, within=Causal())


@lru_cache
def layout_by_name(name: str, mask: Mask, seq_len: int) -> Layout:
    """Return the layout of a name such as "HeadTail" or "Striped(4)"; `Balanced` is balanced for the mask.

    >>> layout_by_name("Striped(4)", Causal(), 64)
    Striped(block=4)

    Raises:
        ValueError: no layout has this name, or the layout does not fit the mask.
    """
    if found := re.fullmatch(r"Striped(?:\((\d+)\))?", name):
        return Striped(int(found[1] or 1))
    if name == "PerDocument" and not isinstance(mask, Documents):
        raise ValueError("PerDocument is a layout of documents")
    if name not in LAYOUTS:
        raise ValueError(f"expected a layout, one of {', '.join(LAYOUTS)} or one such as Striped(4), got {name!r}")
    return LAYOUTS[name](mask, seq_len)


def command_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand, which shows its description as it is written."""
    formatter = argparse.RawDescriptionHelpFormatter
    name = f"python -m cp_dtensor {command}"
    usage = f"{name} [options]"  # without the list of options, which would hide an error
    return argparse.ArgumentParser(prog=name, usage=usage, description=description, formatter_class=formatter)


def save_picture(parser: argparse.ArgumentParser, path: Path, draw: Callable[[], Figure]) -> None:
    """Write what `draw` draws to a file; exit with a message without matplotlib, or if the file cannot be written."""
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("a picture needs matplotlib: pip install matplotlib")
    figure = draw()
    try:
        figure.savefig(path, dpi=110, facecolor="white")
    except (OSError, ValueError) as error:
        parser.error(f"--output {path}: {error}")
    print(f"wrote {path}")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return `parse` as the type of a command-line argument: argparse shows the message of its ValueError."""

    @wraps(parse)
    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


@argument
def positive(text: str) -> int:
    """Read a positive integer of a command line."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a positive integer, got {text}")
    return int(text)


@argument
def positive_number(text: str) -> float:
    """Read a positive number of a command line."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise ValueError(f"expected a positive number, got {text}")


@argument
def mask_argument(text: str) -> str:
    """Read the name of a mask of a command line."""
    mask_by_name(text, seq_len=1)  # refuses other names
    return text
