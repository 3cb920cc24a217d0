"""Sessions of one shape -> one batched computation: many small models learn at once, each as if it were alone.

A small model leaves most of a device idle. Runs that differ only in their seed, rates or decay have tensors of the same
shapes, so all weights of all models lie in one table (model × weight) and every step is done for all of them at once:
`torch.func.vmap` batches the forward pass over models, and the sum of the losses passes each model its own gradient.
Each model keeps its own images, order, draws, rates and average. On a GPU the step is recorded, as a single run's is.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from vitascope.data.draws import Draws
from vitascope.data.mixing import Target, mix, unmixed
from vitascope.data.preparation import Preparation
from vitascope.data.source import Split
from vitascope.shapes import Images
from vitascope.training.alike import check_together, use_batched_attention
from vitascope.training.captured import WARM_UP, recorded
from vitascope.training.classify import soft_cross_entropy
from vitascope.training.feeding import epoch_plan
from vitascope.training.muon import orthogonalised, parts_of
from vitascope.training.optimizers import is_block_matrix, is_decayed
from vitascope.training.schedule import step_values
from vitascope.training.session import Session

EPS = 1e-8  # AdamW's
SCORED = 2**20  # tokens of all models that are scored at once


@dataclass(frozen=True)
class Prepared(Preparation):
    """One batch with the images of all models in turn: each is normalised by its own model's mean and deviation."""

    means: Tensor  # model × 1 × channel × 1 × 1
    deviations: Tensor

    def normalise(self, pixels: Images) -> Images:
        apart = pixels.unflatten(0, (len(self.means), -1))
        return ((apart - self.means) / self.deviations).flatten(0, 1)


class Together:
    """Many models as one. `give_back` puts each one's weights into its session."""

    def __init__(self, sessions: list[Session]) -> None:
        check_together([session.recipe for session in sessions])
        self.sessions, self.first, self.count = sessions, sessions[0], len(sessions)
        self.config, self.device = self.first.recipe.train, self.first.hardware.device
        self.batch, self.steps_per_epoch = self.first.batch, self.first.steps_per_epoch
        use_batched_attention(self.first)
        self._lay_out()
        self.images, self.labels = self._stacked([session.data.train for session in sessions])
        held = [session.data.validation for session in sessions]
        self.held = self._stacked([split for split in held if split]) if all(held) else None
        means, deviations = (self._numbers(name) for name in ("mean", "std"))
        self.prepared = Prepared(**vars(self.first.data.preparation), means=means, deviations=deviations)
        self.lr, self.muon_lr, self.decay = (
            self.table.new_tensor([getattr(session.recipe.train, name) for session in sessions])[:, None]
            for name in ("lr", "muon_lr", "weight_decay")
        )
        rows = [self._values(step) for step in range(self.first.steps + WARM_UP)]
        self.values = {name: self.table.new_tensor([row[name] for row in rows]) for name in rows[0]}
        self.place, self.step = (torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(2))
        self.told = self.table.new_zeros(2, self.count)  # loss and share of right answers, summed over an epoch
        hardware = self.first.hardware
        self.given, self.forward = hardware.compile(self._given), hardware.compile(self._losses)
        self.update = hardware.compile(self._update)
        self.pool = ThreadPoolExecutor(1)
        self.ahead: dict[int, Future[tuple[Tensor, Draws]]] = {}
        self.order: Tensor | None = None
        self.draws: Draws = {}
        self.graph: torch.cuda.CUDAGraph | None = None

    def _lay_out(self) -> None:
        """All weights side by side in one table, those that Muon changes last; parameters are views of it."""
        named = dict(self.first.model.named_parameters())
        muon = self.config.optimizer == "muon"
        by_muon = [name for name, weight in named.items() if muon and is_block_matrix(name, weight)]
        names = [name for name in named if name not in by_muon] + by_muon
        sizes = [named[name].numel() for name in names]
        models = [dict(session.model.named_parameters()) for session in self.sessions]
        rows = [torch.cat([model[name].detach().flatten() for name in names]) for model in models]
        self.table = torch.stack(rows)
        self.names, self.shapes, self.sizes = names, [named[name].shape for name in names], sizes
        self.weights = {name: view.detach().requires_grad_() for name, view in self._as_weights(self.table).items()}
        self.average = self.table.clone() if self.config.ema else None
        self.adams = sum(size for name, size in zip(names, sizes, strict=True) if name not in by_muon)
        self.by_muon, self.narrow = by_muon, self._of_products()
        decayed = [torch.full((size,), is_decayed(name, named[name])) for name, size in zip(names, sizes, strict=True)]
        self.decayed = torch.cat(decayed).to(self.table)
        self.moments, self.squares = torch.zeros_like(self.table), torch.zeros_like(self.table[:, : self.adams])

    def _of_products(self) -> list[str]:
        """Weights that autocast makes narrow. Over many models it forgets the biases, which would widen what comes."""
        parts = self.first.model.named_modules()
        products = [(name, part) for name, part in parts if isinstance(part, nn.Linear | nn.Conv2d)]
        return [f"{name}.{own}" for name, part in products for own, _ in part.named_parameters(recurse=False)]

    def epoch(self, number: int) -> Tensor:
        """One pass for all. Two rows come back: the mean loss of each model, and its share of right answers."""
        self._load(number)
        self.told.zero_()
        for _ in range(self.steps_per_epoch):
            self.graph.replay() if self.graph else self._step()
        return self.told / self.steps_per_epoch

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def give_back(self) -> None:
        """Every model's weights into its session, averages into averages."""
        for number, session in enumerate(self.sessions):
            pairs = [(session.model, self.table)]
            if session.average and self.average is not None:
                pairs.append((session.average.model, self.average))
            for model, table in pairs:
                own = self._as_weights(table[number : number + 1])
                model.load_state_dict({name: weight[0] for name, weight in own.items()}, strict=False)

    @torch.no_grad()
    def scores(self) -> list[dict[str, float]]:
        """What each answers to its own validation images; empty where there are none."""
        if self.held is None:
            return [{} for _ in self.sessions]
        images, labels = self.held
        weights = self._as_weights(self.table if self.average is None else self.average)
        at_once = max(1, SCORED // self.first.recipe.model.num_tokens // self.count)
        parts = []
        for part in images.split(at_once, dim=1):
            pixels = self.prepared(part.flatten(0, 1)).unflatten(0, part.shape[:2]).to(self.table.dtype)
            parts.append(self._logits(weights, pixels).float())
        logits = torch.cat(parts, dim=1)
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1).tolist()
        right = (logits.argmax(-1) == labels).double().mean(1).tolist()
        return [{"val_loss": one, "val_accuracy": other} for one, other in zip(loss, right, strict=True)]

    def _stacked(self, splits: list[Split]) -> tuple[Tensor, Tensor]:
        """Images and labels on the device, model × image (…)."""
        parts = ([split.images for split in splits], [split.labels for split in splits])
        images, labels = (torch.stack(part).to(self.device) for part in parts)
        return images, labels

    def _numbers(self, name: str) -> Tensor:
        """model × 1 × channel × 1 × 1, float32 as a single run's."""
        rows = [getattr(session.data.preparation, name) for session in self.sessions]
        return torch.tensor(rows, device=self.device)[:, None, :, None, None]

    def _values(self, step: int) -> dict[str, float]:
        first, second = self.config.betas
        corrections = {"first": 1 - first ** (step + 1), "second": 1 - second ** (step + 1)}
        return step_values(step, self.first.steps, self.first.recipe) | corrections

    def _as_weights(self, table: Tensor) -> dict[str, Tensor]:
        """Views of a table, each model × the parameter's shape."""
        parts = zip(self.names, table.split(self.sizes, dim=1), self.shapes, strict=True)
        return {name: part.unflatten(1, shape) for name, part, shape in parts}

    def _load(self, epoch: int) -> None:
        """The epoch's order and draws into the places the recorded step reads; the next one's are made meanwhile."""
        order, draws = (self.ahead.pop(epoch, None) or self.pool.submit(self._plans, epoch)).result()
        if epoch + 1 < self.config.epochs:
            self.ahead[epoch + 1] = self.pool.submit(self._plans, epoch + 1)
        if self.order is None:
            self.order = order.to(self.device)
            self.draws = {name: draw.to(self.device) for name, draw in draws.items()}
        self.order.copy_(order)
        for name, draw in draws.items():
            self.draws[name].copy_(draw)
        if self.graph is None and self.first.hardware.captured:
            self._record()
        self.place.zero_()
        self.step.fill_(epoch * self.steps_per_epoch)

    def _plans(self, epoch: int) -> tuple[Tensor, Draws]:
        """step × model × image (…)."""
        plans = [epoch_plan(session, epoch) for session in self.sessions]
        draws = {name: torch.stack([plan[1][name] for plan in plans], dim=1) for name in plans[0][1]}
        return torch.stack([plan[0] for plan in plans], dim=1), draws

    def _record(self) -> None:
        """As `CapturedStep`: warm up, record, put everything back as it was."""
        with self._leaving_no_trace():
            self.graph = recorded(self._warm_up, self._step)

    def _warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.place.zero_()
            self._step()

    @contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        changing = [self.table, self.moments, self.squares, self.told, self.place, self.step]
        changing += [] if self.average is None else [self.average]
        before = [tensor.clone() for tensor in changing]
        yield
        for tensor, old in zip(changing, before, strict=True):
            tensor.copy_(old)

    def _step(self) -> None:
        if self.order is None:
            return
        index = self.order.index_select(0, self.place)[0]
        draws = {name: draw.index_select(0, self.place)[0] for name, draw in self.draws.items()}
        model = torch.arange(self.count, device=self.device)[:, None]
        pixels, answers, wanted = self.given(self.images[model, index], self.labels[model, index], draws)
        losses, right = self.forward(self.weights, pixels, answers, wanted)
        gradients = torch.autograd.grad(losses.sum(), list(self.weights.values()))
        self.update([gradient.detach() for gradient in gradients])
        self.told += torch.stack([losses.detach(), right]).to(self.told.dtype)
        self.place.add_(1)
        self.step.add_(1)

    def _given(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Varied and mixed, model × image (…); only mixing must know which images are of one model."""
        alone = {name: draw.flatten(0, 1) for name, draw in draws.items() if name != "mix"}
        pixels = self.prepared.view(images.flatten(0, 1), alone, self.first.recipe.data.augment)
        pixels = pixels.unflatten(0, images.shape[:2])
        if "mix" in draws:
            pixels, own, partner, share = vmap(_mixed)(pixels, labels, draws["mix"])
            target = Target(own.flatten(), partner.flatten(), share.flatten().to(self.table.dtype))
        else:
            target = unmixed(labels.flatten())
        answers = target.probabilities(len(self.first.data.classes)).unflatten(0, labels.shape)
        return pixels.to(self.table.dtype), answers, target.dominant().unflatten(0, labels.shape)

    def _losses(self, weights: dict[str, Tensor], images: Tensor, answers: Tensor, wanted: Tensor):
        """Each model's loss, and its share of right answers."""
        logits = self._logits(weights, images)
        losses = vmap(lambda said, answer: soft_cross_entropy(said, answer, self.config.label_smoothing))(
            logits, answers
        )
        return losses, (logits.detach().argmax(-1) == wanted).float().mean(1)

    def _logits(self, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        hardware = self.first.hardware
        if hardware.precision != "float32":
            weights = weights | {name: weights[name].to(hardware.dtype) for name in self.narrow}
        with hardware.autocast():
            return vmap(lambda own, seen: functional_call(self.first.model, own, (seen,)))(weights, images)

    @torch.no_grad()
    def _update(self, gradients: list[Tensor]) -> None:
        gradient = torch.cat([part.flatten(1) for part in gradients], dim=1)
        now = {name: values.index_select(0, self.step) for name, values in self.values.items()}
        if self.config.clip_grad:  # each model's by their own norm
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (self.config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        self._adamw(gradient[:, : self.adams], now)
        if self.by_muon:
            self._muon(gradient[:, self.adams :], now["rate"])
        if self.average is not None:
            self.average.lerp_(self.table, 1 - now["decay"])

    def _adamw(self, gradient: Tensor, now: dict[str, Tensor]) -> None:
        """Loshchilov & Hutter 2019, with a rate and a decay per model."""
        first, second = self.config.betas
        weight, moment, lr = self.table[:, : self.adams], self.moments[:, : self.adams], self.lr * now["rate"]
        weight.mul_(1 - lr * self.decay * self.decayed[: self.adams])
        moment.lerp_(gradient, 1 - first)
        self.squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (self.squares / now["second"]).sqrt() + EPS
        weight.sub_(lr / now["first"] * moment / size)

    def _muon(self, gradient: Tensor, rate: Tensor) -> None:
        """All matrices of all models in few batches."""
        moment, weight = self.moments[:, self.adams :], self.table[:, self.adams :]
        moment.lerp_(gradient, 1 - self.config.momentum)
        pulled = torch.lerp(gradient, moment, self.config.momentum)
        count = len(self.by_muon)
        matrices = zip(pulled.split(self.sizes[-count:], dim=1), self.shapes[-count:], strict=True)
        stacks = [own.unflatten(1, shape) for own, shape in matrices]
        steps = orthogonalised(stacks, [parts_of(name) for name in self.by_muon])
        lr = self.muon_lr * rate
        weight.mul_(1 - lr * self.decay).sub_(torch.cat([step.flatten(1) for step in steps], dim=1) * lr)


def _mixed(images: Tensor, labels: Tensor, draw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pixels, target = mix(images, labels, draw)
    return pixels, target.own, target.partner, target.share
