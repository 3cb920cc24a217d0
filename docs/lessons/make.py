"""Pages -> what their code prints and draws, and notebooks: `make lessons` runs every page and puts it right.

A page is Markdown. Its ```python blocks are run from top to bottom in one namespace; a ```text block right after one
holds what that block prints. Where a trained model speaks, other machines may round otherwise: ```text within=0.05
says by how much a number may differ.
"""

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import torch
from PIL import Image

HERE = Path(__file__).parent
PAGES = sorted(HERE.glob("[0-9]-*.md"))
CELL = re.compile(
    r"```python\n(?P<code>.*?)```\n(?:\n```text(?: within=(?P<within>[\d.]+))?\n(?P<shown>.*?)```\n)?", re.S
)
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
RELATIVE = re.compile(r"\]\((?!https?://|#)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
COLOURS = (256, 128, 64)  # in a picture: as many as fit into LARGEST
LARGEST = 60_000  # bytes


@dataclass(frozen=True)
class Cell:
    """A piece of code and what the page says it prints; `within`: how far numbers may be off."""

    code: str
    shown: str
    within: float


def cells(text: str) -> list[Cell]:
    return [Cell(found["code"], found["shown"] or "", float(found["within"] or 0)) for found in CELL.finditer(text)]


def run(text: str, name: str = "lesson") -> Iterator[str]:
    """Run a page's code in the current folder: what each piece prints, one after the other."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(text), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell.code, f"{name}, piece {number}", "exec"), namespace)
        yield printed.getvalue()


def agree(shown: str, printed: str, within: float) -> bool:
    """The same words, and numbers that differ by no more than they may."""
    if not within:
        return shown == printed
    if [part.split() for part in NUMBER.split(shown)] != [part.split() for part in NUMBER.split(printed)]:
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(abs(float(one) - float(other)) <= within + 1e-9 for one, other in pairs)


def filled(text: str, printed: list[str]) -> str:
    """The page with what its code printed."""
    words = iter(printed)

    def fill(found: re.Match[str]) -> str:
        said = next(words)
        allowed = f" within={found['within']}" if found["within"] else ""
        return f"```python\n{found['code']}```\n" + (f"\n```text{allowed}\n{said}```\n" if said else "")

    return CELL.sub(fill, text)


def notebook(text: str) -> str:
    """The page as a notebook without outputs; it lies one folder deeper, so its links go up once more."""
    made = jupytext.reads(RELATIVE.sub("](../", text), fmt="md")
    made.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
    return jupytext.writes(made, fmt="ipynb") + "\n"


def notebook_of(page: Path) -> Path:
    return HERE / "notebooks" / f"{page.stem}.ipynb"


def make(page: Path) -> None:
    """Run a page in a folder of its own, then write page, pictures and notebook."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = filled(text, list(run(text, page.name)))
        for picture in sorted(Path("images").glob("*.png")):
            shrink(picture, HERE / "images" / picture.name)
    page.write_text(text, encoding="utf-8")
    notebook_of(page).write_text(notebook(text), encoding="utf-8")


def shrink(picture: Path, small: Path) -> None:
    """The same picture with a palette, in as few bytes as a page should have."""
    for colours in COLOURS:
        Image.open(picture).convert("RGB").quantize(colours, kmeans=4, dither=Image.Dither.NONE).save(
            small, optimize=True
        )
        if small.stat().st_size <= LARGEST:
            return


if __name__ == "__main__":
    torch.set_num_threads(1)  # these models are too small for more
    asked = os.environ.get("LESSON", "")
    for page in PAGES:
        if page.name.startswith(asked):
            print(page.name, flush=True)
            make(page)
