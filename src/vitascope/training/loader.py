"""Epochs -> batches for the steps: images on the device where they fit, each epoch's draws made while another runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.sampling import RandomDraws, draw_alternating_flips, draw_epoch_order, select_step_draws
from vitascope.data.splits import compute_class_weights
from vitascope.training.engines.cuda_graph import CudaGraphStep
from vitascope.training.optim.build import set_learning_rates
from vitascope.training.optim.schedule import ScheduleValues, compute_schedule_values
from vitascope.training.session import Session
from vitascope.training.step import MetricSums, train_step


class EpochLoader:
    """The training images, on the device where they fit, and each epoch's draws, made while the one before runs."""

    def __init__(self, session: Session) -> None:
        self.session, self.device = session, session.hardware.device
        train, config = session.data.train, session.recipe.data
        self.storage_device = self.device if self._can_store_on_device(train.images) else "cpu"
        self.images, self.labels = train.images.to(self.storage_device), train.labels.to(self.storage_device)
        self.sampling_probabilities = None
        if config.balance == "sampling":
            weights = compute_class_weights(train.labels, len(session.data.classes))[train.labels].double()
            self.sampling_probabilities = (weights / weights.sum()).numpy()
        self.cuda_graph_steps: dict[int, CudaGraphStep] = {}  # by stage
        self.thread_pool = ThreadPoolExecutor(1)
        self.prefetched_plans: dict[int, Future[tuple[Tensor, RandomDraws]]] = {}

    def fetch_epoch_plan(self, epoch: int) -> tuple[Tensor, RandomDraws]:
        order, draws = (
            self.prefetched_plans.pop(epoch, None) or self.thread_pool.submit(self._make_epoch_plan, epoch)
        ).result()
        if epoch + 1 < self.session.recipe.train.epochs:
            self.prefetched_plans[epoch + 1] = self.thread_pool.submit(self._make_epoch_plan, epoch + 1)
        draws = {name: draw.to(self.device, non_blocking=True) for name, draw in draws.items()}
        return order.to(self.storage_device, non_blocking=True), draws

    def start_epoch(self, epoch: int, metric_sums: MetricSums) -> Callable[[int], None]:
        """An epoch's draws in place; what comes back runs its steps, recorded or one by one."""
        order, draws = self.fetch_epoch_plan(epoch)
        self.session.objective.phase = self.session.objective.get_phase(epoch)
        if not self.session.hardware.captured or self.storage_device != self.device:
            metric_sums.reset()
            return lambda step: self._run_eager_step(order[step], select_step_draws(draws, step), metric_sums)
        if not self.cuda_graph_steps:
            self._capture_cuda_graphs(epoch, order, draws, metric_sums)
        captured = self.cuda_graph_steps[self.session.objective.phase]
        captured.load_epoch(order, draws)
        return lambda step: captured()

    def _capture_cuda_graphs(
        self, epoch: int, image_order: Tensor, draws: RandomDraws, metric_sums: MetricSums
    ) -> None:
        """The steps of all stages to come, this one's last, so that later epochs only run."""
        objective = self.session.objective
        coming = range(epoch, self.session.recipe.train.epochs)
        for stage in sorted({objective.get_phase(later) for later in coming}, reverse=True):
            objective.phase = stage
            self.cuda_graph_steps[stage] = CudaGraphStep(self.session, self.images, self.labels, metric_sums)
            self.cuda_graph_steps[stage].load_epoch(image_order, draws)

    def _run_eager_step(self, image_indices: Tensor, draws: RandomDraws, metric_sums: MetricSums) -> None:
        session = self.session
        values: ScheduleValues = {**compute_schedule_values(session.step, session.total_steps, session.recipe)}
        set_learning_rates(session.optimizers, values["rate"])
        train_step(session, *self.load_batch(image_indices), draws, metric_sums, session.step, values)

    def load_batch(self, image_indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.images[image_indices], self.labels[image_indices]
        return images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def reset_step_counters(self) -> None:
        """Recorded steps back to the first of the epoch and of the run: for measuring the same steps again."""
        for captured in self.cuda_graph_steps.values():
            captured.reset_step_counters()

    def close(self) -> None:
        self.thread_pool.shutdown(wait=True, cancel_futures=True)

    def _make_epoch_plan(self, epoch: int) -> tuple[Tensor, RandomDraws]:
        return make_epoch_plan(self.session, epoch, self.sampling_probabilities)

    def _can_store_on_device(self, images: Tensor) -> bool:
        if self.device != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info()
        return images.numel() < free // 2


def make_epoch_plan(
    session: Session, epoch: int, sampling_probabilities: NDArray[Any] | None = None
) -> tuple[Tensor, RandomDraws]:
    """Which images each step sees, by chance where `chances` are given, and every other draw of the epoch."""
    steps, batch = session.steps_per_epoch, session.batch_size
    seed = session.recipe.train.seed
    order = draw_epoch_order(len(session.data.train), steps, batch, seed, epoch, sampling_probabilities)
    draws, policy = session.objective.make_random_draws(steps, batch, epoch), session.recipe.data.augment
    if "flip" in draws and policy.flip_mode == "alternating":
        turn = epoch * session.recipe.data.passes_per_epoch
        draws["flip"] = draw_alternating_flips(order, len(session.data.train), policy.flip or 0.0, seed, turn)
    return order, draws
