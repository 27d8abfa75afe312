"""Print the lines of Python in each folder beside its ceiling in ceilings.txt; exit 1 if a folder is above it.

A change that makes a folder smaller lowers its ceiling: `python .ci/lines.py --lower`. Raising one is done by hand,
with the reason in the change.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / ".ci" / "ceilings.txt"


def lines_of(folder: str) -> int:
    """Lines of the Python files in a folder and below, without subfolders that have a row of their own."""
    nested = [ROOT / other for other in ceilings if other.startswith(f"{folder}/")]
    files = (path for path in (ROOT / folder).rglob("*.py") if not any(path.is_relative_to(other) for other in nested))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


ceilings = {folder: int(ceiling) for folder, ceiling in (row.split() for row in TABLE.read_text().splitlines())}
lines = {folder: lines_of(folder) for folder in ceilings}
if "--lower" in sys.argv[1:]:
    ceilings = {folder: min(ceiling, lines[folder]) for folder, ceiling in ceilings.items()}
    TABLE.write_text("".join(f"{folder:34} {ceiling:6}\n" for folder, ceiling in ceilings.items()))

above = [folder for folder in ceilings if lines[folder] > ceilings[folder]]
for folder, ceiling in ceilings.items():
    print(f"{folder:34} {lines[folder]:6} of {ceiling:6}{'  too many' if folder in above else ''}")
for top in ("src", "tests"):
    print(f"{top:34} {sum(count for folder, count in lines.items() if folder.startswith(top)):6}")
if above:
    sys.exit(f"too many lines in {', '.join(above)}: shorten it, or raise .ci/ceilings.txt and say why in the change")
