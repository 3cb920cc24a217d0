"""Find the modules that annotate tensor shapes. Their functions are checked at every call in tests."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
SHAPED = re.compile(r"^from (jaxtyping|vitascope\.shapes|vitascope\.data\.source) import", re.MULTILINE)


def find_shaped_modules() -> list[str]:
    files = [path for path in SOURCES.rglob("*.py") if SHAPED.search(path.read_text(encoding="utf-8"))]
    return [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in files]
