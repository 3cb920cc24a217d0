"""The error for a path that does not exist, where a recipe or images were expected: name the most similar folder."""

from difflib import get_close_matches
from pathlib import Path

MIN_SIMILARITY = 0.6  # difflib ratio of folder names


def explain_missing_path(name: str, recipe_suffixes: tuple[str, ...]) -> str | None:
    """Return the error for a name that means a path (a recipe file, or a folder with a slash); None for other names."""
    path = Path(name)
    if path.suffix in recipe_suffixes:
        return f"There is no recipe file '{name}'."
    if "/" not in name and "\\" not in name:
        return None
    if path.is_dir():
        return f"{name} is a folder, not a recipe. A recipe is a name or a .yaml file."
    similar = _find_similar_folder(path)
    suggestion = f"Did you mean {similar}/?" if similar else "Check the path."
    return f"There is no folder '{name}'. {suggestion} To train on images, give a folder with one subfolder per class."


def _find_similar_folder(path: Path) -> Path | None:
    """Return the folder beside `path` whose name is most similar."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return None
    similar = get_close_matches(path.name, names, n=1, cutoff=MIN_SIMILARITY)
    return path.parent / similar[0] if similar else None
