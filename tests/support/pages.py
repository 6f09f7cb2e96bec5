"""Programs in the pages of the documentation."""

import re
from pathlib import Path


def blocks(path: Path, *languages: str) -> list[str]:
    """Contents of the fenced blocks of these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
