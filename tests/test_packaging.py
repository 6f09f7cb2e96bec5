"""Files around the package: versions are equal wherever they are named, and the examples of CONTRIBUTING.md run."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from support.ranks import run_ranks

import cp_dtensor
from cp_dtensor.comm.select import ROTATE_METHODS
from cp_dtensor.engine import planner

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    changelog = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (changelog[0], citation["version"]) == (cp_dtensor.__version__, cp_dtensor.__version__)


def test_workflows_cover_the_versions_that_the_package_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    matrix = jobs["matrix"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    (oldest,) = re.findall(r'^dependencies = \["torch>=([\d.]+)"\]', PYPROJECT, re.MULTILINE)
    assert matrix["torch"][0].startswith(oldest)
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in matrix["torch"]
    assert [step["run"] for step in jobs["pinned"]["steps"] if "run" in step] == [".ci/run"]


def test_the_examples_of_contributing_run_on_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare with one device themselves, and put a backend and a transport in place."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.setattr(planner, "choose_backend", planner.choose_backend)
    rotate_methods = dict(ROTATE_METHODS)
    program = compile("\n".join(blocks), "CONTRIBUTING.md", "exec")
    namespaces: list[dict[str, object]] = [{"__name__": "contributing"} for _ in range(4)]
    try:
        run_ranks(4, lambda rank: exec(program, namespaces[rank]))
    finally:
        ROTATE_METHODS.clear()
        ROTATE_METHODS.update(rotate_methods)
    assert all(isinstance(each["j"], torch.Tensor) for each in namespaces)
