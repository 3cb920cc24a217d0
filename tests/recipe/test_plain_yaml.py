"""A recipe is only data: nothing in it is resolved, executed or expanded."""

import pytest

from vitascope.errors import UserError
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("weights: hf:x/${oc.env:HOME}\n", "line 1, refers to another value"),
        ("train:\n  lr: &a 1\n", "line 2, has an anchor"),
        ("train: {<<: {lr: 1}}\n", "has the name '<<'"),
        ("train: {lr: 1}\ntrain: {lr: 2}\n", "line 2, has train a second time"),
        ("1: 2\n", "has the name '1'"),
        ("null: 2\n", "has the name 'null'"),
        ("? [a]\n: 1\n", "has a list or a section as a setting's name"),
        (f"model: {'[' * 10_000}\n", "is nested too deeply"),
        (f"train: {{lr: {'9' * 5000}}}\n", "more than 300 digits"),
        (f"train: {{seed: 0x{'f' * 5000}}}\n", "more than 300 digits"),
        ("name: !!python/object/apply:os.system [ls]\n", "has the tag"),
        ('name: "a\\x07b"\n', "has a control character"),
        (f"# {'x' * 1_000_001}\n", "is too large"),
    ],
)
def test_markup_in_a_recipe_file_is_refused_with_its_line(tmp_path, text, problem) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=problem):
        read_recipe(str(path))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("weights=hf:x/${oc.env:HOME}", "refers to another value"),
        ("name=a\x1b[31m", "has a control character"),
        ("name=\udcff", "has a control character, or one that is not UTF-8"),
        (f"train.lr={'9' * 5000}", "more than 300 digits"),
    ],
)
def test_an_override_is_only_data(override, problem) -> None:
    with pytest.raises(UserError, match=problem):
        read_recipe("digits", [override])


def test_a_file_name_is_not_resolved(tmp_path) -> None:
    path = tmp_path / "${oc.env:HOME}.yaml"
    path.write_text("model: {depth: 2}\n")
    with pytest.raises(UserError, match="refers to another value"):
        read_recipe(str(path))


@pytest.mark.parametrize("name", ["a\nb", "a\x07", "x" * 300])
def test_a_name_without_control_characters_is_required(name) -> None:
    with pytest.raises(UserError, match=r"is not valid|control character or is too long"):
        Recipe(name=name)
