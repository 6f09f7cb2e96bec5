"""Files around the package: versions are equal wherever they are named, and the examples of CONTRIBUTING.md run."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml
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


def run_program(rank: int, program: str) -> bool:
    """Run a program; return True if it came to its last variables."""
    names: dict[str, object] = {"__name__": "contributing"}
    exec(compile(program, "CONTRIBUTING.md", "exec"), names)
    return isinstance(names["j"], torch.Tensor) and "LowMemoryRing" in names


def test_the_examples_of_contributing_run_on_four_ranks(four_processes: Processes) -> None:
    """They compare with one device themselves. In processes: a name of a transport is registered once in each."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    assert all(four_processes.run(run_program, "\n".join(blocks)))
