"""Runs that several studies and sheets ask for: each is made once, and a note beside the sheets says where it lies."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from vitascope.run.directory import Run
from vitascope.run.files import make_folder, read_json, write_json
from vitascope.study.design import Design, named
from vitascope.study.queue import Queue, Trial
from vitascope.study.running import result


@dataclass(frozen=True)
class Made:
    """The notes in `folder`/made, each named by its run's settings."""

    folder: Path
    console: Console

    def take_over(self, queue: Queue, *, alone: bool) -> None:
        """What another study has made already is judged as this one is, not learnt again; `alone`: only what learnt
        without company."""
        unusable: set[str] = set()

        def there(cell: dict[str, str], seed: int) -> bool:
            key = key_of(queue.design, cell, seed)
            return key not in unusable and self._run(key, alone) is not None

        while taken := queue.take_more(1, there):
            trial, key = taken[0], key_of(queue.design, taken[0].cell, taken[0].seeds[0])
            unusable.add(key)  # at least not a second time
            run = self._run(key, alone)
            if run is None or not self._judged(queue, trial, run):
                queue.back(trial)
            else:
                told = named(trial.cell, f"seed {trial.seeds[0]}")
                self.console.print(f"{told}: made already, in {run.path.relative_to(self.folder)}", soft_wrap=True)

    def _judged(self, queue: Queue, trial: Trial, run: Run) -> bool:
        try:
            with queue.at_it(trial):
                found = result(run, queue.design)
        except KeyboardInterrupt:
            queue.back(trial)
            raise
        except Exception:  # a run that somebody has changed or half deleted is made again
            return False
        trial.note("results", {str(trial.seeds[0]): found | {"run": ""}})  # another study's
        queue.finish(trial, found["accuracy"])
        return True

    def note(self, queue: Queue, folder: Path) -> None:
        """What the study in this folder has finished itself."""
        make_folder(self.folder / "made")
        for trial in queue.trials:
            for seed, found in trial.user_attrs.get("results", {}).items():
                if found.get("run"):
                    key = key_of(queue.design, trial.user_attrs["cell"], int(seed))
                    place = (folder / "runs" / found["run"]).relative_to(self.folder)
                    write_json(self._file(key), {"run": place.as_posix()})

    def _run(self, key: str, alone: bool) -> Run | None:
        place = read_json(self._file(key)).get("run")
        if not place or not (self.folder / str(place) / "model.safetensors").is_file():
            return None
        run = Run(self.folder / str(place))
        return None if alone and any(row.get("together", 1) > 1 for row in run.metrics[-1:]) else run

    def _file(self, key: str) -> Path:
        return self.folder / "made" / f"{key}.json"


def key_of(design: Design, cell: dict[str, str], seed: int) -> str:
    """A short name for exactly this run, whoever asks for it."""
    recipe = replace(design.recipe_for(cell, seed), name="any")
    return hashlib.blake2b(repr(recipe).encode(), digest_size=8).hexdigest()
