"""Runs that several studies and sheets ask for: each is made once, and a note beside the sheets says where it lies."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from vitascope.recipe.writing import chosen_settings, short_name
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, read_json, write_json
from vitascope.study.design import Design, named
from vitascope.study.queue import Queue
from vitascope.study.running import result


@dataclass(frozen=True)
class Made:
    """The notes in `folder`/made, each named by its run's settings."""

    folder: Path
    console: Console

    def take_over(self, queue: Queue, *, alone: bool) -> None:
        """What another study has made already is judged as this one is, not learnt again; `alone`: only what learnt
        without company."""
        runs: dict[str, Run] = {}

        def there(cell: dict[str, str], seed: int) -> bool:
            run = self._run(key_of(queue.design, cell, seed), alone)
            if run is not None:
                runs[named(cell, f"seed {seed}")] = run
            return run is not None

        taken = queue.take_more(queue.waiting, there)
        with ExitStack() as stack:
            for trial in taken:
                stack.enter_context(queue.at_it(trial))
            for place, trial in enumerate(taken):
                which = named(trial.cell, f"seed {trial.seeds[0]}")
                try:
                    found = result(runs[which], queue.design)
                except KeyboardInterrupt:
                    for rest in taken[place:]:
                        queue.back(rest)
                    raise
                except Exception:  # a run that somebody has changed or half deleted is made again
                    queue.back(trial)
                    continue
                trial.note("results", {str(trial.seeds[0]): found | {"run": ""}})  # another study's
                queue.finish(trial, found["accuracy"])
                where = runs[which].path.relative_to(self.folder)
                self.console.print(f"{which}: made already, in {where}", soft_wrap=True)

    def note(self, queue: Queue, number: int, folder: Path) -> None:
        """A trial that the study in this folder has just finished."""
        make_folder(self.folder / "made")
        told = next((trial.user_attrs for trial in queue.trials if trial.number == number), {})
        for seed, found in told.get("results", {}).items():
            if not found["run"]:  # taken over, by a process that was killed before it could say so
                continue
            place = (folder / "runs" / found["run"]).relative_to(self.folder)
            write_json(self._file(key_of(queue.design, told["cell"], int(seed))), {"run": place.as_posix()})

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
    return short_name(chosen_settings(replace(design.recipe_for(cell, seed), name="any")))
