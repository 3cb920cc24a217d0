"""Train each run once for all studies and sheets; runs.jsonl beside the sheets lists the results."""

import hashlib
import json
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from vitascope.recipe.writing import chosen_settings, short_name
from vitascope.run.directory import Run
from vitascope.run.files import append_line, make_folder
from vitascope.study.design import Design, named
from vitascope.study.queue import Queue
from vitascope.study.running import result

FILE = "runs.jsonl"


@dataclass(frozen=True)
class Made:
    """`folder`/runs.jsonl: one line per finished run and split, enough to write the reports again without the runs, for
    example on another machine."""

    folder: Path
    console: Console

    def take_over(self, queue: Queue, *, alone: bool, weights: bool) -> None:
        """Reuse the results of other studies. `alone`: only runs that were trained alone; `weights`: only runs whose
        weights still exist."""
        lines, found = self._lines(), {}

        def there(cell: dict[str, str], seed: int) -> bool:
            key = key_of(queue.design, cell, seed)
            mine = [line for line in lines if line["key"] == key and not (alone and line["together"] > 1)]
            way = self._way(mine, queue.design, weights)
            if way is not None:
                found[named(cell, f"seed {seed}")] = way
            return way is not None

        taken = queue.take_more(queue.waiting, there)
        with ExitStack() as stack:
            for trial in taken:
                stack.enter_context(queue.at_it(trial))
            for place, trial in enumerate(taken):
                which = named(trial.cell, f"seed {trial.seeds[0]}")
                try:
                    came = found[which]()
                except KeyboardInterrupt:
                    for rest in taken[place:]:
                        queue.back(rest)
                    raise
                except Exception:  # a changed or incomplete run is trained again
                    queue.back(trial)
                    continue
                trial.note("results", {str(trial.seeds[0]): came | {"run": ""}})  # it belongs to another study
                queue.finish(trial, came["accuracy"])
                self.console.print(f"{which}: already trained, reused", highlight=False, soft_wrap=True)

    def note(self, queue: Queue, folder: Path) -> None:
        """Append the runs that this study has finished, without reused ones."""
        make_folder(self.folder)
        known = {(line["judge"], line["run"]) for line in self._lines()}
        design = queue.design
        for told in (trial.user_attrs for trial in queue.trials if trial.state.name == "COMPLETE"):
            for seed, found in told["results"].items():
                place = (folder / "runs" / found["run"]).relative_to(self.folder).as_posix()
                if found["run"] and (design.judge, place) not in known:
                    head = {"key": key_of(design, told["cell"], int(seed)), "recipe": design.recipe}
                    head |= {"cell": told["cell"], "seed": int(seed), "judge": design.judge}
                    append_line(self.folder / FILE, head | found | {"run": place})

    def _way(self, lines: list[dict[str, Any]], design: Design, weights: bool) -> Any:
        """How to get a run's result: from its line, or by evaluating the run; else None."""
        runs = [self.folder / line["run"] for line in lines]
        there = [run for run in runs if (run / "model.safetensors").is_file()]
        same = [line for line in lines if line["judge"] == design.judge]
        if same and (there or not weights):
            return lambda: {name: value for name, value in same[-1].items() if name not in HEAD}
        return partial(result, Run(there[-1]), design) if there else None

    def _lines(self) -> list[dict[str, Any]]:
        """All complete lines; an interruption may have cut one off."""
        lines = []
        if (self.folder / FILE).is_file():
            for line in (self.folder / FILE).read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    lines.append(json.loads(line))
        return lines


HEAD = ("key", "recipe", "cell", "seed", "judge")  # identify the run; the rest of a line is its result


def key_of(design: Design, cell: dict[str, str], seed: int) -> str:
    """A hash of this run's settings, independent of the study and of the path of its initial weights."""
    recipe = replace(design.recipe_for(cell, seed), name="any")
    if recipe.weights and Path(recipe.weights).is_file():
        recipe = replace(recipe, weights=hashlib.blake2b(Path(recipe.weights).read_bytes()).hexdigest())
    return short_name(chosen_settings(recipe))
