"""Exercises: skeletons to fill in, and sheet E's points for what was found right."""

from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from vitascope.checking.result import Report
from vitascope.errors import UserError, did_you_mean

SKELETONS = files("vitascope.checking") / "skeletons"
EXERCISES = {
    "attention": "scaled dot-product attention with a mask (sheets A, B)",
    "multi-head-attention": "many heads in one module (sheets B, C)",
    "self-attention-2d": "attention over the cells of a grid (sheet E)",
    "causal-mask": "nobody looks at later tokens (sheet C)",
    "patchify": "an image cut into patches (sheet E)",
    "sinusoidal-positions": "sines and cosines for positions (sheet D)",
    "feed-forward": "the same small network for every token (sheet E)",
    "transformer-block": "attention and feed-forward with norms and residuals (sheet E)",
    "class-token": "one more token in front (sheets A, C)",
    "vit": "the whole vision transformer (sheet E)",
    "sheet-e": "all of sheet E in one file: 14 of its 20 points",
}
UNCHECKED = "Sheet E's other 6 points are for trained accuracy (25, 50 and 70 %), which cannot be checked here."


class Point(NamedTuple):
    """What the points are for, how many were given, and of how many."""

    what: str
    given: int
    of: int


def start(name: str, out: Path | None = None) -> Path:
    """Write an exercise's skeleton; a file that is there is never overwritten."""
    if name not in EXERCISES:
        raise UserError(f"There is no exercise {name}. {did_you_mean(name, EXERCISES)}")
    path = out or Path(name.replace("-", "_") + ".py")
    if path.exists():
        raise UserError(f"{path} is there already. Choose another name with --out.")
    text = (SKELETONS / f"{name}.txt").read_text(encoding="utf-8")
    path.write_text(text.replace("FILE", path.name), encoding="utf-8")
    return path


def points(reports: list[Report]) -> list[Point]:
    """Sheet E's 14 points that can be checked; the best attempt at a part counts."""
    best = {report.part: report for report in sorted(reports, key=lambda report: report.passed)}
    grid, whole = best.get("self-attention-2d"), best.get("vit")
    written = grid is not None and not any("fused" in note for note in grid.notes)
    return [
        Point("SelfAttention2d: the right modules", int(_made(grid)), 1),
        Point("SelfAttention2d: one head", 3 * int(written and _holds(grid, "one head")), 3),
        Point("SelfAttention2d: many heads", 2 * int(written and grid is not None and grid.passed), 2),
        Point("feed-forward block", int(_right(best.get("feed-forward"))), 1),
        Point("transformer block", 2 * int(_right(best.get("transformer-block"))), 2),
        Point("VisionTransformer: its parts", 2 * int(_made(whole)), 2),
        Point("VisionTransformer: patchify", 2 * int(_right(best.get("patchify"))), 2),
        Point("VisionTransformer: forward", int(_right(whole)), 1),
    ]


def _right(report: Report | None) -> bool:
    return report is not None and report.passed


def _made(report: Report | None) -> bool:
    """It could be made and run, and no part is missing."""
    return report is not None and bool(report.table) and not any("missing-" in name for name in report.mistakes)


def _holds(report: Report | None, check: str) -> bool:
    return report is not None and any(row.check == check and row.holds is True for row in report.table)
