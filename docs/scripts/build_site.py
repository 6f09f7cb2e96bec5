"""The site: docs/ and the pages beside it as HTML, an API reference from the docstrings, and a check of every link.

pip install -c constraints.txt -e '.[docs]' && python docs/scripts/build_site.py --output outputs/site

Pages are copied to a temporary folder first: the README becomes the first page, and examples become files of the site.
"""

from __future__ import annotations

import argparse
import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
INTEGRATIONS = (
    "transformers", "accelerate", "diffusers", "torchtitan", "torch_experimental", "ring_flash_attn", "long_context",
    "unified",
)  # fmt: skip
LINK = re.compile(r"(\]\()([^)#\s:]+)")


def stage(folder: Path) -> None:
    """Copies configuration, pages, examples and the package to a folder."""
    pages = folder / "docs"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("scripts"))
    shutil.copytree(ROOT / "docs" / "scripts", pages / "scripts")
    shutil.copytree(ROOT / "examples", pages / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "cp_dtensor", folder / "package" / "cp_dtensor")
    shutil.copy(ROOT / "zensical.toml", folder)
    ways = pages / "examples" / "ways"
    shown = [f"## {path.stem}\n\n```python\n{path.read_text()}```\n" for path in sorted(ways.glob("*.py"))]
    prints = "Each prints its error beside one device, as `ring: largest error of out and gradients 4.4e-15`."
    (ways / "index.md").write_text("\n".join(["# Short examples", prints, *shown]))
    for page in pages.rglob("*.md"):  # what was outside of docs/ is at its top now
        up = "../" * len(page.relative_to(pages).parts)
        text = page.read_text().replace(f"]({up}README.md", f"]({up[3:]}index.md").replace(f"]({up}", f"]({up[3:]}")
        page.write_text(text.replace("examples/ways)", "examples/ways/index.md)"))
    for name in ("README.md", *PAGES):
        text = (ROOT / name).read_text()
        (pages / name).write_text(LINK.sub(lambda match: match[1] + match[2].removeprefix("docs/"), text))
    (pages / "README.md").rename(pages / "index.md")
    names = "\n".join(f"::: cp_dtensor.{name}\n" for name in sorted(public_names(), key=str.lower))
    (pages / "reference.md").write_text(f"# Reference\n\n{names}")
    modules = "\n".join(f"::: cp_dtensor.integrations.{name}\n" for name in INTEGRATIONS)
    (pages / "reference_integrations.md").write_text(f"# Integrations\n\n{modules}")
    for source in (folder / "package").rglob("*.py"):
        source.write_text(with_fences(source.read_text()))


def public_names() -> list[str]:
    """`cp_dtensor.__all__`, read without importing torch."""
    for node in ast.parse((ROOT / "cp_dtensor" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError("cp_dtensor/__init__.py has no __all__")


def with_fences(source: str) -> str:
    """Puts the doctests of docstrings into fences, since Markdown would read `[1]` in their output as a link."""
    return re.sub(
        r"^( *)>>> .*\n(?:\1(?!\"\"\"|Args:|Raises:|Returns:).*\S.*\n)*",
        lambda match: f"{match[1]}```pycon\n{match[0]}{match[1]}```\n",
        source,
        flags=re.MULTILINE,
    )


def build(output: Path) -> None:
    """Builds the site, where every warning is an error.

    Raises:
        SystemExit: the build fails, or a link leads nowhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if result.returncode or "Failed to get" in result.stdout + result.stderr:  # an argument without a description
            sys.exit(result.stdout + result.stderr)
        if output.exists():
            shutil.rmtree(output)
        shutil.copytree(Path(folder) / "site", output)
    # A page on disk may start no worker from a file, only from text. zensical.toml loads this before the search.
    (worker,) = (path.read_text() for path in output.glob("assets/javascripts/workers/search*.js"))
    start = f"constructor() {{ super(URL.createObjectURL(new Blob([{json.dumps(worker)}]))) }}"
    (output / "iframe-worker.js").write_text(
        f'if (location.protocol === "file:") Worker = class extends Worker {{ {start} }}'
    )
    broken = list(broken_links(output))
    if broken:
        sys.exit("\n".join(["links that lead nowhere:", *broken]))


def broken_links(site: Path) -> Iterator[str]:
    """Page and target of every link, picture and anchor of a built site that does not exist.

    Zensical itself checks links from page to page only: no pictures, no other files, no links in docstrings.
    """
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: set(map(html.unescape, re.findall(r'\bid="([^"]+)"', text))) for path, text in pages.items()}
    for path, text in pages.items():
        if path.name == "404.html":
            continue
        for link in sorted(set(map(html.unescape, re.findall(r'\b(?:href|src)="([^"]*)"', text)))):
            if re.match(r"(\w+:|//)", link):
                continue
            to, _, anchor = link.partition("#")
            target = Path(os.path.normpath(path.parent / unquote(to))) if to else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in anchors and unquote(anchor) not in anchors[target]):
                yield f"{path.relative_to(site)}: {link}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parsed = parser.parse_args()
    build(parsed.output)
    print(f"{len(list(parsed.output.rglob('*.html')))} pages in {parsed.output}")


if __name__ == "__main__":
    main()
