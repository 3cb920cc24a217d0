"""Write exercise files with gaps to fill in, and count sheet E's points for correct parts."""

from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from vitascope.checking.result import Report
from vitascope.errors import UserError, did_you_mean

SKELETONS = files("vitascope.checking") / "skeletons"
EXERCISES = {
    "attention": "scaled dot-product attention with a mask (sheets A, B)",
    "multi-head-attention": "multi-head attention as a module (sheets B, C)",
    "self-attention-2d": "self-attention over the positions of a feature map (sheet E)",
    "causal-mask": "a mask that blocks attention to later tokens (sheet C)",
    "patchify": "split images into patches (sheet E)",
    "sinusoidal-positions": "sinusoidal position embeddings (sheet D)",
    "feed-forward": "the MLP that is applied to every token (sheet E)",
    "transformer-block": "attention and MLP with pre-norm and residual connections (sheet E)",
    "class-token": "prepend the class token (sheets A, C)",
    "vit": "the complete vision transformer (sheet E)",
    "sheet-e": "all code of sheet E in one file (14 of its 20 points)",
}
UNCHECKED = (
    "Sheet E has 20 points. 14 points are for code and can be checked here. "
    "6 points are for reaching 25, 50 and 70 % accuracy and cannot be checked here."
)
SHEET_E = {"self-attention-2d", "feed-forward", "transformer-block", "patchify", "vit"}  # parts with points


class Point(NamedTuple):
    """A task of sheet E, the points given, and the points possible."""

    what: str
    given: int
    of: int


def start(name: str, out: Path | None = None) -> Path:
    """Write the file of an exercise; an existing file is never overwritten."""
    if name not in EXERCISES:
        raise UserError(f"There is no exercise {name}. {did_you_mean(name, EXERCISES)}")
    path = out or Path(name.replace("-", "_") + ".py")
    if path.exists():
        raise UserError(f"{path} already exists. Choose another file name with --out.")
    text = (SKELETONS / f"{name}.txt").read_text(encoding="utf-8")
    path.write_text(text.replace("FILE", path.name), encoding="utf-8")
    return path


def points(reports: list[Report]) -> list[Point]:
    """Count sheet E's 14 points for code; of several versions of a part, a correct one counts."""
    best = {report.part: report for report in sorted(reports, key=lambda report: report.passed)}
    grid, whole = best.get("self-attention-2d"), best.get("vit")
    written = grid is not None and not any("fused" in note for note in grid.notes)
    return [
        Point("SelfAttention2d: all layers are present", int(_made(grid)), 1),
        Point("SelfAttention2d: correct with one head", 3 * int(written and _holds(grid, "one head")), 3),
        Point("SelfAttention2d: correct with several heads", 2 * int(written and grid is not None and grid.passed), 2),
        Point("feed-forward layer", int(_right(best.get("feed-forward"))), 1),
        Point("transformer block", 2 * int(_right(best.get("transformer-block"))), 2),
        Point("VisionTransformer: all layers are present", 2 * int(_made(whole)), 2),
        Point("VisionTransformer: patchify", 2 * int(_right(best.get("patchify"))), 2),
        Point("VisionTransformer: forward", int(_right(whole)), 1),
    ]


def _right(report: Report | None) -> bool:
    return report is not None and report.passed


def _made(report: Report | None) -> bool:
    """Whether the code ran and no layer is missing."""
    return report is not None and bool(report.table) and not any("missing-" in name for name in report.mistakes)


def _holds(report: Report | None, check: str) -> bool:
    return report is not None and any(row.check == check and row.holds is True for row in report.table)
