"""The recorded step against its twin, the plain one: the same tables, counters and undoing, without a GPU."""

import pytest
import torch

from tests.training.test_runs import session_of
from tests.training.tiny import EVERYTHING
from vitascope import UserError
from vitascope.training import loader as feeding
from vitascope.training.engines.cuda_graph import CudaGraphStep, restore_training_state_in_place
from vitascope.training.loader import EpochLoader
from vitascope.training.step import MetricSums

QUIET = {"model.proj_drop_rate": 0}  # dropout inside the step is the device's own


class ReplayedByHand(CudaGraphStep):
    """Instead of a graph, the same Python step again."""

    def _capture_cuda_graph(self) -> None:
        before = self.session.copy_state()
        self._run_warm_up_steps()
        restore_training_state_in_place(self.session, before)
        self.cuda_graph = self

    def replay(self) -> None:
        self._run_step()


def losses_of(session, loader: EpochLoader, tally: MetricSums, epochs: int) -> list[float]:
    """Train so many epochs and close the loader."""
    losses = []
    for epoch in range(epochs):
        step_on = loader.start_epoch(epoch, tally)
        for step in range(session.steps_per_epoch):
            step_on(step)
            session.step += 1
        losses.append(tally.loss.item())
    loader.close()
    return losses


def weights_after(folder, captured: bool, epochs: int = 2, **settings) -> tuple[dict, list[float]]:
    """What all that learns has become."""
    session, _ = session_of(folder, **settings)
    loader, tally = EpochLoader(session), MetricSums.empty(session)
    session.model.train()
    object.__setattr__(session.hardware, "captured", captured)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(feeding, "CudaGraphStep", ReplayedByHand)
        losses = losses_of(session, loader, tally, epochs)
    averaged = {f"average.{name}": weight for name, weight in session.eval_model.state_dict().items()}
    return averaged | session.model.state_dict() | session.objective.extra_module.state_dict(prefix="extra."), losses


def check_recorded_as_plain(folder, epochs: int = 2, **settings) -> None:
    plain, recorded = (weights_after(folder, captured, epochs, **settings) for captured in (False, True))
    assert recorded[1] == pytest.approx(plain[1], rel=1e-5)
    for name, tensor in plain[0].items():
        torch.testing.assert_close(recorded[0][name], tensor, atol=1e-5, rtol=1e-4)


def test_the_recorded_step_learns_what_the_plain_one_learns(tmp_path) -> None:
    check_recorded_as_plain(tmp_path, **(EVERYTHING | QUIET))


def test_warming_up_leaves_no_trace_in_weights_averages_or_momenta(tmp_path) -> None:
    session, _ = session_of(tmp_path, **(EVERYTHING | QUIET))
    before = session.copy_state()
    loader, tally = EpochLoader(session), MetricSums.empty(session)
    step = ReplayedByHand(session, loader.images, loader.labels, tally)
    step.load_epoch(*loader.fetch_epoch_plan(0))
    loader.close()
    after = session.copy_state()
    for part in ("model", "average"):
        assert all(torch.equal(before[part][name], after[part][name]) for name in before[part])
    states = [state for saved in after["optimizers"] for state in saved["state"].values()]
    assert states and all((tensor == 0).all() for state in states for tensor in state.values())
    assert tally.loss == 0 and tally.first_nonfinite_step == -1 and step.step_in_run == 0


def test_recording_without_a_gpu_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"train\.cuda_graph=always needs a CUDA device"):
        session_of(tmp_path, **{"train.cuda_graph": "always"})


def test_every_stage_has_its_recorded_step(tmp_path) -> None:
    """Two epochs on some patches, two on all."""
    settings = EVERYTHING | QUIET | {"train.epochs": 4, "train.patch_share": 0.5}
    check_recorded_as_plain(tmp_path, epochs=4, **settings)
