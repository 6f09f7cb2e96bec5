"""Rooms of the package, their floors and allowed imports, which `test_house` checks, and the imports of its files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "cp_dtensor"

# Room -> floor. Imports stay in their room or point to a lower floor. `attention` and `comm` never import each other.
FLOORS = {
    "_torch": 0,
    "spec": 0,
    "plan": 1,
    "attention": 2,
    "comm": 2,
    "engine": 3,
    "api": 4,
    "layers": 5,
    "integrations": 6,
    "tools": 6,
}

WITHOUT_TORCH = ("spec", "plan")

# Room -> the dotted prefixes of torch that it may not import.
FORBIDDEN_TORCH = {
    "attention": ("torch.distributed",),
    "comm": ("torch.distributed.tensor",),
    "engine": ("torch.distributed.tensor",),
}

# Modules (prefixes) that tools may import besides themselves and the public names of the package: plans and masks as
# data, the choice of kernels, the measurement of links, and the size of symmetric memory.
TOOLS_IMPORT = (
    "plan", "spec", "attention.backends", "comm.groups", "comm.links", "comm.symm_mem_workspace", "comm.transports",
    "engine.choose",
)  # fmt: skip

# Modules (prefixes) that layers may import besides themselves: masks and layouts, and the seam for building blocks.
LAYERS_IMPORT = ("spec", "api.extension")

# Modules of other rooms than the seam that the integration of transformers still imports.
TRANSFORMERS_STILL_IMPORT = ("layers.arguments",)

# Modules (prefixes) that may import triton.
TRITON = ("_torch", "attention.triton", "comm.triton_kernels")


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted names below a package (the package itself is "") and their files."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def room(module: str) -> str:
    """The room of a dotted name below `cp_dtensor`; "" for the package itself."""
    return module.split(".")[0]


@cache
def imports(module: str, path: Path) -> list[tuple[int, str, str]]:
    """Line, local name and absolute dotted name of everything imported, in functions and type checking blocks too."""
    found = []
    package = ["cp_dtensor", *module.split(".")] if module else ["cp_dtensor"]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((node.lineno, alias.asname or alias.name, alias.name))
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                found.append((node.lineno, alias.asname or alias.name, f"{origin}.{alias.name}"))
    return found


def our_imports(module: str, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and module (a dotted name below `cp_dtensor`) of every import of ours, in functions too."""
    for line, _, name in imports(module, modules[module]):
        if name.split(".")[0] == "cp_dtensor":
            parts = name.split(".")[1:]
            yield line, next(m for n in range(len(parts), -1, -1) if (m := ".".join(parts[:n])) in modules)
