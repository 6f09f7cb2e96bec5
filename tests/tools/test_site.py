"""The site: it is built without a warning, every link leads somewhere, every public name is in the reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.docs_scripts import ROOT, docs_script

import cp_dtensor

build_site = docs_script("build_site")


def test_the_site_is_built_and_has_every_name(tmp_path: Path) -> None:
    for package in ("zensical", "mkdocstrings"):
        pytest.importorskip(package, reason="needs the extra: pip install -c constraints.txt -e '.[docs]'")
    build_site.build(tmp_path / "site")
    reference = (tmp_path / "site" / "reference.html").read_text()
    members = ["Documents.from_lengths", "Hardware.of", "Layout.segments", "Mask.pairs"]
    assert [name for name in [*cp_dtensor.__all__, *members] if f'id="cp_dtensor.{name}"' not in reference] == []
    integrations = (tmp_path / "site" / "reference_integrations.html").read_text()
    functions = ["accelerate.enable", "diffusers.register", "torchtitan.inner_attention_map", "transformers.register"]
    assert [name for name in functions if f'id="cp_dtensor.integrations.{name}"' not in integrations] == []
    # A folder on disk, without a server or a network, has all that the search needs.
    home = (tmp_path / "site" / "index.html").read_text()
    assert re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="((?:https?:)?//[^"]+)', home) == []
    assert home.index('src="./iframe-worker.js"') < home.index('src="./assets/javascripts/bundle')
    assert (
        "Worker = class extends Worker { constructor() { super(" in (tmp_path / "site" / "iframe-worker.js").read_text()
    )
    assert (tmp_path / "site" / "search.js").read_text().startswith("var __index = ")


def test_every_document_is_in_the_menu() -> None:
    menu = set(re.findall(r'= "([\w/]+\.md)"', (ROOT / "zensical.toml").read_text()))
    documents = {path.name for path in (ROOT / "docs").glob("*.md")}
    outside = {"index.md", "reference.md", "reference_integrations.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert menu == documents | outside | {"benchmarks/README.md"}


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"> <a href="b.html#gone"> <a href="c.html"> <img src="d.png">'
    )
    (tmp_path / "b.html").write_text(
        '<p id="here"> <a href="#here"> <a href="https://example.org/x"> <a href="a.html">'
    )
    assert list(build_site.broken_links(tmp_path)) == ["a.html: b.html#gone", "a.html: c.html", "a.html: d.png"]


def test_doctests_of_docstrings_get_fences() -> None:
    source = '    """Sum.\n\n    >>> f(\n    ...     1)\n    [1]\n    """\n    x = 1\n'
    fenced = '    """Sum.\n\n    ```pycon\n    >>> f(\n    ...     1)\n    [1]\n    ```\n    """\n    x = 1\n'
    assert build_site.with_fences(source) == fenced


def test_public_names_are_those_of_the_package() -> None:
    assert build_site.public_names() == cp_dtensor.__all__
