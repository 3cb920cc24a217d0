"""Damaged files of a run: a changed bit is found before it is used, and the checkpoint before takes over."""

import io
import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save_file

import vitascope as library
from tests.training.test_runs import build_state_and_run, same_weights
from tests.training.tiny import shared_run, tiny_run, untimed
from vitascope import UserError
from vitascope.draw.style import save_figure
from vitascope.run.checkpoint import load_checkpoint, save_weights
from vitascope.run.directory import Run
from vitascope.training.loop import train_and_checkpoint_remaining_epochs
from vitascope.training.train import resume_run_if_unfinished
from vitascope.weights.files import (
    read_float32_weights_and_extra_names,
    read_safetensors,
    serialize_to_safetensors,
)

NEWEST, PREVIOUS = "resume.pt", "resume.previous.pt"


def interrupt_after(num_epochs: int, folder: Path) -> Run:
    """A run with a checkpoint of this epoch and of the one before."""
    state, run = build_state_and_run(folder)
    records = train_and_checkpoint_remaining_epochs(state, run)
    while state.epoch < num_epochs:
        next(records)
    records.close()
    return run


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)


def resume_and_get_output(run: Run) -> str:
    output = io.StringIO()
    resume_run_if_unfinished(run, Console(file=output, width=1000))
    return output.getvalue()


def test_no_flipped_bit_of_a_checkpoint_is_resumed(tmp_path) -> None:
    run = interrupt_after(2, tmp_path)
    path = run.get_path(NEWEST)
    run.get_path(PREVIOUS).unlink()
    content, draw = path.read_bytes(), random.Random(0)
    last = range(8 * len(content) - 8 * 50, 8 * len(content))  # the checksum itself
    for position in [*(draw.randrange(8 * len(content)) for _ in range(200)), *last[::8]]:
        flip_bit(path, position)
        with pytest.raises(UserError, match=r"resume\.pt is damaged .* Nothing was changed\. To restart"):
            load_checkpoint(run)
        path.write_bytes(content)
    assert load_checkpoint(run).state is not None


def test_equal_weights_give_equal_files() -> None:
    weights = {'é"b': torch.randn(2, 3), "a": torch.ones(1)}
    contents = {serialize_to_safetensors(weights) for _ in range(20)}
    assert len(contents) == 1, "safetensors alone orders the metadata at random"
    content = contents.pop()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load(content).items())
    length = int.from_bytes(content[:8], "little")
    assert list(json.loads(content[8 : 8 + length])["__metadata__"]) == ["format", "vitascope_crc32"]


def test_a_cut_or_lengthened_checkpoint_is_not_resumed(tmp_path) -> None:
    run = interrupt_after(2, tmp_path)
    run.get_path(PREVIOUS).unlink()
    content = run.get_path(NEWEST).read_bytes()
    for wrong in (content[:-1], content[:-50], content[: len(content) // 2], content + b"\0", b"\0" * len(content)):
        run.get_path(NEWEST).write_bytes(wrong)
        with pytest.raises(UserError, match="is damaged"):
            load_checkpoint(run)


def test_a_damaged_checkpoint_is_named_and_the_one_before_gives_the_same_result(tmp_path) -> None:
    run, whole = interrupt_after(2, tmp_path / "cut"), shared_run(tmp_path / "whole")
    assert [load_epoch(run, name) for name in (NEWEST, PREVIOUS)] == [2, 1] and len(run.metrics) == 2
    flip_bit(run.get_path(NEWEST), 8 * 5000)
    text = resume_and_get_output(run)
    assert f"{run.get_path(NEWEST)} is damaged, so the run is resumed from the checkpoint before it" in text
    assert "resuming after epoch 1" in text
    assert untimed(run) == untimed(whole) and same_weights(run, whole)


def load_epoch(run: Run, name: str) -> int:
    return torch.load(run.get_path(name), weights_only=True)["epoch"]


def test_after_a_damaged_checkpoint_the_intact_one_is_not_the_next_to_be_replaced(tmp_path, monkeypatch) -> None:
    from vitascope.training import train

    run = interrupt_after(2, tmp_path)
    flip_bit(run.get_path(NEWEST), 8 * 5000)
    partial_file = run.get_path(".resume.pt.1.part")
    partial_file.write_bytes(b"of a killed process")
    monkeypatch.setattr(train, "_train_and_write_run_files", lambda *args: None)  # stopped before the first step
    resume_run_if_unfinished(run, Console(file=io.StringIO()))
    assert load_epoch(run, NEWEST) == 1 and not run.get_path(PREVIOUS).exists() and not partial_file.exists()


def test_two_damaged_checkpoints_are_refused_with_what_to_do(tmp_path, vitascope) -> None:
    run = interrupt_after(2, tmp_path)
    for name in (NEWEST, PREVIOUS):
        flip_bit(run.get_path(name), 8 * 5000)
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    answer = vitascope("resume", str(run.path))
    assert answer.code == 2 and "resume.pt and resume.previous.pt are damaged. Nothing was changed." in answer.err
    assert "move both files away" in answer.err
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


@pytest.mark.parametrize("renames_before_the_crash", [0, 1, 2])
def test_a_crash_at_any_rename_leaves_a_checkpoint_with_the_same_result(
    tmp_path, monkeypatch, renames_before_the_crash
) -> None:
    """The second save is cut off: before the first rename, between both, or after both."""
    state, run = build_state_and_run(tmp_path / "cut")
    renames, real = [], Path.replace

    def crash_or_rename(path, target):
        if path.parent == run.path and Path(target).name in (NEWEST, PREVIOUS):
            if len(renames) == 1 + renames_before_the_crash:  # the first save has one rename
                raise SystemExit
            renames.append(target)
        return real(path, target)

    monkeypatch.setattr(Path, "replace", crash_or_rename)
    with pytest.raises(SystemExit):
        for _ in train_and_checkpoint_remaining_epochs(state, run):
            pass
    monkeypatch.undo()
    epochs = {name: load_epoch(run, name) for name in (NEWEST, PREVIOUS) if run.get_path(name).is_file()}
    assert epochs == [{NEWEST: 1}, {PREVIOUS: 1}, {NEWEST: 2, PREVIOUS: 1}][renames_before_the_crash]
    whole = shared_run(tmp_path / "whole")
    resume_run_if_unfinished(run, Console(file=io.StringIO()))
    assert untimed(run) == untimed(whole) and same_weights(run, whole)


def test_a_checkpoint_of_an_older_version_without_checksum_is_resumed(tmp_path) -> None:
    run, whole = interrupt_after(2, tmp_path / "cut"), shared_run(tmp_path / "whole")
    state = torch.load(run.get_path(NEWEST), weights_only=True)
    torch.save(state | {"mark": "vitascope-resume-2"}, run.get_path(NEWEST))
    resume_run_if_unfinished(run, Console(file=io.StringIO()))
    assert untimed(run) == untimed(whole) and same_weights(run, whole)


def test_no_flipped_bit_changes_the_weights_that_are_read(tmp_path) -> None:
    """It is refused, or was in the metadata, which do not matter."""
    weights = {"b": torch.randn(3, 5), "a": torch.randn(4).bfloat16(), "empty": torch.zeros(0), "n": torch.tensor(7)}
    path, refused = tmp_path / "w.safetensors", 0
    save_weights(path, weights)
    size = path.stat().st_size
    positions = random.Random(0).sample(range(8 * size), 400)
    for position in positions:
        flip_bit(path, position)
        try:
            read = read_safetensors(path)
        except (UserError, SafetensorError):
            refused += 1
        else:
            assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)
        flip_bit(path, position)
    assert refused > 0.8 * len(positions)


@pytest.mark.parametrize("name", ["model.safetensors", "best.safetensors"])
def test_damaged_weights_of_a_run_are_named(tmp_path, name) -> None:
    run = shared_run(tmp_path)
    path = run.get_path(name)
    flip_bit(path, 8 * path.stat().st_size - 3)
    with pytest.raises(UserError, match=f"{name} is damaged: its tensors do not match its checksum"):
        library.load(run, best=name.startswith("best"))


def test_every_weights_file_of_a_run_and_of_an_export_has_a_checksum_and_loads_in_timm(tmp_path) -> None:
    import timm

    run = tiny_run(tmp_path, **{"train.weight_snapshots": 2, "train.epochs": 2, "model.positions": "learned"})
    model = library.load(run)
    for target in ("vitascope", "timm"):
        model.save_pretrained(tmp_path / target, library=target)
    paths = sorted(tmp_path.rglob("*.safetensors"))
    assert len(paths) == 6
    for path in paths:
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt" and len(file.metadata()["vitascope_crc32"]) == 8
    assert timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True) is not None
    flip_bit(
        tmp_path / "vitascope/model.safetensors", 8 * (tmp_path / "vitascope/model.safetensors").stat().st_size - 1
    )
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        library.open_model(tmp_path / "vitascope")


def test_weights_without_checksum_are_read(tmp_path) -> None:
    run = shared_run(tmp_path)
    weights = load_file(run.get_path("model.safetensors"))
    save_file(weights, run.get_path("model.safetensors"))
    assert library.load(run) is not None
    assert read_float32_weights_and_extra_names(run.get_path("model.safetensors")).tensors.keys() == weights.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors have names in /proc")
def test_folders_are_synchronised_after_a_rename_and_metrics_before_a_checkpoint(tmp_path, monkeypatch) -> None:
    events, fsync = [], os.fsync

    def note_and_fsync(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_and_fsync)
    run = interrupt_after(1, tmp_path)
    part = next(index for index, name in enumerate(events) if name.startswith(".resume.pt"))
    assert events[part - 1 : part + 2 : 2] == ["metrics.jsonl", run.path.name]


def test_the_same_weights_give_the_same_bytes(tmp_path) -> None:
    """The library writes metadata in random order."""
    weights = {"ü": torch.ones(3, dtype=torch.bfloat16), "a": torch.arange(6).view(2, 3), "scalar": torch.tensor(1.5)}
    path, contents = tmp_path / "model.safetensors", set()
    for _ in range(20):
        save_weights(path, weights)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    stored = read_safetensors(path)
    assert set(stored) == set(weights) and all(torch.equal(stored[name], weights[name]) for name in weights)


def test_a_figure_is_complete_or_absent(tmp_path, monkeypatch) -> None:
    figure, path = Figure(), tmp_path / "curves.png"

    def write_a_part_and_stop(target) -> None:
        Path(target).write_bytes(b"a part")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(figure, "savefig", write_a_part_and_stop)
        with pytest.raises(KeyboardInterrupt):
            save_figure(figure, path)
    assert not path.exists()
    assert save_figure(figure, path).read_bytes().startswith(b"\x89PNG")


def test_resume_draws_the_curves_that_a_killed_process_did_not_draw(tmp_path) -> None:
    run = shared_run(tmp_path)
    curves = run.get_path("curves.png").read_bytes()
    run.get_path("curves.png").unlink()
    assert library.resume(run.path).path == run.path
    assert run.get_path("curves.png").read_bytes() == curves
