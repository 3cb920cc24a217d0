"""Run one worker process per tree: side by side on a CPU, one after the other on a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.same_numbers import worker
from benchmarks.same_numbers.settings import NUM_IMAGES, RENAMES, SETTINGS, write_random_images
from benchmarks.same_numbers.worker import Job, Result, Setting, write_job


@dataclass(frozen=True)
class Workspace:
    """The folder that holds the runs, the images and the kernel cache, and the device."""

    folder: Path
    device: str

    def write_data(self) -> None:
        write_random_images(self.folder / "data", NUM_IMAGES[self.device])

    def make_environment(self, tree: Path) -> dict[str, str]:
        """The tree's code, and the same data, threads and caches for both trees."""
        paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages may lie elsewhere
        chosen = {"PYTHONPATH": os.pathsep.join(paths), "VITASCOPE_DATA": str(self.folder / "data"), "COLUMNS": "500"}
        if self.device == "cpu":
            return os.environ | chosen | {"OMP_NUM_THREADS": "1"}
        caches = {"XDG_CACHE_HOME": "user", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        return os.environ | chosen | {key: str(self.folder / "cache" / name) for key, name in caches.items()}


class TreeProcess:
    """A process that trains the settings with one tree's code."""

    def __init__(self, tree: Path, settings: Sequence[Setting], workspace: Workspace, name: str) -> None:
        self.settings, self.tree = settings, tree
        folder = workspace.folder / name
        folder.mkdir()
        self.log_path = folder / "worker.log"
        first = {setting.starts_from for setting in settings}
        needed = [setting for setting in SETTINGS[workspace.device] if setting.name in first]
        package = tree / "src" / "vitascope"
        write_job(Job(str(package), str(folder), list(settings), needed, RENAMES), folder / "job.json")
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", worker.__file__, str(folder / "job.json")],
                cwd=folder,
                env=workspace.make_environment(tree),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def read_results(self) -> Iterator[Result]:
        """Yield one result per setting. A process that ended early gives an error for each setting that is left."""
        for setting in self.settings:
            line = self.process.stdout.readline() if self.process.stdout else ""
            yield Result(**json.loads(line)) if line else Result(setting.name, [], self._describe_end())
        self.close()

    def _describe_end(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        return f"The process ended with code {self.process.wait()}: {last.strip()}"

    def close(self) -> None:
        if self.process.stdout:
            self.process.stdout.close()
        self.process.terminate()
        self.process.wait()


def train_with_both_trees(
    base_tree: Path, new_tree: Path, settings: Sequence[Setting], workspace: Workspace
) -> Iterator[tuple[Result, Result]]:
    """Yield the results of each setting as soon as both trees have trained it."""
    processes = [TreeProcess(base_tree, settings, workspace, "base")]
    try:
        base_results = processes[0].read_results()
        if workspace.device != "cpu":  # kernels are measured once: the second process reads the first one's choice
            base_results = iter(list(base_results))
        processes.append(TreeProcess(new_tree, settings, workspace, "working-tree"))
        yield from zip(base_results, processes[1].read_results(), strict=True)
    finally:
        for process in processes:
            process.close()


def train_base_again(base_tree: Path, settings: Sequence[Setting], workspace: Workspace) -> list[Result]:
    """Train settings with the base a second time."""
    process = TreeProcess(base_tree, settings, workspace, "base-again")
    try:
        return list(process.read_results())
    finally:
        process.close()
