"""Write docs/files.md: every module of the package with the first sentence of its docstring.

python docs/make_files.py            write the page
python docs/make_files.py --check    fail if the page is out of date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
SOURCE = ROOT / "src" / "gatespace"
HEAD = """# Every module

The first sentence of every module; [architecture](architecture.md) says how they belong together. Tests mirror this
tree below `tests/`. This page is written by `python docs/make_files.py`.
"""


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    first = text.split(". ")[0].rstrip(".:")
    return first.replace("|", "\\|")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    folders = sorted({path.parent for path in SOURCE.rglob("*.py")})
    for folder in folders:
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        init = folder / "__init__.py"
        name = folder.relative_to(SOURCE.parent).as_posix()
        parts.append(f"\n## {name}\n\n{sentence(init) if init.exists() else ''}.\n")
        if modules:
            parts.append("\n| module | |\n|---|---|\n")
            parts += [f"| `{path.name}` | {sentence(path)} |\n" for path in modules]
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            0 if PAGE.read_text(encoding="utf-8") == page() else "docs/files.md is out of date: run docs/make_files.py"
        )
    PAGE.write_text(page(), encoding="utf-8")
