"""docs/sheets/runs.jsonl: every recorded run is still found by the settings that the sheets ask for."""

import json
from pathlib import Path

import pytest

from vitascope.coursework.sheets import a, d
from vitascope.coursework.sheets.experiments import hash_run_settings
from vitascope.study.design import parse_and_check_design

LINES = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "docs/sheets/runs.jsonl").read_text(encoding="utf-8").splitlines()
]


def get_overrides(line: dict) -> list[str]:
    """The settings of the sheet's study that made this line."""
    if line["recipe"] == "sheet-a":
        words = [*(a.FULL_OVERRIDES if line["cell"] else a.SINGLE_RUN_OVERRIDES), *a.NO_AUGMENTATION]
    else:
        words = d.SMALL_DATA_OVERRIDES if "/few-" in line["run"] else []
    fixed = [word for word in words if word.partition("=")[0] not in line["cell"]]
    return [*fixed, *(f"{name}={value}" for name, value in line["cell"].items())]


@pytest.mark.parametrize("recipe", ["sheet-a", "sheet-d"])
def test_every_recorded_run_is_found(recipe) -> None:
    lines = [line for line in LINES if line["recipe"] == recipe]
    assert len(lines) > 20
    for line in lines:
        made = parse_and_check_design(
            recipe, [*get_overrides(line), "train.device=auto"], 5, eval_split=line["judge"], allow_no_variation=True
        )
        assert hash_run_settings(made, {}, line["seed"]) == line["key"], line["run"]
