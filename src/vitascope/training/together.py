"""Sessions of one shape -> one batched computation: many small models learn at once, each as if it were alone.

A small model leaves most of a device idle. Runs that differ only in their seed, rates or decay have tensors of the same
shapes, so their weights are stacked and every step is done for all of them at once (`torch.func.vmap`). Each model
keeps its own images, order, draws, rates and average.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitascope.data.draws import Draws, epoch_order, one_step
from vitascope.data.mixing import Target
from vitascope.errors import UserError
from vitascope.recipe.schema import Recipe
from vitascope.training.classify import soft_cross_entropy
from vitascope.training.kernels import use_kernels
from vitascope.training.muon import orthogonalised, parts_of
from vitascope.training.optimizers import is_block_matrix, is_decayed
from vitascope.training.schedule import step_values
from vitascope.training.session import Session

Stacked = dict[str, Tensor]  # a parameter's name -> model × its shape
EPS = 1e-8  # AdamW's


def check_together(recipes: list[Recipe]) -> None:
    """They may differ in seed, rates and decay; the rest decides shapes and what a step does."""
    alike = {repr(_without_own(recipe)) for recipe in recipes}
    if len(alike) > 1:
        raise UserError("Only runs that differ in train.seed, lr, muon_lr and weight_decay alone can learn together.")
    train, model = recipes[0].train, recipes[0].model
    if train.objective != "classify" or train.distill or train.tune != "full" or train.freeze:
        raise UserError("Learning together is for training from scratch with labels.")
    rates = (model.drop_rate, model.pos_drop_rate, model.proj_drop_rate, model.attn_drop_rate, model.drop_path_rate)
    if any(rates):
        raise UserError("Learning together does without dropout and stochastic depth. Set their rates to 0.")
    for name, wanted in (("accumulate", 1), ("layer_decay", 1.0), ("final_weight_decay", None), ("patience", 0)):
        if getattr(train, name) != wanted:
            raise UserError(f"Learning together does without train.{name}={getattr(train, name)}.")
    if recipes[0].data.balance != "none" or model.grad_checkpointing:
        raise UserError("Learning together does without data.balance and model.grad_checkpointing.")


def _without_own(recipe: Recipe) -> Recipe:
    return replace(recipe, train=replace(recipe.train, seed=0, lr=1.0, muon_lr=1.0, weight_decay=0.0))


class Together:
    """Many models as one. Afterwards `give_back` puts each one's weights into its session."""

    def __init__(self, sessions: list[Session]) -> None:
        check_together([session.recipe for session in sessions])
        self.sessions, self.first = sessions, sessions[0]
        self.config, self.device = self.first.recipe.train, self.first.hardware.device
        self.batch, self.steps_per_epoch = self.first.batch, self.first.steps_per_epoch
        use_kernels(self.first.model, {})  # our own cannot be batched over models
        models = [dict(session.model.named_parameters()) for session in sessions]
        self.weights: Stacked = {name: torch.stack([m[name].detach() for m in models]) for name in models[0]}
        self.average = {name: weight.clone() for name, weight in self.weights.items()} if self.config.ema else None
        self.images = [session.data.train.images.to(self.device) for session in sessions]
        self.labels = [session.data.train.labels.to(self.device) for session in sessions]
        muon = self.config.optimizer == "muon"
        named = dict(self.first.model.named_parameters())
        self.by_muon = [name for name, weight in named.items() if muon and is_block_matrix(name, weight)]
        self.decayed = {name: is_decayed(name, weight) for name, weight in named.items()}
        self.moments = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        rest = [name for name in self.weights if name not in self.by_muon]
        self.squares = {name: torch.zeros_like(self.weights[name]) for name in rest}
        dtype = next(iter(self.weights.values())).dtype
        self.lr, self.muon_lr, self.decay = (
            torch.tensor([getattr(session.recipe.train, name) for session in sessions], device=self.device, dtype=dtype)
            for name in ("lr", "muon_lr", "weight_decay")
        )
        self.step = 0

    def epoch(self, number: int) -> Tensor:
        """One pass for all; the mean loss of each model comes back."""
        plans = [self._plan(session, number) for session in self.sessions]
        total = torch.zeros(len(self.sessions), device=self.device)
        for step in range(self.steps_per_epoch):
            total += self._step([(order[step], one_step(draws, step)) for order, draws in plans])
            self.step += 1
        return total / self.steps_per_epoch

    def give_back(self) -> None:
        """Every model's weights into its session, averages into averages."""
        for number, session in enumerate(self.sessions):
            session.model.load_state_dict({name: weight[number] for name, weight in self.weights.items()}, strict=False)
            if session.average and self.average:
                own = {name: weight[number] for name, weight in self.average.items()}
                session.average.model.load_state_dict(own, strict=False)

    def _plan(self, session: Session, epoch: int) -> tuple[Tensor, Draws]:
        seed, images = session.recipe.train.seed, len(session.data.train)
        order = epoch_order(images, self.steps_per_epoch, self.batch, seed, epoch)
        draws = session.objective.draws(self.steps_per_epoch, self.batch, epoch)
        return order.to(self.device), {name: draw.to(self.device) for name, draw in draws.items()}

    def _step(self, plans: list[tuple[Tensor, Draws]]) -> Tensor:
        images, answers = [], []
        for number, (session, (index, draws)) in enumerate(zip(self.sessions, plans, strict=True)):
            given = session.objective.prepare(self.images[number][index], self.labels[number][index], draws)
            images.append(given[0])
            answers.append(Target(*given[1:]).probabilities(len(session.data.classes)))
        with self.first.hardware.autocast(), sdpa_kernel(SDPBackend.MATH):  # the others cannot be batched over models
            gradients, losses = vmap(grad_and_value(self._loss))(
                self.weights, torch.stack(images), torch.stack(answers)
            )
        self._update(gradients)
        return losses.detach().float()

    def _loss(self, weights: Stacked, images: Tensor, answers: Tensor) -> Tensor:
        """Of one model; vmap does it for all."""
        return soft_cross_entropy(
            functional_call(self.first.model, weights, (images,)), answers, self.config.label_smoothing
        )

    @torch.no_grad()
    def _update(self, gradients: Stacked) -> None:
        gradients = self._clipped(gradients)
        values = step_values(self.step, self.first.steps, self.first.recipe)
        for name in self.squares:
            self._adamw(name, gradients[name], float(values["rate"]))
        if self.by_muon:
            self._muon(gradients, float(values["rate"]))
        if self.average:
            torch._foreach_lerp_(list(self.average.values()), list(self.weights.values()), 1 - float(values["decay"]))  # pyright: ignore

    def _clipped(self, gradients: Stacked) -> Stacked:
        """Each model's gradients by their own common norm."""
        if not self.config.clip_grad:
            return gradients
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()])
        factor = (self.config.clip_grad / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        return {name: gradient * _beside(factor, gradient) for name, gradient in gradients.items()}

    def _adamw(self, name: str, gradient: Tensor, rate: float) -> None:
        """Loshchilov & Hutter 2019, with a rate and a decay per model."""
        first, second = self.config.betas
        weight, moment, square = self.weights[name], self.moments[name], self.squares[name]
        lr = _beside(self.lr * rate, weight)
        if self.decayed[name]:
            weight.mul_(1 - lr * _beside(self.decay, weight))
        moment.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        count = self.step + 1
        size = (square / (1 - second**count)).sqrt() + EPS
        weight.sub_(lr / (1 - first**count) * moment / size)

    def _muon(self, gradients: Stacked, rate: float) -> None:
        """All matrices of all models in few batches."""
        momentum = self.config.momentum
        updates = []
        for name in self.by_muon:
            average = self.moments[name].lerp_(gradients[name], 1 - momentum)
            updates.append(torch.lerp(gradients[name], average, momentum))
        for parts in sorted(set(map(parts_of, self.by_muon))):
            names = [name for name in self.by_muon if parts_of(name) == parts]
            mine = [update for name, update in zip(self.by_muon, updates, strict=True) if name in names]
            flat = orthogonalised([matrix for update in mine for matrix in update], parts)
            for place, name in enumerate(names):
                count = len(self.sessions)
                step = torch.stack(flat[place * count : (place + 1) * count])
                weight = self.weights[name]
                lr = _beside(self.muon_lr * rate, weight)
                weight.mul_(1 - lr * _beside(self.decay, weight)).sub_(step * lr)


def _beside(values: Tensor, like: Tensor) -> Tensor:
    """One number per model, shaped to multiply its tensor."""
    return values.view(-1, *[1] * (like.ndim - 1))
