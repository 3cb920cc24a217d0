"""`vitascope runs list` tells how pretrained weights were tuned."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from vitascope.cli import console, runs
from vitascope.recipe.reading import read_recipe
from vitascope.run.directory import create_run_folder

TUNED = {"weights=timm:x": "full", "train.tune=head": "head", "train.tune=lora": "lora", "train.freeze=4": "freeze=4"}


def create_runs_of_each_kind(folder: Path) -> None:
    """Runs that have not started."""
    create_run_folder(read_recipe("digits", []), folder)
    for setting in TUNED:
        create_run_folder(read_recipe("tiny10-finetune", ["weights=timm:x", setting]), folder)


def test_full_head_and_lora_runs_are_told_apart(vitascope, tmp_path) -> None:
    create_runs_of_each_kind(tmp_path)
    listed = json.loads(vitascope("runs", "list", "--runs", str(tmp_path), "--json").out)
    assert {(item["tune"], item["freeze"]) for item in listed} == {
        (None, 0),
        ("full", 0),
        ("head", 0),
        ("lora", 0),
        ("full", 4),
    }
    out = vitascope("runs", "list", "--runs", str(tmp_path)).out
    assert all(f"│ {cell}" in out for cell in [*TUNED.values(), "–"])
    assert "tuned: the part of the pretrained weights that was trained" in out


def test_the_list_has_no_column_for_it_without_pretrained_weights(vitascope, tmp_path) -> None:
    create_run_folder(read_recipe("digits", []), tmp_path)
    assert "tuned" not in vitascope("runs", "list", "--runs", str(tmp_path)).out


def test_the_list_fits_eighty_columns(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    create_runs_of_each_kind(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    output = io.StringIO()
    narrow = Console(file=output, force_terminal=True, width=80, color_system=None)
    for module in (console, runs):
        monkeypatch.setattr(module, "create_console", lambda: narrow)
    runs.print_runs(Path("runs"))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "parameters" not in output.getvalue()
    for cell in TUNED.values():
        assert any(f"│ tiny10 │ {cell} " in line for line in lines), output.getvalue()
    assert "seed0" in output.getvalue()
