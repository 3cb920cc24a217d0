"""Ways to run training steps: one by one, as a CUDA graph, and many runs as one batched computation."""

from typing import Protocol


class Engine(Protocol):
    """Runs the training steps of an epoch."""

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Load the plan of an epoch and set the sums of the metrics to 0.

        `first_step`: steps of the epoch that were trained before the run was interrupted; their sums are kept."""
        ...

    def run_next_step(self) -> None:
        """Train on the next batch of the epoch. The host does not wait for the device."""
        ...

    def reset_step_counters(self) -> None:
        """Go back to the first step of the epoch, to measure the same steps again. Images must be on the device."""
        ...

    def close(self) -> None:
        """End the threads that load data."""
        ...
