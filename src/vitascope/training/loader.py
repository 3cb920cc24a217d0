"""Load batches onto the training device; draw the next epoch's augmentation while the current epoch runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.sampling import RandomDraws, draw_alternating_flips, draw_epoch_image_indices, select_step_draws
from vitascope.data.splits import compute_class_weights
from vitascope.training.engines.cuda_graph import CudaGraphStep
from vitascope.training.optim.build import set_learning_rates
from vitascope.training.optim.schedule import ScheduleValues, compute_schedule_values
from vitascope.training.session import Session
from vitascope.training.step import MetricSums, train_step

RunStep = Callable[[int], None]  # runs the step with this index within the epoch


class EpochPlan(NamedTuple):
    """The random choices of an epoch: the image indices of each step (step × image), and the augmentation's draws."""

    image_order: Tensor
    draws: RandomDraws


class StoredBatch(NamedTuple):
    """Images and labels of a batch, on the training device, before augmentation."""

    images: Tensor  # uint8
    labels: Tensor


class EpochLoader:
    """Store the training images on the device if they fit, and draw each epoch's plan in advance."""

    def __init__(self, session: Session) -> None:
        self.session, self.device = session, session.hardware.device
        train, config = session.data.train, session.recipe.data
        self.storage_device = self.device if self._can_store_on_device(train.images) else "cpu"
        self.images, self.labels = train.images.to(self.storage_device), train.labels.to(self.storage_device)
        self.sampling_probabilities = None
        if config.balance == "sampling":
            weights = compute_class_weights(train.labels, len(session.data.classes))[train.labels].double()
            self.sampling_probabilities = (weights / weights.sum()).numpy()
        self.cuda_graph_steps: dict[int, CudaGraphStep] = {}  # by phase
        self.thread_pool = ThreadPoolExecutor(1)
        self.prefetched_plans: dict[int, Future[EpochPlan]] = {}

    def fetch_epoch_plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch on the device, and start to draw the plan of the next epoch."""
        order, draws = (
            self.prefetched_plans.pop(epoch, None) or self.thread_pool.submit(self._make_epoch_plan, epoch)
        ).result()
        if epoch + 1 < self.session.recipe.train.epochs:
            self.prefetched_plans[epoch + 1] = self.thread_pool.submit(self._make_epoch_plan, epoch + 1)
        draws = {name: draw.to(self.device, non_blocking=True) for name, draw in draws.items()}
        return EpochPlan(order.to(self.storage_device, non_blocking=True), draws)

    def start_epoch(self, epoch: int, metric_sums: MetricSums) -> RunStep:
        """Load the plan of an epoch. Return a function that runs its steps, from a CUDA graph or one by one."""
        plan = self.fetch_epoch_plan(epoch)
        self.session.objective.phase = self.session.objective.get_phase(epoch)
        if not self.session.hardware.captured or self.storage_device != self.device:
            metric_sums.reset()
            return lambda step: self._run_eager_step(
                plan.image_order[step], select_step_draws(plan.draws, step), metric_sums
            )
        if not self.cuda_graph_steps:
            self._capture_cuda_graphs(epoch, plan, metric_sums)
        graph_step = self.cuda_graph_steps[self.session.objective.phase]
        graph_step.load_epoch(*plan)
        return lambda step: graph_step()

    def _capture_cuda_graphs(self, epoch: int, plan: EpochPlan, metric_sums: MetricSums) -> None:
        """Capture the steps of all remaining phases, the current phase last."""
        objective = self.session.objective
        remaining_epochs = range(epoch, self.session.recipe.train.epochs)
        for phase in sorted({objective.get_phase(later) for later in remaining_epochs}, reverse=True):
            objective.phase = phase
            self.cuda_graph_steps[phase] = CudaGraphStep(self.session, self.images, self.labels, metric_sums)
            self.cuda_graph_steps[phase].load_epoch(*plan)

    def _run_eager_step(self, image_indices: Tensor, draws: RandomDraws, metric_sums: MetricSums) -> None:
        session = self.session
        schedule: ScheduleValues = {**compute_schedule_values(session.step, session.total_steps, session.recipe)}
        set_learning_rates(session.optimizers, schedule["lr_factor"])
        train_step(session, *self.load_batch(image_indices), draws, metric_sums, session.step, schedule)

    def load_batch(self, image_indices: Tensor) -> StoredBatch:
        images, labels = self.images[image_indices], self.labels[image_indices]
        return StoredBatch(images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))

    def reset_step_counters(self) -> None:
        """Set the CUDA graphs back to the first step of the epoch and of the run, to measure the same steps again."""
        for graph_step in self.cuda_graph_steps.values():
            graph_step.reset_step_counters()

    def close(self) -> None:
        self.thread_pool.shutdown(wait=True, cancel_futures=True)

    def _make_epoch_plan(self, epoch: int) -> EpochPlan:
        return make_image_order_and_draws(self.session, epoch, self.sampling_probabilities)

    def _can_store_on_device(self, images: Tensor) -> bool:
        if self.device != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info()
        return images.numel() < free // 2


def make_image_order_and_draws(
    session: Session, epoch: int, sampling_probabilities: NDArray[Any] | None = None
) -> EpochPlan:
    """Draw the image order and all other random numbers of an epoch.

    `sampling_probabilities`: of each image, to draw images with replacement (data.balance=sampling)."""
    steps, batch = session.steps_per_epoch, session.batch_size
    seed = session.recipe.train.seed
    order = draw_epoch_image_indices(len(session.data.train), steps, batch, seed, epoch, sampling_probabilities)
    draws, policy = session.objective.make_random_draws(steps, batch, epoch), session.recipe.data.augment
    if "flip" in draws and policy.flip_mode == "alternating":
        first_pass = epoch * session.recipe.data.passes_per_epoch
        draws["flip"] = draw_alternating_flips(order, len(session.data.train), policy.flip or 0.0, seed, first_pass)
    return EpochPlan(order, draws)
