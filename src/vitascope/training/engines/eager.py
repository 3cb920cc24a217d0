"""Run training steps one operation after the other; choose between this and a CUDA graph."""

from vitascope.data.sampling import select_step_draws
from vitascope.training.engines import Engine
from vitascope.training.engines.cuda_graph import CudaGraphEngine
from vitascope.training.loader import EpochPlan, Loader
from vitascope.training.optim.build import set_learning_rates
from vitascope.training.optim.schedule import ScheduleValues, compute_schedule_values
from vitascope.training.state import TrainState
from vitascope.training.step import MetricSums, train_step


class EagerEngine:
    """Runs a step's operations one by one."""

    def __init__(self, state: TrainState, metric_sums: MetricSums) -> None:
        self.state, self.metric_sums, self.loader = state, metric_sums, Loader(state)
        self.plan: EpochPlan | None = None
        self.phase = self.step_in_epoch = 0

    def start_epoch(self, epoch: int) -> None:
        plan = self.loader.get_plan_and_start_next(epoch)
        self.loader.start_prefetching(plan.image_order)
        self.plan, self.phase = plan.to(self.state.hardware.device), self.state.objective.get_phase(epoch)
        self.step_in_epoch = 0
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
