"""The whole step as one CUDA graph: the host starts it with a single call and decides nothing while an epoch runs.

Each step would start hundreds of small kernels, and starting them takes longer than running them. So a step is recorded
once (batch, variation, forward, backward, update, averaging) and replayed. What changes from step to step lies on the
device: the epoch's order and draws, the rates of all steps, and two counters that the recorded step itself moves on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitascope.data.sampling import RandomDraws
from vitascope.training.optim.build import set_learning_rates
from vitascope.training.optim.schedule import ScheduleValues, compute_schedule_values
from vitascope.training.session import Session
from vitascope.training.step import MetricSums, train_step

WARM_UP_STEPS = 3  # steps before recording, in which kernels are chosen and memory is set up; then undone


class CudaGraphStep:
    """`load` an epoch, then call once per step."""

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
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)  # else another stage's step uses it
        self.image_order: Tensor | None = None
        self.draws: RandomDraws = {}
        self.cuda_graph: torch.cuda.CUDAGraph | None = None

    def load_epoch(self, image_order: Tensor, draws: RandomDraws) -> None:
        """An epoch's order and draws, into the places the recorded step reads."""
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
        """Back to the first step of the epoch and of the run."""
        self.step_in_epoch.zero_()
        self.step_in_run.zero_()

    def __call__(self) -> None:
        if self.cuda_graph is not None:
            self.cuda_graph.replay()

    def _run_step(self) -> None:
        if self.image_order is None:
            return
        at = self.step_in_epoch.view(1)
        index = self.image_order.index_select(0, at)[0]
        draws = {name: draw.index_select(0, at)[0] for name, draw in self.draws.items()}
        now = self.step_in_run.view(1)
        values: ScheduleValues = {name: table.index_select(0, now)[0] for name, table in self.schedule_tables.items()}
        set_learning_rates(self.session.optimizers, values["rate"])
        batch = self.images[index], self.labels[index]
        train_step(self.session, *batch, draws, self.metric_sums, self.step_in_run, values)
        self.step_in_epoch.add_(1)
        self.step_in_run.add_(1)

    def _capture_cuda_graph(self) -> None:
        """Warm up beside the main stream, record, and put everything back as it was."""
        before = self.session.copy_state()
        self.cuda_graph = capture_cuda_graph(self._run_warm_up_steps, self._run_step)
        restore_in_place(self.session, before)

    def _run_warm_up_steps(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self.step_in_epoch.zero_()
            self._run_step()


def capture_cuda_graph(run_warm_up: Callable[[], None], run_step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as one graph, after warming up beside the main stream."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run_warm_up()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_step()
    return graph


def restore_in_place(session: Session, snapshot: dict[str, Any]) -> None:
    """Undo steps in place: the recorded graph knows the tensors by their addresses."""
    session.model.load_state_dict(snapshot["model"])
    session.objective.extra_module.load_state_dict(snapshot["extra"])
    if session.ema:
        session.ema.model.load_state_dict(snapshot["average"])
    for optimizer, saved in zip(session.optimizers, snapshot["optimizers"], strict=True):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for number, weight in enumerate(weights):
            for name, tensor in optimizer.state[weight].items():
                old = saved["state"].get(number, {}).get(name)
                tensor.zero_() if old is None else tensor.copy_(old)
    torch.set_rng_state(snapshot["rng"])
    if snapshot["cuda_rng"] is not None:
        torch.cuda.set_rng_state(snapshot["cuda_rng"])
