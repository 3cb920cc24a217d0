"""The recorded step against its twin, the plain one: the same tables, counters and undoing, without a GPU."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch

from tests.training.test_runs import build_state_and_run
from tests.training.tiny import EVERYTHING
from vitascope import UserError
from vitascope.training.engines import Engine
from vitascope.training.engines.batched import BatchedTraining
from vitascope.training.engines.single_run import WARM_UP_STEPS, CudaGraphEngine, EagerEngine
from vitascope.training.step import MetricSums

QUIET = {"model.proj_drop_rate": 0}  # dropout inside the step is the device's own


class GraphReplayedByHand(CudaGraphEngine):
    """Instead of recording a graph, runs the same Python step again."""

    def _warm_up_and_capture_step(self):
        for _ in range(WARM_UP_STEPS):
            self._run_warm_up_step()
        return SimpleNamespace(replay=self._run_step)


def train_epochs(state, engine, num_epochs: int) -> list[float]:
    """Train so many epochs, close the engine and return the summed loss of each epoch."""
    losses = []
    for epoch in range(num_epochs):
        engine.start_epoch(epoch)
        for _ in range(state.steps_per_epoch):
            engine.run_next_step()
            state.step += 1
        losses.append(engine.metric_sums.loss.item())
    engine.close()
    return losses


def train_and_collect_weights(folder, engine_type, epochs: int = 2, **settings) -> tuple[dict, list[float]]:
    """Return everything that is trained, and the losses."""
    state, _ = build_state_and_run(folder, **settings)
    state.model.train()
    losses = train_epochs(state, engine_type(state, MetricSums.empty(state)), epochs)
    averaged = {f"average.{name}": weight for name, weight in state.eval_model.state_dict().items()}
    return averaged | state.model.state_dict() | state.objective.extra_module.state_dict(prefix="extra."), losses


def check_recorded_as_plain(folder, epochs: int = 2, **settings) -> None:
    plain, recorded = (
        train_and_collect_weights(folder, engine, epochs, **settings) for engine in (EagerEngine, GraphReplayedByHand)
    )
    assert recorded[1] == pytest.approx(plain[1], rel=1e-5)
    for name, tensor in plain[0].items():
        torch.testing.assert_close(recorded[0][name], tensor, atol=1e-5, rtol=1e-4)


def test_the_recorded_step_learns_what_the_plain_one_learns(tmp_path) -> None:
    check_recorded_as_plain(tmp_path, **(EVERYTHING | QUIET))


def test_warming_up_leaves_no_trace_in_weights_averages_or_momenta(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path, **(EVERYTHING | QUIET))
    before = state.copy_state()
    sums = MetricSums.empty(state)
    engine = GraphReplayedByHand(state, sums)
    engine.start_epoch(0)
    engine.close()
    after = state.copy_state()
    for part in ("model", "average"):
        assert all(torch.equal(before[part][name], after[part][name]) for name in before[part])
    states = [state for saved in after["optimizers"] for state in saved["state"].values()]
    assert states and all((tensor == 0).all() for state in states for tensor in state.values())
    assert sums.loss == 0 and sums.first_nonfinite_step == -1 and engine.step_in_run == 0


def test_recording_without_a_gpu_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"train\.cuda_graph=always needs a CUDA device"):
        build_state_and_run(tmp_path, **{"train.cuda_graph": "always"})


def test_every_stage_has_its_recorded_step(tmp_path) -> None:
    """Two epochs on some patches, two on all."""
    settings = EVERYTHING | QUIET | {"train.epochs": 4, "train.patch_share": 0.5}
    check_recorded_as_plain(tmp_path, epochs=4, **settings)


def test_all_engines_have_the_same_interface() -> None:
    """The training loop, benchmarks and batched runs call nothing else."""
    names = {name for name in vars(Engine) if not name.startswith("_")}
    assert names == {"start_epoch", "run_next_step", "reset_step_counters", "close"}
    for engine_type in (EagerEngine, CudaGraphEngine, BatchedTraining):
        for name in names:
            expected, parameters = (list(signature(getattr(owner, name)).parameters) for owner in (Engine, engine_type))
            assert parameters == expected, (engine_type, name)
