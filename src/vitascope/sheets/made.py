"""Runs that several studies and sheets ask for: each is made once; runs.jsonl beside the sheets tells of it."""

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
    """`folder`/runs.jsonl: a line per finished run and way of judging it, enough to write the reports again where the
    runs themselves are gone, such as on another machine than the one that made them."""

    folder: Path
    console: Console

    def take_over(self, queue: Queue, *, alone: bool, weights: bool) -> None:
        """What another study has made already is not learnt again. `alone`: only what learnt without company;
        `weights`: only what still has its weights."""
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
                except Exception:  # a run that somebody has changed or half deleted is made again
                    queue.back(trial)
                    continue
                trial.note("results", {str(trial.seeds[0]): came | {"run": ""}})  # another study's
                queue.finish(trial, came["accuracy"])
                self.console.print(f"{which}: made already", highlight=False, soft_wrap=True)

    def note(self, queue: Queue, folder: Path) -> None:
        """What the study in this folder has finished, each once; not what it took over."""
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
        """How to come by a run's result: it is written here, or the run lies here and can be judged; else None."""
        runs = [self.folder / line["run"] for line in lines]
        there = [run for run in runs if (run / "model.safetensors").is_file()]
        same = [line for line in lines if line["judge"] == design.judge]
        if same and (there or not weights):
            return lambda: {name: value for name, value in same[-1].items() if name not in HEAD}
        return partial(result, Run(there[-1]), design) if there else None

    def _lines(self) -> list[dict[str, Any]]:
        """Those that are whole; a kill may have torn one."""
        lines = []
        if (self.folder / FILE).is_file():
            for line in (self.folder / FILE).read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    lines.append(json.loads(line))
        return lines


HEAD = ("key", "recipe", "cell", "seed", "judge")  # which run it is; the rest of a line is what it came to


def key_of(design: Design, cell: dict[str, str], seed: int) -> str:
    """A short name for exactly this run, whoever asks for it, and wherever weights that it starts from may lie."""
    recipe = replace(design.recipe_for(cell, seed), name="any")
    if recipe.weights and Path(recipe.weights).is_file():
        recipe = replace(recipe, weights=hashlib.blake2b(Path(recipe.weights).read_bytes()).hexdigest())
    return short_name(chosen_settings(recipe))
