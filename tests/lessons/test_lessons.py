"""The lessons say what their code prints, show what it draws, and are the same as notebooks."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from docs.lessons.make import CELL, HERE, LARGEST, PAGES, agree, cells, filled, notebook, notebook_of, run

LESSONS = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
PICTURE = re.compile(r"!\[(?P<description>[^\]]*)\]\((?P<path>[^)]+)\)")
# Figures of the sheets, which no code of ours prints.
OF_THE_SHEETS = {"0.2023", "0.1994", "0.2010", "0.2470", "0.2435", "0.2616"}
SAME = 0.4  # of 255, on average: the palette makes 0.2, a frame around another patch 0.6
TRAINED = ("6-", "7-")  # other machines may learn a little differently


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("L"), dtype=float)


@LESSONS
@pytest.mark.slow
def test_a_lesson_s_code_prints_and_draws_what_its_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        text = page.read_text(encoding="utf-8")
        for number, (cell, printed) in enumerate(zip(cells(text), run(text, page.name), strict=True), start=1):
            assert agree(cell.shown, printed, cell.within), f"piece {number} prints\n{printed}the page\n{cell.shown}"
    finally:
        torch.set_num_threads(before)
    shown = {picture["path"] for picture in PICTURE.finditer(text)}
    assert shown == {f"images/{path.name}" for path in Path("images").iterdir()}
    for name in shown:
        new, old = pixels(Path(name)), pixels(HERE / name)
        assert new.shape == old.shape, name
        if not page.name.startswith(TRAINED):
            assert np.abs(new - old).mean() < SAME, f"{name} shows something else: make lessons"


def test_there_are_seven_lessons_each_pointing_to_the_next_and_the_contents_name_all() -> None:
    contents = (HERE / "README.md").read_text(encoding="utf-8")
    assert [page.name[0] for page in PAGES] == list("1234567")
    for page, following in pairwise(PAGES):
        assert f"]({following.name})" in page.read_text(encoding="utf-8")
    for page in PAGES:
        assert f"]({page.name})" in contents and f"](notebooks/{page.stem}.ipynb)" in contents


@LESSONS
def test_a_lesson_has_all_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for part in (
        "**You will understand**",
        "## The sheets ask",
        "ommon mistake",
        "## Your turn",
        "vitascope exercise start",
    ):
        assert part in text, part
    assert not any("exercise" in cell.code or "check(" in cell.code for cell in cells(text))


@LESSONS
def test_a_lesson_s_notebook_is_its_page(page: Path) -> None:
    made = notebook(page.read_text(encoding="utf-8"))
    assert notebook_of(page).read_text(encoding="utf-8") == made, "make lessons"
    code = ["".join(cell["source"]) for cell in json.loads(made)["cells"] if cell["cell_type"] == "code"]
    assert code == [cell.code.removesuffix("\n") for cell in cells(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [*PAGES, HERE / "README.md"], ids=lambda page: page.stem)
def test_pictures_are_there_light_and_told_in_words_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for picture in PICTURE.finditer(text):
        path = page.parent / picture["path"]
        assert path.stat().st_size <= LARGEST, picture["path"]
        assert len(picture["description"]) > 20, picture["path"]
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (page.parent / link).exists(), link


def test_no_picture_is_left_over() -> None:
    used = {picture["path"] for page in PAGES for picture in PICTURE.finditer(page.read_text(encoding="utf-8"))}
    assert used == {f"images/{path.name}" for path in (HERE / "images").iterdir()}


@LESSONS
def test_a_lesson_s_sentences_hold_no_decimals_that_its_code_does_not_print(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = " ".join(cell.code + cell.shown for cell in cells(text))
    sentences = re.sub(r"```.*?```", "", CELL.sub("", text), flags=re.S)
    for number in re.findall(r"\d+\.\d+", sentences):
        assert number in known or number in OF_THE_SHEETS, number


def test_numbers_agree_within_what_a_page_allows_and_words_exactly() -> None:
    assert agree("a 0.50 b\n", "a 0.50 b\n", 0)
    assert not agree("a 0.50 b\n", "a 0.51 b\n", 0)
    assert agree("a  +0.50 b 9 %\n", "a -0.10 b 10 %\n", 1)
    assert not agree("a 0.50 b\n", "a 0.75 b\n", 0.2)
    assert not agree("a 0.50 b\n", "a 0.50 c\n", 0.2)
    assert not agree("a 0.50\n", "a 0.50 0.50\n", 0.2)


def test_a_page_is_filled_with_what_its_code_prints() -> None:
    page = "```python\nprint(1)\n```\n\nwords\n\n```python\nprint(2.1)\n```\n\n```text within=0.5\n2.0\n```\n"
    done = filled(page, list(run(page)))
    assert done == page.replace("```\n\nwords", "```\n\n```text\n1\n```\n\nwords").replace("2.0", "2.1")
    assert filled(done, list(run(done))) == done


def test_a_page_that_fails_names_its_piece() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        list(run("```python\nx = 0\n```\n\n```python\n1 / x\n```\n", "page"))
    assert "page, piece 2" in str(raised.traceback[-1].path)
