"""The house rules, executed: layers, torch's private symbols, size and documentation."""

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from layers import LAYERS, LOWEST_LAYER

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cp_dtensor"

DOOR = "_torch_private"  # importable from everywhere, imports nothing of ours, alone may touch torch's private names
TOP = 7  # the package itself, which only collects the public names

ATTENTION_OP = re.compile(r"torch\.ops\.aten\._scaled_dot_product_\w+(\.\w+)?")
NAMEDTUPLE_API = {"_asdict", "_fields", "_make", "_replace"}
MAX_LINES = 300


def package_modules() -> dict[str, Path]:
    """Dotted names below `cp_dtensor` (the package itself is "") and their files."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = package_modules()
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda name: name or "cp_dtensor")


def fitting(name: str, table: dict[str, int]) -> int | None:
    """The entry of the longest dotted prefix of `name`."""
    parts = name.split(".")
    return next((table[key] for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in table), None)


def in_door(module: str) -> bool:
    return module.split(".")[0] == DOOR


def layer(module: str) -> int:
    found = TOP if not module else fitting(module, LAYERS)
    assert found is not None, f"cp_dtensor.{module} has no layer: add it to LAYERS in layers.py"
    return found


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), filename=str(MODULES[module]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, local name and absolute dotted name of everything imported, in functions and type checking blocks too."""
    package = ["cp_dtensor", *module.split(".")] if module else ["cp_dtensor"]
    if MODULES[module].name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{origin}.{alias.name}"


def torch_names(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every use of torch that starts at an import: `dist.x` is `torch.distributed.x`."""
    aliases: dict[str, str] = {}
    for line, local, name in imports(module, tree):
        top = local.split(".")[0]
        aliases[top] = name if top == local else top  # `import torch.distributed` binds `torch`
        yield line, name

    def resolve(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return aliases.get(node.id)
        if isinstance(node, ast.Attribute) and (base := resolve(node.value)):
            return f"{base}.{node.attr}"
        return None

    for node in ast.walk(tree):  # `aten = torch.ops.aten`
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (alias := resolve(node.value)):
            aliases[node.targets[0].id] = alias
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (used := resolve(node)):
            yield node.lineno, used


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def own_names(tree: ast.Module) -> Iterator[str]:
    """Names that the module itself defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every attribute that is read, written, or named in `getattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            accessor = node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            if accessor and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def report(module: str, violations: list[tuple[int, str]], rule: str) -> None:
    path = MODULES[module].relative_to(ROOT)
    assert not violations, rule + "".join(f"\n  {path}:{line}: {what}" for line, what in sorted(set(violations)))


def test_the_package_is_here() -> None:
    assert "" in MODULES, f"{PACKAGE}/__init__.py is missing"


@each_module
def test_imports_point_downward(module: str) -> None:
    allowed = -1 if in_door(module) else layer(module)
    violations = []
    for line, _, name in imports(module, parse(module)):
        target, _, rest = name.partition(".")
        if target != "cp_dtensor" or rest.split(".")[0] == DOOR:
            continue
        target_layer = fitting(rest, LAYERS) if rest else TOP
        if target_layer is None:
            target_layer = TOP  # a name that the package itself exports
        if target_layer > allowed:
            violations.append((line, f"{name} (layer {target_layer})"))
        elif rest.split(".")[0] == "tools" and module.split(".")[0] != "tools":
            violations.append((line, f"{name} (the library never imports its tools)"))
    report(module, violations, f"layer {allowed} may not import from above:")


@each_module
def test_torch_is_used_from_its_layer_up(module: str) -> None:
    if in_door(module):
        return
    found = [(line, name) for line, name in torch_names(module, parse(module)) if name.split(".")[0] == "torch"]
    violations = [(line, name) for line, name in found if (fitting(name, LOWEST_LAYER) or 0) > layer(module)]
    report(module, violations, f"too low for layer {layer(module)}, see LOWEST_LAYER in layers.py:")


@each_module
def test_triton_stays_in_the_kernels_and_tools(module: str) -> None:
    if module.split(".")[0] not in ("kernels", "tools"):
        found = [(line, name) for line, _, name in imports(module, parse(module)) if name.split(".")[0] == "triton"]
        report(module, found, "only cp_dtensor.kernels and cp_dtensor.tools may import triton:")


@each_module
def test_private_names_of_others_stay_behind_the_door(module: str) -> None:
    if in_door(module):
        return
    tree = parse(module)
    may_call_attention = module.split(".")[0] in ("local_attention", "dtensor")
    violations = []
    for line, name in torch_names(module, tree):
        private = name.split(".")[0] == "torch" and any(map(is_private, name.split(".")))
        if private and not (may_call_attention and ATTENTION_OP.fullmatch(name)):
            violations.append((line, name))
    allowed = NAMEDTUPLE_API | set(own_names(tree))
    for line, name in attributes(tree):
        attention_op = may_call_attention and name.startswith("_scaled_dot_product_")
        if is_private(name) and name not in allowed and not attention_op:
            violations.append((line, f".{name}, which this module does not define"))
    report(module, violations, f"private names of torch or of another module, outside of cp_dtensor.{DOOR}:")


@each_module
def test_no_global_statements(module: str) -> None:
    found = [(node.lineno, ", ".join(node.names)) for node in ast.walk(parse(module)) if isinstance(node, ast.Global)]
    report(module, found, "global statements:")


def test_files_are_short() -> None:
    files = [path for folder in ("cp_dtensor", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_import_without_triton_and_cuda() -> None:
    program = """
import sys
sys.modules["triton"] = None  # its import fails from here on
import torch
sdpa = torch.nn.functional.scaled_dot_product_attention
import cp_dtensor
assert torch.nn.functional.scaled_dot_product_attention is sdpa, "the import patched torch"
assert not any(name.startswith("cp_dtensor.tools") for name in sys.modules), "the import loaded the tools"
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_public_names_have_docstrings() -> None:
    package = importlib.import_module("cp_dtensor")
    exported = getattr(package, "__all__", None)
    assert exported, "cp_dtensor has no __all__"
    assert package.__doc__, "cp_dtensor has no docstring"
    undocumented = []
    for name in exported:
        public = getattr(package, name)
        generated = inspect.isclass(public) and (public.__doc__ or "").startswith(f"{name}(")  # by @dataclass
        if (inspect.isclass(public) or callable(public)) and (generated or not public.__doc__):
            undocumented.append(name)
    assert not undocumented


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if ">>>" in path.read_text()])
def test_docstring_examples(module: str) -> None:
    if module.split(".")[0] == "kernels":
        pytest.importorskip("triton")
    result = doctest.testmod(importlib.import_module(f"cp_dtensor.{module}".rstrip(".")))
    assert result.attempted > 0
    assert result.failed == 0, "see the output above"
