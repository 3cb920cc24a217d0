"""Write exercise files with gaps to fill in, and count sheet E's points for correct parts."""

from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from vitascope.coursework.checker.report import CheckReport
from vitascope.errors import UserError, suggest_choice

SKELETONS = files("vitascope.coursework") / "skeletons"
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
UNCHECKED_POINTS_NOTE = (
    "Sheet E has 20 points. 14 points are for code and can be checked here. "
    "6 points are for reaching 25, 50 and 70 % accuracy and cannot be checked here."
)
SHEET_E_PARTS = {"self-attention-2d", "feed-forward", "transformer-block", "patchify", "vit"}


class TaskPoints(NamedTuple):
    """A task of sheet E, the points given, the points possible, and the part that it needs."""

    what: str
    given: int
    of: int
    part: str


def write_new_exercise_file(exercise_name: str, output_path: Path | None = None) -> Path:
    """Write the file of an exercise; an existing file is never overwritten."""
    if exercise_name not in EXERCISES:
        raise UserError(f"There is no exercise {exercise_name}. {suggest_choice(exercise_name, EXERCISES)}")
    path = output_path or Path(exercise_name.replace("-", "_") + ".py")
    if path.exists():
        raise UserError(f"{path} already exists. Choose another file name with --out.")
    text = (SKELETONS / f"{exercise_name}.txt").read_text(encoding="utf-8")
    path.write_text(text.replace("FILE", path.name), encoding="utf-8")
    return path


def grade_sheet_e_code(reports: list[CheckReport]) -> list[TaskPoints]:
    """Count sheet E's 14 points for code; of several versions of a part, a correct one counts."""
    best = {report.part: report for report in sorted(reports, key=lambda report: report.passed)}
    attention, vit = best.get("self-attention-2d"), best.get("vit")
    is_written_out = attention is not None and not any("fused" in note for note in attention.notes)
    return [
        TaskPoints(
            "SelfAttention2d: all layers are present",
            int(_ran_without_missing_layers(attention)),
            1,
            "self-attention-2d",
        ),
        TaskPoints(
            "SelfAttention2d: correct with one head",
            3 * int(is_written_out and _has_passed_check(attention, "one head")),
            3,
            "self-attention-2d",
        ),
        TaskPoints(
            "SelfAttention2d: correct with several heads",
            2 * int(is_written_out and _is_correct(attention)),
            2,
            "self-attention-2d",
        ),
        TaskPoints("feed-forward layer", int(_is_correct(best.get("feed-forward"))), 1, "feed-forward"),
        TaskPoints("transformer block", 2 * int(_is_correct(best.get("transformer-block"))), 2, "transformer-block"),
        TaskPoints("VisionTransformer: all layers are present", 2 * int(_ran_without_missing_layers(vit)), 2, "vit"),
        TaskPoints("VisionTransformer: patchify", 2 * int(_is_correct(best.get("patchify"))), 2, "patchify"),
        TaskPoints("VisionTransformer: forward", int(_is_correct(vit)), 1, "vit"),
    ]


def _is_correct(report: CheckReport | None) -> bool:
    return report is not None and report.passed


def _ran_without_missing_layers(report: CheckReport | None) -> bool:
    """Return whether the code ran and no layer is missing."""
    return report is not None and bool(report.table) and not any("missing-" in name for name in report.mistakes)


def _has_passed_check(report: CheckReport | None, check_name: str) -> bool:
    return report is not None and any(row.check == check_name and row.passed is True for row in report.table)
