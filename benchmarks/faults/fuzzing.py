"""Wrong inputs: arguments, recipes, images, weights files, config.json, checkpoints and files of a run."""

import io
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.counts import Attack, FaultCounts
from benchmarks.faults.inputs import (
    IMAGE_FORMATS,
    ODD_NUMBERS,
    ODD_OPTIONS,
    ODD_TEXTS,
    make_image,
    mutate_bytes,
    mutate_json,
    mutate_json_text,
    mutate_yaml,
    write_digit_image,
)
from benchmarks.faults.processes import run_forked_command, start_new_command
from benchmarks.faults.runs import TINY, check_success, copy_run, make_interrupted_run, train_reference
from vitascope.recipe.schema import format_recipe_yaml
from vitascope.run.checkpoint import CHECKPOINT, save_checkpoint
from vitascope.run.directory import Run

REFUSED_OR_COMPLETED = "Refused in a sentence with exit code 2, or completed where the input is valid."
CANARY = "canary"  # a file that only executed code writes
COMMANDS: tuple[tuple[str, ...], ...] = (  # {} is an odd value; {run} and {image} are valid
    *(("{}",), ("{}", "{}"), ("anatomy", "{}"), ("anatomy", "digits", "{}"), ("anatomy", "digits", "{}", "{}")),
    *(("train", "{}"), ("train", "digits", "train.epochs=0", "{}"), ("resume", "{}"), ("resume", "{run}", "{}")),
    *(("evaluate", "{}"), ("evaluate", "{run}", "--quick", "--split", "{}"), ("evaluate", "{run}", "--views", "{}")),
    *(("predict", "{run}", "{}"), ("predict", "{}", "{image}"), ("predict", "{run}", "{image}", "--threshold", "{}")),
    *(("predict", "{run}", "{image}", "--top-k", "{}"), ("predict", "{run}", "{image}", "--temperature", "{}")),
    *(("explain", "{run}", "{image}", "--methods", "{}"), ("explain", "{run}", "{image}", "--blocks", "{}")),
    *(("explain", "{run}", "{image}", "--query", "{}"), ("explain", "{run}", "{image}", "--target", "{}")),
    *(("embed", "{run}", "{}"), ("similar", "{run}", "{image}", "--among", "{}"), ("report", "{run}", "--split", "{}")),
    *(("record", "{}"), ("record", "{run}", "--name", "{}"), ("results", "{}"), ("adapt", "{}"), ("adapt", "{}", "{}")),
    *(("data", "{}"), ("data", "describe", "{}"), ("data", "preview", "{}"), ("draw", "{}"), ("draw", "mask", "{}")),
    *(("export", "{}", "{run}"), ("export", "folder", "{run}", "--out", "x", "--for", "{}")),
    *(("export", "onnx", "{run}", "--opset", "{}"), ("study", "digits", "{}"), ("study", "digits", "model.depth={}")),
    *(("study", "digits", "--seeds", "{}", "{}"), ("study", "digits", "model.depth=1,2", "--budget", "{}")),
    *(("runs", "list", "{}"), ("runs", "compare", "{}", "{run}"), ("runs", "delete", "--yes", "{}"), ("runs", "{}")),
    *(("sheet", "{}"), ("check", "{}"), ("lr-find", "{}"), ("demo", "{}", "train.epochs=0"), ("exercise", "{}")),
)


def fuzz_arguments(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts("wrong command-line arguments", REFUSED_OR_COMPLETED)
    for folder, arguments in _list_argument_tries(attack):
        counts.count_outcome(run_forked_command(arguments, folder), _quote(arguments))
        shutil.rmtree(folder)
    return [counts]


def fuzz_arguments_of_new_processes(attack: Attack) -> list[FaultCounts]:
    """The same as a user starts them, also with bytes that are not UTF-8."""
    counts = FaultCounts("wrong arguments, `python -m vitascope`", REFUSED_OR_COMPLETED)
    for folder, arguments in _list_argument_tries(attack):
        data = [os.fsencode(argument.replace("\ud800", "?")) for argument in arguments]
        if attack.rng.random() < 0.3:
            data[attack.rng.randrange(len(data))] = b"\xff\xfe\x80"
        counts.count_outcome(start_new_command(data, folder).wait(), _quote(arguments))
    return [counts]


def _list_argument_tries(attack: Attack) -> Iterator[tuple[Path, list[str]]]:
    run, image = train_reference(attack.folder / "reference").path, write_digit_image(attack.folder / "image.png")
    settings = _list_settings(run)
    for folder in attack.list_tries():
        command = attack.rng.choice(COMMANDS)
        arguments = [
            part.format(_choose_argument(attack.rng, settings), run=run, image=image)
            if part != "{}"
            else _choose_argument(attack.rng, settings)
            for part in command
        ]
        if attack.rng.random() < 0.1:
            arguments.insert(attack.rng.randrange(len(arguments) + 1), attack.rng.choice(ODD_OPTIONS))
        if command[0] == "study":  # a valid study would train for minutes
            arguments += ["train.epochs=0"]
        yield folder, arguments


def _list_settings(run: Path) -> list[str]:
    """Return the names of all settings."""
    names, group = [], ""
    for line in (run / "recipe.yaml").read_text(encoding="utf-8").splitlines():
        key = line.strip().partition(":")[0]
        group = key if not line.startswith(" ") else group
        names.append(f"{group}.{key}" if line.startswith(" ") else key)
    return names


def _choose_argument(rng: random.Random, settings: Sequence[str]) -> str:
    odd = rng.choice((*ODD_NUMBERS, *ODD_TEXTS))
    return f"{rng.choice(settings)}={odd}" if rng.random() < 0.4 else odd


def _quote(arguments: Sequence[str]) -> str:
    return " ".join(ascii(argument)[:80] for argument in arguments)


def fuzz_recipes(attack: Attack) -> list[FaultCounts]:
    from vitascope.recipe.reading import read_recipe

    counts = FaultCounts("wrong recipes (YAML)", REFUSED_OR_COMPLETED)
    text = format_recipe_yaml(read_recipe("digits", list(TINY)))
    for folder in attack.list_tries():
        (folder / "recipe.yaml").write_bytes(mutate_yaml(attack.rng, text))
        command = (
            ("train", "recipe.yaml", "train.epochs=0") if attack.rng.random() < 0.2 else ("anatomy", "recipe.yaml")
        )
        _run_and_count(counts, command, folder)
    return [counts]


def fuzz_images(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts("damaged images", REFUSED_OR_COMPLETED)
    run = train_reference(attack.folder / "reference").path
    for folder in attack.list_tries():
        image_format, suffix = attack.rng.choice(IMAGE_FORMATS), attack.rng.choice(IMAGE_FORMATS)
        suffix = suffix if attack.rng.random() < 0.1 else image_format
        (folder / f"image.{suffix}").write_bytes(mutate_bytes(attack.rng, make_image(attack.rng, image_format)))
        images = "." if attack.rng.random() < 0.2 else f"image.{suffix}"
        _run_and_count(counts, ("predict", str(run), images), folder)
    return [counts]


def fuzz_weights(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts("damaged safetensors files", REFUSED_OR_COMPLETED)
    run, image = train_reference(attack.folder / "reference").path, write_digit_image(attack.folder / "image.png")
    content = (run / "model.safetensors").read_bytes()
    for folder in attack.list_tries():
        run_path = folder / "run"
        shutil.copytree(run, run_path)
        (run_path / "model.safetensors").write_bytes(_mutate_safetensors(attack.rng, content))
        model = "run" if attack.rng.random() < 0.7 else "run/model.safetensors"
        _run_and_count(counts, ("predict", model, str(image)), folder)
    return [counts]


def _mutate_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Change the header's length, an entry of the header, or any bytes."""
    length = int.from_bytes(content[:8], "little")
    header, tensors = content[8 : 8 + length], content[8 + length :]
    choice = rng.random()
    if choice < 0.15:
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 10**8, 2**63))) + header + tensors
    if choice < 0.6:
        header = mutate_json_text(rng, json.loads(header))
        return struct.pack("<Q", len(header)) + header + tensors
    return mutate_bytes(rng, content)


def fuzz_model_config(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts("wrong config.json", REFUSED_OR_COMPLETED)
    run, image = train_reference(attack.folder / "reference").path, write_digit_image(attack.folder / "image.png")
    check_success(run_forked_command(("export", "folder", str(run), "--out", "model"), attack.folder))
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    for folder in attack.list_tries():
        model = shutil.copytree(run if attack.rng.random() < 0.5 else attack.folder / "model", folder / "model")
        (model / "config.json").write_bytes(mutate_json_text(attack.rng, config))
        _run_and_count(counts, ("predict", "model", str(image)), folder)
    return [counts]


class _Payload:
    """An object whose unpickling writes the canary."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def fuzz_checkpoints(attack: Attack) -> list[FaultCounts]:
    """Damaged and foreign checkpoints. Half have a valid checksum and wrong contents; some hold code."""
    counts = FaultCounts("damaged and foreign checkpoints", REFUSED_OR_COMPLETED + " No code in them is executed.")
    interrupted = make_interrupted_run(attack.folder)
    checkpoint = torch.load(interrupted / CHECKPOINT, weights_only=True)
    content = (interrupted / CHECKPOINT).read_bytes()
    for folder in attack.list_tries():
        run_path, choice = copy_run(interrupted, folder), attack.rng.random()
        (run_path / "resume.previous.pt").unlink()
        if choice < 0.5:
            save_checkpoint(Run(run_path), mutate_json(attack.rng, checkpoint))
            (run_path / "resume.previous.pt").unlink(missing_ok=True)
        else:
            data = _pickle_payload(attack.rng) if choice < 0.65 else mutate_bytes(attack.rng, content)
            (run_path / CHECKPOINT).write_bytes(data)
        _run_and_count(counts, ("resume", str(run_path)), folder)
    return [counts]


def _pickle_payload(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    if rng.random() < 0.5:
        torch.save({"mark": "vitascope-resume-3", "model": _Payload()}, buffer)
        return buffer.getvalue()
    return pickle.dumps(_Payload())


RUN_FILES = ("machine.json", "metrics.jsonl", "recipe.yaml", "temperature.json", "lock.json", "test-openings.jsonl")


def fuzz_run_files(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts("damaged files of a run", REFUSED_OR_COMPLETED + " One damaged run hides no other.")
    run = train_reference(attack.folder / "reference").path
    temperature = {"temperature": 1.5, "images": 90}
    for folder in attack.list_tries():
        run_path, name = copy_run(run, folder), attack.rng.choice(RUN_FILES)
        path = run_path / name
        if name == "recipe.yaml":
            path.write_bytes(mutate_yaml(attack.rng, path.read_text(encoding="utf-8")))
        elif name == "machine.json":
            path.write_bytes(mutate_json_text(attack.rng, json.loads(path.read_text(encoding="utf-8"))))
        elif name == "metrics.jsonl":
            lines = path.read_bytes().splitlines()
            lines[attack.rng.randrange(len(lines))] = mutate_json_text(attack.rng, json.loads(lines[0]))
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            path.write_bytes(mutate_json_text(attack.rng, temperature))
        image = write_digit_image(folder / "image.png")
        commands = (("runs", "list", "runs"), ("predict", str(run_path), str(image)), ("resume", str(run_path)))
        _run_and_count(counts, attack.rng.choice((*commands, ("runs", "compare", str(run), str(run_path)))), folder)
    return [counts]


def _run_and_count(counts: FaultCounts, command: Sequence[str], folder: Path) -> None:
    """Run the command, count how it ends, and keep the folder if it ended badly."""
    failures = counts.num_failures
    counts.count_outcome(run_forked_command(command, folder), f"{folder.name}: {_quote(command)}")
    if list(folder.rglob(CANARY)):
        counts.lost += 1
        counts.add_example(f"lost: {folder.name}: code was executed")
    if counts.num_failures == failures:
        shutil.rmtree(folder)
