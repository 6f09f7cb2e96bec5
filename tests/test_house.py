"""Checks of the package's structure: rooms and imports, torch's private symbols, file sizes and documentation."""

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from support.import_rules import (
    FLOORS,
    FORBIDDEN_TORCH,
    LAYERS_IMPORT,
    PACKAGE,
    TOOLS_IMPORT,
    TRANSFORMERS_STILL_IMPORT,
    TRITON,
    WITHOUT_TORCH,
    imports,
    modules_of,
    our_imports,
    room,
)

ROOT = Path(__file__).resolve().parents[1]

# The room, and the files of other rooms, that may touch private names of torch or of an optional package.
DOORS = (
    "_torch",
    "integrations.transformers.private",
    "attention.backends.cudnn_flex",
    "attention.backends.flash4",
    "integrations.torch_experimental.private",
    "tools.torch_methods",
)

# Files that plug into another program, whose hooks have private names; torch's private names are not for them.
PROVIDERS = ("integrations.accelerate", "integrations.diffusers")

ATTENTION_OP = re.compile(r"torch\.ops\.aten\._scaled_dot_product_\w+(\.\w+)?")
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_exit"}  # of named tuples, and os._exit
MAX_LINES = 500


MODULES = modules_of(PACKAGE)


def starts_with(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), filename=str(MODULES[module]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def torch_names(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every use of torch that starts at an import: `dist.x` is `torch.distributed.x`."""
    aliases: dict[str, str] = {}
    for line, local, name in imports(module, MODULES[module]):
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


def test_the_package_is_here() -> None:
    assert "" in MODULES, f"{PACKAGE}/__init__.py is missing"


def test_every_module_is_in_a_room() -> None:
    assert {room(module) for module in MODULES} - {"", "__main__"} <= set(FLOORS)


# Names that the redesign has replaced (docs/glossary.md); `config` is that of other programs and of Triton's kernels.
OLD_NAMES = {
    "AttentionConfig", "BoundCall", "CallFacts", "CallKeys", "CallValues", "CompiledCallSpec", "ConstantKeys",
    "RuntimeNumbers", "SavedCall", "entry", "found_in", "from_forward", "is_right", "layout_is_found", "name_of",
    "reads_context", "setting", "settings", "spec_key", "token", "way", "ways",
}  # fmt: skip
CONFIG_OF_OTHERS = ("integrations.", "attention.triton.", "_torch.compiler")


# Rules of each module: line and text of what breaks them

Violations = list[tuple[int, str]]


def imports_point_downward(module: str) -> Violations:
    """A room imports lower floors only."""
    if room(module) in ("", "__main__"):
        return []
    floor, may_import_the_package = FLOORS[room(module)], room(module) in ("integrations", "tools")
    return [
        (line, f"cp_dtensor.{target}")
        for line, target in our_imports(module, MODULES)
        if room(target) != room(module) and (FLOORS[room(target)] if target else max(FLOORS.values())) >= floor
        if target or not may_import_the_package
    ]


def integrations_import_public_names(module: str) -> Violations:
    """Integrations import what cp_dtensor and cp_dtensor.api.extension export, and spec."""
    if room(module) != "integrations":
        return []
    exported = {
        f"{prefix}.{name}"
        for prefix in ("cp_dtensor", "cp_dtensor.api.extension")
        for name in importlib.import_module(prefix).__all__
    }
    others = ("integrations", "spec", *TRANSFORMERS_STILL_IMPORT * module.startswith("integrations.transformers."))
    allowed = [f"cp_dtensor.{other}" for other in others]
    return [
        (line, name)
        for line, _, name in imports(module, MODULES[module])
        if name.split(".")[0] == "cp_dtensor" and not starts_with(name, allowed) and name not in exported
    ]


def layers_import_the_seam(module: str) -> Violations:
    """Layers import LAYERS_IMPORT of import_rules.py only."""
    allowed = ("layers", *LAYERS_IMPORT)
    found = our_imports(module, MODULES) if room(module) == "layers" else ()
    return [(line, f"cp_dtensor.{target}") for line, target in found if not starts_with(target, allowed)]


def tools_import_public_names_and_few_modules(module: str) -> Violations:
    """Tools import public names and TOOLS_IMPORT of import_rules.py only."""
    public, violations = importlib.import_module("cp_dtensor").__all__, []
    for line, _, name in imports(module, MODULES[module]) if room(module) == "tools" else ():
        top, _, below = name.partition(".")
        if top == "cp_dtensor" and below not in public and not starts_with(below, ("tools", *TOOLS_IMPORT)):
            violations.append((line, name))
    return violations


def torch_distributed_is_used_from_its_room_up(module: str) -> Violations:
    """What FORBIDDEN_TORCH of import_rules.py says of a room."""
    forbidden = FORBIDDEN_TORCH.get(room(module), ())
    return [(line, name) for line, name in torch_names(module, parse(module)) if starts_with(name, forbidden)]


def triton_stays_in_its_rooms(module: str) -> Violations:
    """Only TRITON of import_rules.py imports it."""
    found = () if starts_with(module, TRITON) else imports(module, MODULES[module])
    return [(line, name) for line, _, name in found if name.split(".")[0] == "triton"]


def private_names_of_others_stay_behind_the_door(module: str) -> Violations:
    """Private names of torch or of another module are for DOORS."""
    if starts_with(module, DOORS):
        return []
    tree = parse(module)
    may_call_attention = starts_with(module, ("attention.backends",))
    violations = []
    for line, name in torch_names(module, tree):
        private = name.split(".")[0] == "torch" and any(map(is_private, name.split(".")))
        if private and not (may_call_attention and ATTENTION_OP.fullmatch(name)):
            violations.append((line, name))
    allowed = PUBLIC | set(own_names(tree))
    for line, name in attributes(tree):
        attention_op = may_call_attention and name.startswith("_scaled_dot_product_")
        if is_private(name) and name not in allowed and not attention_op and not starts_with(module, PROVIDERS):
            violations.append((line, f".{name}, which this module does not define"))
    return violations


def no_global_statements(module: str) -> Violations:
    """None in the package."""
    return [(node.lineno, ", ".join(node.names)) for node in ast.walk(parse(module)) if isinstance(node, ast.Global)]


def names_are_those_of_the_glossary(module: str) -> Violations:
    """Names that docs/glossary.md has replaced are gone."""
    found = []
    for node in ast.walk(parse(module)):
        name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", None)
        if module.startswith("tools."):
            continue  # named anew with the tools
        if name in OLD_NAMES or (name == "config" and not module.startswith(CONFIG_OF_OTHERS)):
            found.append((node.lineno, name))
    return found


RULES = (
    imports_point_downward, integrations_import_public_names, layers_import_the_seam,
    tools_import_public_names_and_few_modules, torch_distributed_is_used_from_its_room_up, triton_stays_in_its_rooms,
    private_names_of_others_stay_behind_the_door, no_global_statements, names_are_those_of_the_glossary,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module(rule: Callable[[str], Violations]) -> None:
    broken = [
        f"{MODULES[module].relative_to(ROOT)}:{line}: {what}"
        for module in MODULES
        for line, what in sorted(set(rule(module)))
    ]
    assert not broken, "\n".join([str(rule.__doc__), *broken])


def test_no_file_circles() -> None:
    """Files that import each other in a loop, function-level imports included."""
    reaches = {module: {target for _, target in our_imports(module, MODULES)} - {module} for module in MODULES}
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle of imports: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in finished:
            for target in reaches[module]:
                visit(target, (*path, module))
            finished.add(module)

    for module in MODULES:
        visit(module, ())


def test_main_imports_no_tools() -> None:
    """`python -m cp_dtensor` imports the tools of its subcommand only, by their names."""
    assert [target for _, target in our_imports("__main__", MODULES)] == []


@pytest.mark.parametrize("blocked_room", WITHOUT_TORCH)
def test_rooms_that_import_with_torch_blocked(blocked_room: str) -> None:
    names = [f"cp_dtensor.{module}" for module in MODULES if room(module) == blocked_room]
    program = f"""
import importlib, sys, types
sys.modules["torch"] = None  # its import fails from here on
package = types.ModuleType("cp_dtensor")  # the package itself exports names that need torch
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["cp_dtensor"] = package
for name in {names}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_files_are_short() -> None:
    files = [path for folder in ("cp_dtensor", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_there_is_one_conftest() -> None:
    """Tests import it by name, and another one of that name would hide it."""
    assert [*(ROOT / "tests").rglob("conftest.py")] == [ROOT / "tests" / "conftest.py"]


def test_import_without_triton_and_cuda() -> None:
    program = """
import sys
import tokenize
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


@pytest.mark.parametrize("package_name", ["cp_dtensor", "cp_dtensor.api.extension"])
def test_public_names_have_docstrings(package_name: str) -> None:
    package = importlib.import_module(package_name)
    exported = getattr(package, "__all__", None)
    assert exported, f"{package_name} has no __all__"
    assert package.__doc__, f"{package_name} has no docstring"
    undocumented = []
    for name in exported:
        public = getattr(package, name)
        generated = inspect.isclass(public) and (public.__doc__ or "").startswith(f"{name}(")  # by @dataclass
        is_ours = getattr(public, "__module__", "cp_dtensor").startswith("cp_dtensor")  # a class of torch may have none
        if is_ours and (inspect.isclass(public) or callable(public)) and (generated or not public.__doc__):
            undocumented.append(name)
    assert not undocumented


def test_version_and_types() -> None:
    """pyproject.toml reads the version of the package, and a wheel has the marker of typed packages."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = importlib.import_module("cp_dtensor")
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "cp_dtensor.__version__"}
    assert "version" in settings["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", package.__version__)
    assert settings["tool"]["setuptools"]["package-data"] == {"cp_dtensor": ["py.typed"]}
    assert (ROOT / "cp_dtensor" / "py.typed").is_file()


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if ">>>" in path.read_text()])
def test_docstring_examples(module: str) -> None:
    if starts_with(module, ("attention.triton", "comm.triton_kernels", "_torch.triton_launch")):
        pytest.importorskip("triton")
    result = doctest.testmod(importlib.import_module(f"cp_dtensor.{module}".rstrip(".")))
    assert result.attempted > 0
    assert result.failed == 0, "see the output above"


# Room -> (most lines now, target). The room "" is the two files of the package itself. A commit that makes a room
# smaller lowers its cap; lines that move to another room move in both caps.
LINES = {
    "_torch": (1988, 1820),
    "spec": (1924, 1850),
    "plan": (2291, 1690),
    "attention": (4305, 4290),
    "comm": (3109, 2600),
    "engine": (3705, 3120),
    "api": (4020, 3480),
    "layers": (5099, 2500),
    "integrations": (5092, 2920),
    "tools": (3237, 2400),
    "": (142, 121),
}
PACKAGE_LINES = (34912, 27000)
TEST_LINES = (42508, 33500)  # 48,633 before the guards of the redesign and tests/matrix
# Option -> (most files of the package that name it, in comments, too; target).
FILES_OF_OPTIONS = {"softcap": (8, 8), "sinks": (12, 12), "deterministic": (12, 12)}


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_rooms_grow_no_further() -> None:
    rooms: dict[str, list[Path]] = {name: [] for name in LINES}
    for module, path in MODULES.items():
        rooms["" if module in ("", "__main__") else room(module)].append(path)
    found = {name: lines_of(paths) for name, paths in rooms.items()}
    over = {name: f"{lines} lines, at most {LINES[name][0]}" for name, lines in found.items() if lines > LINES[name][0]}
    assert not over, "rooms with more lines than their caps in LINES"
    assert sum(found.values()) <= PACKAGE_LINES[0]


def test_tests_grow_no_further() -> None:
    assert lines_of((ROOT / "tests").rglob("*.py")) <= TEST_LINES[0]


@pytest.mark.parametrize("option", FILES_OF_OPTIONS)
def test_options_touch_few_files(option: str) -> None:
    most, _ = FILES_OF_OPTIONS[option]
    files = [str(path.relative_to(ROOT)) for path in MODULES.values() if option in path.read_text()]
    assert 0 < len(files) <= most, f"{len(files)} files name {option}, at most {most} may:\n" + "\n".join(files)
