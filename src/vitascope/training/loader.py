"""Load batches onto the training device; draw the next epoch's plan and fetch the next images in the background."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.dataset import Dataset, Labels, UInt8Images
from vitascope.data.open_data import compute_class_weights
from vitascope.data.sampling import RandomDraws, draw_alternating_flips, draw_epoch_image_indices
from vitascope.training.state import TrainState

PREFETCHED_BATCHES = 4
MAX_DEVICE_MEMORY_FRACTION = 0.5  # of a GPU's free memory, for images


class EpochPlan(NamedTuple):
    """The random choices of an epoch: the image indices of each step (step × image), and the augmentation's draws."""

    image_order: Tensor
    draws: RandomDraws

    def to(self, device: str) -> "EpochPlan":
        """Copy the plan to a device."""
        draws = {name: draw.to(device, non_blocking=True) for name, draw in self.draws.items()}
        return EpochPlan(self.image_order.to(device, non_blocking=True), draws)


class StoredBatch(NamedTuple):
    """Images and labels of a batch, on the training device, before augmentation."""

    images: UInt8Images
    labels: Labels


class EpochPlanner:
    """Make the plan of an epoch, and the next epoch's in the background."""

    def __init__(self, make_plan: Callable[[int], EpochPlan], num_epochs: int) -> None:
        self.make_plan, self.num_epochs = make_plan, num_epochs
        self.thread_pool = ThreadPoolExecutor(1)
        self.futures: dict[int, Future[EpochPlan]] = {}

    def get_plan_and_start_next(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch, and start to make the plan of the next one."""
        plan = (self.futures.pop(epoch, None) or self.thread_pool.submit(self.make_plan, epoch)).result()
        if epoch + 1 < self.num_epochs:
            self.futures[epoch + 1] = self.thread_pool.submit(self.make_plan, epoch + 1)
        return plan

    def close(self) -> None:
        self.thread_pool.shutdown(wait=True, cancel_futures=True)


class ImagePrefetcher:
    """Fetch the images of the next steps in the background, from a data set that is not on the device."""

    def __init__(self, dataset: Dataset, device: str) -> None:
        self.dataset, self.device = dataset, device
        self.thread_pool = ThreadPoolExecutor(2, thread_name_prefix="prefetch")
        self.futures: deque[Future[UInt8Images]] = deque()
        self.remaining: deque[Tensor] = deque()

    def start_epoch(self, image_order: Tensor) -> None:
        """Start to fetch the batches of an epoch (step × image, on the CPU) in this order."""
        self._cancel_futures()
        self.remaining = deque(image_order)
        for _ in range(PREFETCHED_BATCHES):
            self._submit_next()

    def wait_for_next_batch(self) -> UInt8Images:
        """Return the images of the next step; on a CUDA device in pinned memory, which is copied without waiting."""
        images = self.futures.popleft().result()
        self._submit_next()
        return images

    def fetch(self, image_indices: Tensor) -> UInt8Images:
        """Return some images, in pinned memory on a CUDA device."""
        images = self.dataset.fetch(image_indices)
        return images.pin_memory() if self.device == "cuda" else images

    def close(self) -> None:
        self._cancel_futures()
        self.thread_pool.shutdown(wait=True, cancel_futures=True)

    def _submit_next(self) -> None:
        if self.remaining:
            self.futures.append(self.thread_pool.submit(self.fetch, self.remaining.popleft()))

    def _cancel_futures(self) -> None:
        while self.futures:
            self.futures.popleft().cancel()


class Loader:
    """The batches of a run. `images`: all images on the device if they fit there, else empty, and they are prefetched.

    Order and random draws follow from seed, epoch and the position in the epoch's order, so that the result does not
    depend on where the images are."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.device = state, state.hardware.device
        dataset = state.data.train
        self.labels = dataset.labels.to(self.device)
        can_store = dataset.is_in_memory and _fits_on_device(dataset, self.device)
        self.images = dataset.images.to(self.device) if can_store else dataset.labels.new_empty(0)
        self.prefetcher = None if can_store else ImagePrefetcher(dataset, self.device)
        probabilities = _compute_sampling_probabilities(state)
        self.planner = EpochPlanner(
            lambda epoch: make_epoch_plan(state, epoch, probabilities), state.recipe.train.epochs
        )

    def get_plan_and_start_next(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch, on the CPU."""
        return self.planner.get_plan_and_start_next(epoch)

    def start_prefetching(self, image_order: Tensor) -> None:
        if self.prefetcher is not None:
            self.prefetcher.start_epoch(image_order)

    def load_next_batch(self, image_indices: Tensor) -> StoredBatch:
        """Return the batch of the next step on the device. Steps are loaded in the order of the plan."""
        if self.prefetcher is not None:
            images = self.prefetcher.wait_for_next_batch().to(self.device, non_blocking=True)
        else:
            images = self.images[image_indices]
        return StoredBatch(images, self.labels[image_indices])

    def close(self) -> None:
        self.planner.close()
        if self.prefetcher is not None:
            self.prefetcher.close()


def make_epoch_plan(state: TrainState, epoch: int, sampling_probabilities: NDArray[Any] | None = None) -> EpochPlan:
    """Draw the image order and all other random numbers of an epoch.

    `sampling_probabilities`: of each image, to draw images with replacement (data.balance=sampling)."""
    steps, batch = state.steps_per_epoch, state.batch_size
    seed = state.recipe.train.seed
    order = draw_epoch_image_indices(len(state.data.train), steps, batch, seed, epoch, sampling_probabilities)
    draws, policy = state.objective.draw_random_numbers_of_epoch(steps, batch, epoch), state.recipe.data.augment
    if "flip" in draws and policy.flip_mode == "alternating":
        first_pass = epoch * state.recipe.data.passes_per_epoch
        draws["flip"] = draw_alternating_flips(order, len(state.data.train), policy.flip or 0.0, seed, first_pass)
    return EpochPlan(order, draws)


def _compute_sampling_probabilities(state: TrainState) -> NDArray[Any] | None:
    """Return a probability per image for data.balance=sampling, else None."""
    if state.recipe.data.balance != "sampling":
        return None
    labels = state.data.train.labels
    weights = compute_class_weights(labels, len(state.data.classes))[labels].double()
    return (weights / weights.sum()).numpy()


def _fits_on_device(dataset: Dataset, device: str) -> bool:
    if device != "cuda":
        return True
    channels, rows, columns = dataset.image_shape
    free, _ = torch.cuda.mem_get_info()
    return len(dataset) * channels * rows * columns < free * MAX_DEVICE_MEMORY_FRACTION
