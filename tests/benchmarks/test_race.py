"""The benchmark's own machinery: contenders are alike, races are fair, a dead contender is told."""

import json

import pytest
import torch

from benchmarks import guard
from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.contenders import MODEL_BUILDERS, SHAPES
from benchmarks.growth import BASE_SIZES, fit_exponent, make_model_config
from benchmarks.guard import get_record_device, select_guarded_rows
from benchmarks.race import Implementation, ImplementationTimes, compute_speedup, percentile, time_implementations


@pytest.mark.parametrize("library", MODEL_BUILDERS)
def test_every_library_builds_the_same_network(library) -> None:
    """The same number of parameters, up to the query, key and value biases that vit-pytorch leaves out."""
    shape = SHAPES["16×2"]
    if library == "vit-pytorch":
        pytest.importorskip("vit_pytorch")
    ours, theirs = (sum(p.numel() for p in MODEL_BUILDERS[name](shape).parameters()) for name in ("ours", library))
    model = MODEL_BUILDERS[library](shape).eval()
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)
    assert theirs == pytest.approx(ours, rel=0.03)


@pytest.mark.slow
def test_every_implementation_is_timed_in_every_round() -> None:
    arms = [Implementation("ours"), Implementation("timm"), Implementation("ours", task="step")]
    timings = time_implementations("16×2", "train", arms, batch_size=4, num_rounds=3, num_threads=1)
    for times in timings.values():
        assert times.failure_reason is None and len(times.seconds_per_round) == 3 and min(times.seconds_per_round) > 0
        assert times.peak_bytes > 2**20 and times.setup_seconds > 0
    assert compute_speedup(timings["timm"], timings["ours"]) > 0


@pytest.mark.slow
def test_a_worker_that_ends_says_why_is_left_out_and_the_others_continue() -> None:
    timings = time_implementations(
        "16×2",
        "infer",
        [Implementation("ours"), Implementation("timm", precision="no_such_type")],
        batch_size=2,
        num_rounds=2,
        num_threads=1,
    )
    reason = timings["timm, no_such_type"].failure_reason
    assert reason and reason.startswith("ended with code 1: AttributeError") and "no_such_type" in reason
    assert len(timings["ours"].seconds_per_round) == 2
    assert compute_speedup(timings["timm, no_such_type"], timings["ours"]) is None


def test_ratios_are_taken_round_by_round() -> None:
    """Both were slow in the second round: that is the machine, not a contender."""
    assert compute_speedup(ImplementationTimes([2.0, 20.0, 2.0]), ImplementationTimes([1.0, 10.0, 1.0])) == 2.0
    assert percentile([float(n) for n in range(100)], 0.99) == 99.0


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    assert fit_exponent([2, 4, 8], [3.0, 12.0, 48.0]) == pytest.approx(2)
    assert fit_exponent([1, 10], [5.0, 5.0]) == pytest.approx(0)


def test_one_measurement_of_growth_changes_one_size() -> None:
    base = BASE_SIZES["cpu"]
    wide, deep = make_model_config(base | {"width": 256}), make_model_config(base | {"depth": 2})
    assert (wide.embed_dim, wide.depth, wide.num_tokens) == (256, base["depth"], 64)
    assert (deep.embed_dim, deep.depth) == (base["width"], 2) and make_model_config(
        base | {"tokens": 256}
    ).num_tokens == 256


@pytest.mark.parametrize("name", ["bench-cpu", "bench-cuda", "bench-cuda-more"])
def test_the_guard_selects_rows_of_every_record(name) -> None:
    record = json.loads((RESULTS_FOLDER / f"{name}.json").read_text())
    guarded = select_guarded_rows(record)
    assert {item.row["task"] for item in guarded} == {"train", "infer"}
    assert all(item.row["times_timm"] > 0 for item in guarded)
    assert all((item.vitascope.library, item.timm.library) == ("ours", "timm") for item in guarded)
    assert get_record_device(record) == ("cpu" if name == "bench-cpu" else "cuda")


def test_the_guard_does_not_compare_machines(monkeypatch) -> None:
    monkeypatch.setattr(
        guard, "get_device_names_by_type", lambda: {"cpu": "Abacus, 2 cores, 2 threads", "system": "Linux x86_64"}
    )
    monkeypatch.setattr("sys.argv", ["guard"])
    with pytest.raises(
        SystemExit, match=r"this machine is Abacus, 2 cores, and ratios differ between machines.*--against COMMIT"
    ):
        guard.main()
