"""Export another commit's files into a folder, to run that code beside the working tree."""

import io
import subprocess
import tarfile
from pathlib import Path

from benchmarks.race import REPOSITORY_FOLDER
from vitascope.errors import UserError

COMMIT_FILE = ".exported-commit"  # holds the commit's hash in an exported tree, which has no git history


def find_commit_hash(commit: str) -> str | None:
    """Return the full hash of a commit, or None if this repository has no such commit."""
    if commit.startswith("-"):  # git would read it as an option
        return None
    full_hash = _run_git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    return full_hash.decode().strip() if full_hash else None


def export_commit(commit: str, folder: Path) -> Path:
    """Write the files of a commit into an empty or new folder."""
    full_hash = find_commit_hash(commit)
    if not full_hash:
        raise UserError(f"There is no commit {commit} in this repository. `git log` lists the commits.")
    make_empty_folder(folder)
    archive = _run_git("archive", "--format=tar", full_hash)
    if not archive:
        raise UserError(f"git could not export the files of {commit}.")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / COMMIT_FILE).write_text(full_hash + "\n", encoding="utf-8")
    return folder


def make_empty_folder(folder: Path) -> None:
    """Create a folder. A folder that holds files already is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be created: {error.strerror}.") from error
    if not is_empty:
        raise UserError(f"The folder {folder} is not empty. Name a new or an empty folder.")


def has_vitascope_package(folder: Path) -> bool:
    """Return whether a folder holds a tree of this project."""
    return (folder / "src" / "vitascope" / "__init__.py").is_file()


def name_tree(folder: Path) -> str:
    """Return the short hash of an exported tree; otherwise the folder's name."""
    file = folder / COMMIT_FILE
    return file.read_text(encoding="utf-8").strip()[:7] if file.is_file() else folder.resolve().name


def _run_git(*arguments: str) -> bytes | None:
    """Return what git printed, or None if it failed or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY_FOLDER), *arguments], capture_output=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout
