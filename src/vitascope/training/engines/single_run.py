"""Run the training steps of one run: one operation after the other, or as one CUDA graph per step.

A step launches hundreds of small kernels, and launching them takes longer than running them. So a step is captured once
(batch, augmentation, forward, backward, update, averaging) and replayed with a single call. All values that change from
step to step are on the device: the epoch's image order and draws, the schedule values of all steps, and two step
counters. The step reads its images from a fixed buffer. It is filled by a gather inside the graph if all images are on
the device, else by a copy of the prefetched batch before every replay.
"""

import torch
from torch import Tensor

from vitascope.data.sampling import select_step_draws
from vitascope.kernels.launch import make_repeated_call, warm_up_and_record_cuda_graph
from vitascope.training.engines import Engine
from vitascope.training.loader import EpochPlan, Loader, StoredBatch
from vitascope.training.optim.build import set_learning_rates
from vitascope.training.optim.schedule import ScheduleValues, compute_schedule_values
from vitascope.training.state import TrainState
from vitascope.training.step import MetricSums, train_step

WARM_UP_STEPS = 3  # steps before the capture, in which kernels are chosen and memory is allocated; then undone


class CudaGraphEngine:
    """Captures the step of each phase when the first epoch starts, and replays it."""

    def __init__(self, state: TrainState, metric_sums: MetricSums) -> None:
        self.state, self.metric_sums, self.loader = state, metric_sums, Loader(state)
        device = state.hardware.device
        self.step_in_epoch = torch.zeros((), dtype=torch.long, device=device)  # step within the epoch
        self.step_in_run = torch.zeros((), dtype=torch.long, device=device)  # step within the run
        shape = (state.batch_size, *state.data.train.image_shape)
        self.image_buffer = torch.zeros(shape, dtype=torch.uint8, device=device)
        rows = [
            compute_schedule_values(step, state.total_steps, state.recipe)
            for step in range(state.total_steps + WARM_UP_STEPS)
        ]
        self.schedule_tables = {name: torch.tensor([row[name] for row in rows], device=device) for name in rows[0]}
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor) or group["lr"].device.type != device:
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)  # shared by the steps of all phases
        self.plan: EpochPlan | None = None  # on the device; each epoch is copied into the first one's tensors
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by phase
        self.phase = 0

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        plan = self.loader.get_plan_and_start_next(epoch)
        self._copy_plan_into_graph_tensors(plan)
        if not self.graphs:
            self._capture_all_phases_and_restore_state(epoch, plan)
        self.phase = self.state.objective.get_phase_of_epoch(epoch)
        # not before: allocating memory would disturb the capture
        self.loader.start_prefetching(plan.image_order[first_step:])
        self.step_in_epoch.fill_(first_step)
        self.step_in_run.fill_(self.state.step)
        if first_step == 0:
            self.metric_sums.reset()

    def run_next_step(self) -> None:
        if self.loader.prefetcher is not None:
            self.image_buffer.copy_(self.loader.prefetcher.wait_for_next_batch(), non_blocking=True)
        self.graphs[self.phase].replay()

    def reset_step_counters(self) -> None:
        """Set both counters to the first step, to measure the same steps again."""
        self.step_in_epoch.zero_()
        self.step_in_run.zero_()

    def close(self) -> None:
        self.loader.close()

    def _copy_plan_into_graph_tensors(self, plan: EpochPlan) -> None:
        """Copy an epoch's plan into the tensors that the graphs read."""
        device = self.state.hardware.device
        if self.plan is None:
            self.plan = EpochPlan(
                plan.image_order.to(device, copy=True),
                {name: draw.to(device, copy=True) for name, draw in plan.draws.items()},
            )
        self.plan.image_order.copy_(plan.image_order, non_blocking=True)
        for name, draw in plan.draws.items():
            self.plan.draws[name].copy_(draw, non_blocking=True)

    def _capture_all_phases_and_restore_state(self, epoch: int, plan: EpochPlan) -> None:
        """Capture the steps of all remaining phases, the current phase last, and undo the warm-up steps."""
        if self.loader.prefetcher is not None:
            self.image_buffer.copy_(self.loader.prefetcher.fetch(plan.image_order[0]))
        remaining_epochs = range(epoch, self.state.recipe.train.epochs)
        for phase in sorted(
            {self.state.objective.get_phase_of_epoch(later) for later in remaining_epochs}, reverse=True
        ):
            self.phase = phase
            self.step_in_epoch.zero_()
            self.step_in_run.zero_()
            before = self.state.copy_state()
            self.graphs[phase] = self._warm_up_and_capture_step()
            self.state.load_state_in_place(before)

    def _warm_up_and_capture_step(self) -> torch.cuda.CUDAGraph:
        return warm_up_and_record_cuda_graph(self._run_step, make_repeated_call(self._run_warm_up_step, WARM_UP_STEPS))[
            0
        ]

    def _run_warm_up_step(self) -> None:
        self.step_in_epoch.zero_()
        self._run_step()

    def _run_step(self) -> None:
        if self.plan is None:
            raise RuntimeError("start_epoch was not called")
        step_in_epoch, step_in_run = self.step_in_epoch.view(1), self.step_in_run.view(1)
        indices = self.plan.image_order.index_select(0, step_in_epoch)[0]
        draws = {name: draw.index_select(0, step_in_epoch)[0] for name, draw in self.plan.draws.items()}
        schedule: ScheduleValues = {
            name: table.index_select(0, step_in_run)[0] for name, table in self.schedule_tables.items()
        }
        set_learning_rates(self.state.optimizers, schedule["lr_factor"])
        if self.loader.prefetcher is None:
            torch.index_select(self.loader.images, 0, indices, out=self.image_buffer)
        batch = StoredBatch(self.image_buffer, self.loader.labels[indices])
        train_step(self.state, batch, draws, self.metric_sums, self.step_in_run, schedule, self.phase)
        self.step_in_epoch.add_(1)
        self.step_in_run.add_(1)


class EagerEngine:
    """Runs a step's operations one by one."""

    def __init__(self, state: TrainState, metric_sums: MetricSums) -> None:
        self.state, self.metric_sums, self.loader = state, metric_sums, Loader(state)
        self.plan: EpochPlan | None = None
        self.phase = self.step_in_epoch = 0

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        plan = self.loader.get_plan_and_start_next(epoch)
        self.loader.start_prefetching(plan.image_order[first_step:])
        self.plan, self.phase = plan.to(self.state.hardware.device), self.state.objective.get_phase_of_epoch(epoch)
        self.step_in_epoch = first_step
        if first_step == 0:
            self.metric_sums.reset()

    def run_next_step(self) -> None:
        if self.plan is None:
            raise RuntimeError("start_epoch was not called")
        state, indices = self.state, self.plan.image_order[self.step_in_epoch]
        schedule: ScheduleValues = {**compute_schedule_values(state.step, state.total_steps, state.recipe)}
        set_learning_rates(state.optimizers, schedule["lr_factor"])
        batch, draws = self.loader.load_next_batch(indices), select_step_draws(self.plan.draws, self.step_in_epoch)
        train_step(state, batch, draws, self.metric_sums, state.step, schedule, self.phase)
        self.step_in_epoch += 1

    def reset_step_counters(self) -> None:
        self.step_in_epoch = 0

    def close(self) -> None:
        self.loader.close()


def make_engine(state: TrainState, metric_sums: MetricSums) -> Engine:
    """Return a CUDA graph of the step where that is possible, else the plain step."""
    return (CudaGraphEngine if state.hardware.captured else EagerEngine)(state, metric_sums)
