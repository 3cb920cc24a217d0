"""The whole step as one CUDA graph: the host starts it with a single call and decides nothing while an epoch runs.

Each step would start hundreds of small kernels, and starting them takes longer than running them. So a step is recorded
once (batch, variation, forward, backward, update, averaging) and replayed. What changes from step to step lies on the
device: the epoch's order and draws, the rates of all steps, and two counters that the recorded step itself moves on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitascope.data.draws import Draws
from vitascope.training.optimizers import set_rates
from vitascope.training.schedule import Values, step_values
from vitascope.training.session import Session
from vitascope.training.step import Tally, train_step

WARM_UP = 3  # steps before recording, in which kernels are chosen and memory is set up; then undone


class CapturedStep:
    """`load` an epoch, then call once per step."""

    def __init__(self, session: Session, images: Tensor, labels: Tensor, tally: Tally) -> None:
        self.session, self.images, self.labels, self.tally = session, images, labels, tally
        device = session.hardware.device
        self.place = torch.zeros((), dtype=torch.long, device=device)  # step within the epoch
        self.count = torch.zeros((), dtype=torch.long, device=device)  # step within the run
        rows = [step_values(step, session.steps, session.recipe) for step in range(session.steps + WARM_UP)]
        self.tables = {name: torch.tensor([row[name] for row in rows], device=device) for name in rows[0]}
        for optimizer in session.optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor) or group["lr"].device.type != device:
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)  # else another stage's step uses it
        self.order: Tensor | None = None
        self.draws: Draws = {}
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, order: Tensor, draws: Draws) -> None:
        """An epoch's order and draws, into the places the recorded step reads."""
        if self.order is None:
            self.order, self.draws = order.clone(), {name: draw.clone() for name, draw in draws.items()}
        self.order.copy_(order)
        for name, draw in draws.items():
            self.draws[name].copy_(draw)
        if self.graph is None:
            self._record()
        self.place.zero_()
        self.count.fill_(self.session.step)
        self.tally.clear()

    def rewind(self) -> None:
        """Back to the first step of the epoch and of the run."""
        self.place.zero_()
        self.count.zero_()

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()

    def _step(self) -> None:
        if self.order is None:
            return
        at = self.place.view(1)
        index = self.order.index_select(0, at)[0]
        draws = {name: draw.index_select(0, at)[0] for name, draw in self.draws.items()}
        now = self.count.view(1)
        values: Values = {name: table.index_select(0, now)[0] for name, table in self.tables.items()}
        set_rates(self.session.optimizers, values["rate"])
        batch = self.images[index], self.labels[index]
        train_step(self.session, *batch, draws, self.tally, self.count, values)
        self.place.add_(1)
        self.count.add_(1)

    def _record(self) -> None:
        """Warm up beside the main stream, record, and put everything back as it was."""
        before = self.session.snapshot()
        self.graph = recorded(self._warm_up, self._step)
        put_back(self.session, before)

    def _warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.place.zero_()
            self._step()


def recorded(warm_up: Callable[[], None], step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as one graph, after warming up beside the main stream."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        warm_up()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def put_back(session: Session, state: dict[str, Any]) -> None:
    """Undo steps in place: the recorded graph knows the tensors by their addresses."""
    session.model.load_state_dict(state["model"])
    session.objective.extra.load_state_dict(state["extra"])
    if session.average:
        session.average.model.load_state_dict(state["average"])
    for optimizer, saved in zip(session.optimizers, state["optimizers"], strict=True):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for number, weight in enumerate(weights):
            for name, tensor in optimizer.state[weight].items():
                old = saved["state"].get(number, {}).get(name)
                tensor.zero_() if old is None else tensor.copy_(old)
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"])
