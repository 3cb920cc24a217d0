"""Run a training step as one CUDA graph, which the host launches with a single call.

A step launches hundreds of small kernels, and launching them takes longer than running them. So a step is captured once
(batch, augmentation, forward, backward, update, averaging) and replayed. All values that change from step to step are
on the device: the epoch's image order and draws, the schedule values of all steps, and two step counters.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitascope.data.sampling import RandomDraws
from vitascope.run.checkpoint import Checkpoint
from vitascope.training.optim.build import set_learning_rates
from vitascope.training.optim.schedule import ScheduleValues, compute_schedule_values
from vitascope.training.session import Session
from vitascope.training.step import MetricSums, train_step

WARM_UP_STEPS = 3  # steps before the capture, in which kernels are chosen and memory is allocated; then undone


class CudaGraphStep:
    """A captured training step. Call `load_epoch` once per epoch, then the object once per step."""

    def __init__(self, session: Session, images: Tensor, labels: Tensor, metric_sums: MetricSums) -> None:
        self.session, self.images, self.labels, self.metric_sums = session, images, labels, metric_sums
        device = session.hardware.device
        self.step_in_epoch = torch.zeros((), dtype=torch.long, device=device)  # step within the epoch
        self.step_in_run = torch.zeros((), dtype=torch.long, device=device)  # step within the run
        rows = [
            compute_schedule_values(step, session.total_steps, session.recipe)
            for step in range(session.total_steps + WARM_UP_STEPS)
        ]
        self.schedule_tables = {name: torch.tensor([row[name] for row in rows], device=device) for name in rows[0]}
        for optimizer in session.optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor) or group["lr"].device.type != device:
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)  # shared by the steps of all phases
        self.image_order: Tensor | None = None
        self.draws: RandomDraws = {}
        self.cuda_graph: torch.cuda.CUDAGraph | None = None

    def load_epoch(self, image_order: Tensor, draws: RandomDraws) -> None:
        """Copy an epoch's image order and draws into the tensors that the graph reads."""
        if self.image_order is None:
            self.image_order, self.draws = image_order.clone(), {name: draw.clone() for name, draw in draws.items()}
        self.image_order.copy_(image_order)
        for name, draw in draws.items():
            self.draws[name].copy_(draw)
        if self.cuda_graph is None:
            self._capture_cuda_graph()
        self.step_in_epoch.zero_()
        self.step_in_run.fill_(self.session.step)
        self.metric_sums.reset()

    def reset_step_counters(self) -> None:
        """Set both counters to the first step."""
        self.step_in_epoch.zero_()
        self.step_in_run.zero_()

    def __call__(self) -> None:
        if self.cuda_graph is not None:
            self.cuda_graph.replay()

    def _run_step(self) -> None:
        if self.image_order is None:
            return
        step_in_epoch, step_in_run = self.step_in_epoch.view(1), self.step_in_run.view(1)
        indices = self.image_order.index_select(0, step_in_epoch)[0]
        draws = {name: draw.index_select(0, step_in_epoch)[0] for name, draw in self.draws.items()}
        schedule: ScheduleValues = {
            name: table.index_select(0, step_in_run)[0] for name, table in self.schedule_tables.items()
        }
        set_learning_rates(self.session.optimizers, schedule["lr_factor"])
        batch = self.images[indices], self.labels[indices]
        train_step(self.session, *batch, draws, self.metric_sums, self.step_in_run, schedule)
        self.step_in_epoch.add_(1)
        self.step_in_run.add_(1)

    def _capture_cuda_graph(self) -> None:
        """Warm up on another stream, capture the step, and restore the state."""
        state = self.session.copy_state()
        self.cuda_graph = capture_cuda_graph(self._run_warm_up_steps, self._run_step)
        restore_training_state_in_place(self.session, state)

    def _run_warm_up_steps(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self.step_in_epoch.zero_()
            self._run_step()


def capture_cuda_graph(run_warm_up: Callable[[], None], run_step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return the step as one CUDA graph, after warm-up steps on another stream."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        run_warm_up()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_step()
    return graph


def restore_training_state_in_place(session: Session, state: Checkpoint) -> None:
    """Restore the state in place, because the captured graph uses the tensors' addresses."""
    session.model.load_state_dict(state["model"])
    session.objective.extra_module.load_state_dict(state["extra"])
    if session.ema:
        session.ema.model.load_state_dict(state["average"])
    for optimizer, saved in zip(session.optimizers, state["optimizers"], strict=True):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for index, weight in enumerate(weights):
            for name, tensor in optimizer.state[weight].items():
                old = saved["state"].get(index, {}).get(name)
                tensor.zero_() if old is None else tensor.copy_(old)
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"])
