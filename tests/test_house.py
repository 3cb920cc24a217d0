"""The house keeps its own rules."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.shaped import find_shaped_modules
from vitascope.number_format import format_number, format_percent

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_file_is_one_idea_told_in_its_first_line_and_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    first = text.splitlines()[0]
    assert first.startswith('"""') and first.rstrip('"').endswith(".")
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_functions_are_short_and_users_never_meet_an_assert(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}"
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 40, f"{node.name} is too long"


def test_percentages_and_signed_numbers_have_one_format() -> None:
    """98.67 % and −0.052, from number_format.py; a signed number that rounds to zero has no minus."""
    for path in (path for path in SOURCES if path.name != "number_format.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r":z?\.\d%\}", text), f"{path.name}: use format_percent"
        assert not re.search(r":\+z?\.\d[f%]", text), f"{path.name}: use format_number"
        assert not re.search(r"[\"']\+\.\d[f%]", text), f"{path.name}: write +z.3f"
        assert not re.search(r"f\"[^\"\n]*\d\}%", text), f"{path.name}: use format_percent"


@pytest.mark.parametrize(
    ("fraction", "num_decimals", "text"),
    [(0.98671, 2, "98.67 %"), (-0.0524, 1, "−5.2 %"), (-1e-9, 1, "0.0 %"), (None, 1, "–"), (0.5, 0, "50 %")],
)
def test_a_percentage_has_a_space_and_a_minus_sign(fraction: float | None, num_decimals: int, text: str) -> None:
    assert format_percent(fraction, num_decimals) == text


def test_a_signed_number_has_a_minus_sign() -> None:
    numbers = [(-0.0521, "+z.3f"), (0.5, "+z.2f"), (-0.0001, "+z.2f"), (-10_000, ">7,.0f")]
    assert [format_number(*number) for number in numbers] == ["−0.052", "+0.50", "+0.00", "−10,000"]


def test_the_tracked_tree_is_light() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert sum(path.stat().st_size for path in paths if path.is_file()) < 10 * 2**20


def test_the_lock_holds_names_and_versions_only() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert "://" not in line and not line.startswith("-")
        assert "==" in line.split(";")[0]


def test_a_module_that_annotates_shapes_is_checked() -> None:
    from jaxtyping import TypeCheckError

    from vitascope.training.objectives.feature_metrics import compute_rms_spread_of_unit_features

    assert len(find_shaped_modules()) > 40 and "vitascope.model.attention" in find_shaped_modules()
    assert compute_rms_spread_of_unit_features(torch.eye(3)) > 0
    with pytest.raises(TypeCheckError, match="features"):
        compute_rms_spread_of_unit_features(torch.zeros(2, 3, 4))


def test_every_name_of_the_library_that_the_pages_tell_is_there() -> None:
    import re

    import vitascope

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/lessons").glob("*.md"))]
    names = {
        name
        for page in pages
        for name in re.findall(r"\bvitascope\.([a-z_]+(?:\.[a-zA-Z_]+)?)\(", page.read_text("utf-8"))
    }
    assert {"open_model", "train", "export.write_onnx"} <= names
    for name in sorted(names):
        current = vitascope
        for part in name.split("."):
            current = getattr(current, part)
