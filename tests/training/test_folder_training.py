"""Training from a folder: in memory, decoded on demand, and resumed with the other; the result is the same."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope
from tests.training.killing import interrupt_after_one_epoch
from tests.training.test_captured import GraphReplayedByHand, train_epochs
from tests.training.test_mid_epoch import interrupt_within_epoch, resume_within_epoch
from tests.training.test_runs import same_weights
from tests.training.tiny import EVERYTHING, TINY, untimed
from vitascope.recipe.reading import read_recipe
from vitascope.run.directory import Run, open_run_or_newest
from vitascope.training import loop
from vitascope.training.engines.single_run import EagerEngine
from vitascope.training.loader import Loader
from vitascope.training.prepare import (
    complete_recipe_and_load_data_and_weights,
    make_console,
    seed_and_build_train_state,
)
from vitascope.training.state import World
from vitascope.training.step import MetricSums

SETTINGS = EVERYTHING | {"train.batch_size": 16, "data.validation": 0.2, "data.augment.flip": 0.5}
MAX_MEMORY = 1.5 * 2**30


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """120 small color images of three classes."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for index in range(120):
        path = folder / "abc"[index % 3] / f"{index:03d}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 128, (8, 8, 3), dtype=np.uint8)
        pixels[..., index % 3] += 100
        Image.fromarray(pixels).save(path)
    return folder


def train_photos(photos: Path, runs: Path, memory: float | None, **settings) -> Run:
    settings = SETTINGS | {"data.name": str(photos), "model.in_chans": 3, "data.memory": memory} | settings
    return vitascope.train("digits", runs=runs, quiet=True, **settings)


def build_state(photos: Path, memory: float | None, **settings):
    overrides = TINY | SETTINGS | {"data.name": photos, "model.in_chans": 3, "data.memory": memory} | settings
    words = [f"{key}={'null' if value is None else value}" for key, value in overrides.items()]
    recipe, data, _ = complete_recipe_and_load_data_and_weights(read_recipe("digits", words), make_console(quiet=True))
    return seed_and_build_train_state(recipe, data)


@pytest.mark.parametrize(
    "settings",
    [{}, {"data.balance": "sampling"}, {"data.passes_per_epoch": 3}, {"train.whiten": "true"}],
    ids=["plain", "sampled", "three passes", "whitened"],
)
def test_a_run_does_not_depend_on_where_the_images_are(photos, tmp_path, settings) -> None:
    stored, fetched = (train_photos(photos, tmp_path, memory, **settings) for memory in (None, 0))
    assert untimed(stored) == untimed(fetched) and same_weights(stored, fetched)


@pytest.mark.parametrize(("first", "second"), [(None, 0), (0, None)])
def test_an_interrupted_run_is_resumed_with_the_other_kind_of_memory(
    photos, tmp_path, monkeypatch, first, second
) -> None:
    whole = train_photos(photos, tmp_path / "whole", None)
    interrupt_after_one_epoch(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_photos(photos, tmp_path / "cut", first)
    monkeypatch.undo()
    [path] = (tmp_path / "cut" / "digits").iterdir()
    text = (path / "recipe.yaml").read_text()
    values = ["null" if memory is None else f"{float(memory)}" for memory in (first, second)]
    assert f"memory: {values[0]}" in text
    (path / "recipe.yaml").write_text(text.replace(f"memory: {values[0]}", f"memory: {values[1]}"))
    resumed = vitascope.resume(path, quiet=True)
    assert untimed(resumed) == untimed(whole) and same_weights(resumed, whole)


@pytest.mark.parametrize("engine_type", [EagerEngine, pytest.param(GraphReplayedByHand, marks=pytest.mark.slow)])
def test_decoding_on_demand_is_resumed_exactly_from_the_middle_of_an_epoch(
    photos, tmp_path, monkeypatch, engine_type
) -> None:
    """Also with flips that alternate between epochs."""
    settings = {"data.augment.flip_mode": "alternating", "data.passes_per_epoch": 2, "model.proj_drop_rate": 0}
    monkeypatch.setattr(loop, "make_engine", engine_type)
    whole = train_photos(photos, tmp_path / "whole", 0, **settings)
    interrupt_within_epoch(monkeypatch, lambda: train_photos(photos, tmp_path / "cut", 0, **settings))
    run = open_run_or_newest(tmp_path / "cut" / "digits")
    resume_within_epoch(run)
    assert untimed(run) == untimed(whole) and same_weights(run, whole)


def test_the_captured_step_reads_prefetched_batches(photos) -> None:
    """The twin of the CUDA graph, replayed by hand, with images that are not on the device."""
    quiet = {"model.proj_drop_rate": 0}  # chance inside the step is the device's own
    losses = {}
    for engine_type in (EagerEngine, GraphReplayedByHand):
        for memory in (None, 0):
            state = build_state(photos, memory, **quiet)
            engine = engine_type(state, MetricSums.empty(state))
            assert (engine.loader.prefetcher is None) == (memory is None)
            losses[engine_type, memory] = train_epochs(state, engine, 3)
    assert losses[EagerEngine, None] == losses[EagerEngine, 0]
    assert losses[GraphReplayedByHand, None] == losses[GraphReplayedByHand, 0]
    assert losses[GraphReplayedByHand, 0] == pytest.approx(losses[EagerEngine, 0], rel=1e-5)


def test_an_epoch_may_end_early_and_the_next_one_starts_with_its_own_images(photos) -> None:
    state = build_state(photos, 0)
    loader = Loader(state)
    for epoch in (0, 1):
        order = loader.get_plan_and_start_next(epoch).image_order
        loader.start_prefetching(order)
        for step in range(2):  # of more
            batch = loader.load_next_batch(order[step])
            assert torch.equal(batch.images, state.data.train.fetch(order[step]))
            assert torch.equal(batch.labels, state.data.train.labels[order[step]])
    loader.close()


def test_evaluating_and_predicting_work_for_a_run_decoded_on_demand(photos, tmp_path) -> None:
    run = train_photos(photos, tmp_path, 0)
    model = vitascope.load(run)
    assert model.evaluate("val").accuracy == pytest.approx(run.metrics[-1]["val_accuracy"])
    assert model.predict(str(photos / "a" / "000.png"))[0].label in "abc"
    assert run.machine["data_hash"].startswith("files-")


def test_a_state_knows_its_place_among_the_processes_and_loads_what_it_saved(photos) -> None:
    state, other = build_state(photos, None), build_state(photos, 0, **{"train.seed": 0})
    assert state.world == World(rank=0, size=1)
    state.step, state.epoch = 12, 2
    with torch.no_grad():
        next(state.model.parameters()).add_(1.0)
    saved = state.copy_state()
    other.check_resumable_from(saved)
    other.load_state_dict(saved)
    assert (other.step, other.epoch) == (12, 2)
    for name, weight in state.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name])


def measure_peak_memory(command: list[str]) -> int:
    """Run a command; return the largest sum of its and its children's proportional memory (PSS), in bytes."""
    process, peak = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            pids = [process.pid, *map(int, children.read_text().split())]
            peak = max(peak, sum(_read_pss(pid) for pid in pids))
            process.wait(timeout=0.2)
        except (OSError, subprocess.TimeoutExpired):
            continue
    assert process.returncode == 0
    return peak


def _read_pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of memory")
def test_sixty_thousand_small_images_train_within_one_and_a_half_gibibytes(tmp_path) -> None:
    generator = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
    for index in range(60_000):
        pixels = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / "ab"[index % 2] / f"{index}.bmp")
    settings = {"data.name": tmp_path / "photos", "data.memory": 0, "model.img_size": 32, "model.in_chans": 3}
    settings |= {"model.patch_size": 8, "train.epochs": 1, "train.batch_size": 512}
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "vitascope", "train", "digits", *words, "--runs", str(tmp_path / "runs")]
    assert measure_peak_memory(command) < MAX_MEMORY
    assert any((tmp_path / "runs" / "digits").iterdir())
