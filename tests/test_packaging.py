"""Files around the package: versions are equal wherever they are named, and the examples of CONTRIBUTING.md run."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.pages import blocks
from support.processes import Processes

import cp_dtensor

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    changelog = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (changelog[0], citation["version"]) == (cp_dtensor.__version__, cp_dtensor.__version__)


def test_nothing_installs_the_name_from_a_registry() -> None:
    """Where the library is not registered, another project could be."""
    folders = [ROOT / name for name in ("cp_dtensor", "docs", "examples")]
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.*"))]
    texts = {path: path.read_text() for path in files if path.suffix in (".md", ".py", ".toml")}
    installs = re.compile(r"pip install (-\S+ )*['\"]?cp_dtensor\b")
    assert [str(path) for path, text in texts.items() if installs.search(text)] == []


@pytest.mark.parametrize(
    ("program", "ranks", "package"),
    [
        ("fsdp2.py", 2, None), ("cuda_graph.py", 2, None), ("ways/ring.py", 4, None),
        ("integrations/transformers_two_ranks.py", 2, "transformers"),
        ("integrations/accelerate_two_ranks.py", 2, "accelerate"),
        ("integrations/trainer_two_ranks.py", 2, "accelerate"),
        ("integrations/diffusers_four_ranks.py", 4, "diffusers"),
    ],
)  # fmt: skip
def test_examples_started_by_python_say_what_to_type(
    program: str, ranks: int, package: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package is not None:
        pytest.importorskip(package, reason="needs the extra: pip install -c constraints.txt -e '.[integrations]'")
    monkeypatch.delenv("RANK", raising=False)
    path = ROOT / "examples" / program
    monkeypatch.syspath_prepend(str(path.parent))
    line = rf"start with torchrun: torchrun --nproc-per-node {ranks} (\S*/)?examples/{re.escape(program)}"
    with pytest.raises(SystemExit, match=f"^{line}$"):
        runpy.run_path(str(path), run_name="__main__")


def test_workflows_cover_the_versions_that_the_package_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    matrix = jobs["matrix"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    (oldest,) = re.findall(r'^dependencies = \["torch>=([\d.]+)"\]', PYPROJECT, re.MULTILINE)
    assert matrix["torch"][0].startswith(oldest)
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in matrix["torch"]
    assert [step["run"] for step in jobs["pinned"]["steps"] if "run" in step] == [".ci/run"]


CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def run_program(rank: int, program: str) -> bool:
    """Run a program; return True if it came to its last variables."""
    names: dict[str, object] = {"__name__": "contributing"}
    exec(compile(program, "CONTRIBUTING.md", "exec"), names)
    return isinstance(names["j"], torch.Tensor) and "LowMemoryRing" in names and "layer" in names


def test_the_examples_of_contributing_run_on_four_ranks(four_processes: Processes) -> None:
    """They compare with one device themselves. In processes: a name of a transport is registered once in each."""
    programs = [each for each in blocks(CONTRIBUTING, "python") if "max_distance" not in each]
    assert len(programs) == 6
    assert all(four_processes.run(run_program, "\n".join(programs)))


def apply_edits(diff: str, folder: Path) -> None:
    """Apply a diff without numbers of lines; each edited place must be there once."""
    for part in diff.split("--- ")[1:]:
        name, *hunks = re.split(r"\n@@\n", part.rstrip("\n"))
        text = (folder / name).read_text()
        for hunk in hunks:
            lines = hunk.splitlines()
            old, new = ("\n".join(line[1:] for line in lines if line[0] != other) + "\n" for other in "+-")
            assert text.count(old) == 1, f"{name}: an edit of CONTRIBUTING.md expects this once:\n{old}"
            text = text.replace(old, new)
        (folder / name).write_text(text)


def test_the_option_of_contributing_works_in_a_copy_of_the_package(tmp_path: Path) -> None:
    """Ranks are threads of another process, which imports the copy."""
    (diff,) = blocks(CONTRIBUTING, "diff")
    shutil.copytree(ROOT / "cp_dtensor", tmp_path / "cp_dtensor", ignore=shutil.ignore_patterns("__pycache__"))
    apply_edits(diff, tmp_path)
    check, *others = blocks(CONTRIBUTING, "python")
    (use,) = (each for each in others if "max_distance" in each)
    program = f"from support.ranks import run_ranks\nrun_ranks(4, lambda _: exec({check + use!r}, {{}}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "tests")))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
