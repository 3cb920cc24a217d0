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

from vitascope.data.augment import MixedLabels, make_unmixed_labels, mix_images_and_labels
from vitascope.data.dataset import Split
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import RandomDraws
from vitascope.shapes import Images
from vitascope.training.engines.batchable import check_batchable, set_batchable_attention
from vitascope.training.engines.cuda_graph import WARM_UP_STEPS, capture_cuda_graph
from vitascope.training.loader import make_epoch_plan
from vitascope.training.objectives.classify import soft_cross_entropy
from vitascope.training.optim.build import has_weight_decay, is_block_matrix
from vitascope.training.optim.muon import num_packed_matrices, orthogonalise_updates
from vitascope.training.optim.schedule import compute_schedule_values
from vitascope.training.session import Session

ADAMW_EPS = 1e-8  # AdamW's
MAX_SCORED_TOKENS = 2**20  # tokens of all models that are scored at once


@dataclass(frozen=True)
class BatchedPreprocessing(Preprocessing):
    """One batch with the images of all models in turn: each is normalised by its own model's mean and deviation."""

    model_means: Tensor  # model × 1 × channel × 1 × 1
    model_stds: Tensor

    def normalize(self, pixels: Images) -> Images:
        apart = pixels.unflatten(0, (len(self.model_means), -1))
        return ((apart - self.model_means) / self.model_stds).flatten(0, 1)


class BatchedTraining:
    """Many models as one. `give_back` puts each one's weights into its session."""

    def __init__(self, sessions: list[Session]) -> None:
        check_batchable([session.recipe for session in sessions])
        self.sessions, self.first_session, self.num_models = sessions, sessions[0], len(sessions)
        self.train_config, self.device = self.first_session.recipe.train, self.first_session.hardware.device
        self.batch_size, self.steps_per_epoch = self.first_session.batch_size, self.first_session.steps_per_epoch
        set_batchable_attention(self.first_session)
        self._build_weight_table()
        self.images, self.labels = self._stack_splits([session.data.train for session in sessions])
        held = [session.data.validation for session in sessions]
        self.validation_set = self._stack_splits([split for split in held if split]) if all(held) else None
        means, deviations = (self._stack_channel_statistics(name) for name in ("mean", "std"))
        self.preprocessing = BatchedPreprocessing(
            **vars(self.first_session.data.preprocessing), model_means=means, model_stds=deviations
        )
        self.lr, self.muon_lr, self.weight_decay = (
            self.weight_table.new_tensor([getattr(session.recipe.train, name) for session in sessions])[:, None]
            for name in ("lr", "muon_lr", "weight_decay")
        )
        rows = [self._compute_schedule_values(step) for step in range(self.first_session.total_steps + WARM_UP_STEPS)]
        self.schedule_tables = {name: self.weight_table.new_tensor([row[name] for row in rows]) for name in rows[0]}
        self.step_in_epoch, self.step_in_run = (torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(2))
        self.metric_sums = self.weight_table.new_zeros(
            2, self.num_models
        )  # loss and share of right answers, summed over an epoch
        hardware = self.first_session.hardware
        self.prepare_batch, self.compute_losses_and_accuracies = (
            hardware.compile(self._prepare_batch),
            hardware.compile(self._compute_losses_and_accuracies),
        )
        self.update_weights = hardware.compile(self._update_weights)
        self.thread_pool = ThreadPoolExecutor(1)
        self.prefetched_plans: dict[int, Future[tuple[Tensor, RandomDraws]]] = {}
        self.image_order: Tensor | None = None
        self.draws: RandomDraws = {}
        self.cuda_graph: torch.cuda.CUDAGraph | None = None

    def _build_weight_table(self) -> None:
        """All weights side by side in one table, those that Muon changes last; parameters are views of it."""
        named = dict(self.first_session.model.named_parameters())
        muon = self.train_config.optimizer == "muon"
        by_muon = [name for name, weight in named.items() if muon and is_block_matrix(name, weight)]
        names = [name for name in named if name not in by_muon] + by_muon
        sizes = [named[name].numel() for name in names]
        models = [dict(session.model.named_parameters()) for session in self.sessions]
        rows = [torch.cat([model[name].detach().flatten() for name in names]) for model in models]
        self.weight_table = torch.stack(rows)
        self.param_names, self.param_shapes, self.param_sizes = names, [named[name].shape for name in names], sizes
        self.weights = {
            name: view.detach().requires_grad_() for name, view in self._view_as_params(self.weight_table).items()
        }
        self.ema_table = self.weight_table.clone() if self.train_config.ema else None
        self.num_adamw_weights = sum(size for name, size in zip(names, sizes, strict=True) if name not in by_muon)
        self.muon_param_names, self.autocast_param_names = by_muon, self._list_autocast_params()
        decayed = [
            torch.full((size,), has_weight_decay(name, named[name])) for name, size in zip(names, sizes, strict=True)
        ]
        self.decay_mask = torch.cat(decayed).to(self.weight_table)
        self.momentum_table, self.squared_gradient_table = (
            torch.zeros_like(self.weight_table),
            torch.zeros_like(self.weight_table[:, : self.num_adamw_weights]),
        )

    def _list_autocast_params(self) -> list[str]:
        """Weights that autocast makes narrow. Over many models it forgets the biases, which would widen what comes."""
        parts = self.first_session.model.named_modules()
        products = [(name, part) for name, part in parts if isinstance(part, nn.Linear | nn.Conv2d)]
        return [f"{name}.{own}" for name, part in products for own, _ in part.named_parameters(recurse=False)]

    def train_epoch(self, epoch: int) -> Tensor:
        """One pass for all. Two rows come back: the mean loss of each model, and its share of right answers."""
        self._load_epoch(epoch)
        self.metric_sums.zero_()
        for _ in range(self.steps_per_epoch):
            self.cuda_graph.replay() if self.cuda_graph else self._run_step()
        return self.metric_sums / self.steps_per_epoch

    def close(self) -> None:
        self.thread_pool.shutdown(wait=True, cancel_futures=True)

    def copy_weights_to_sessions(self) -> None:
        """Every model's weights into its session, averages into averages."""
        for number, session in enumerate(self.sessions):
            pairs = [(session.model, self.weight_table)]
            if session.ema and self.ema_table is not None:
                pairs.append((session.ema.model, self.ema_table))
            for model, table in pairs:
                own = self._view_as_params(table[number : number + 1])
                model.load_state_dict({name: weight[0] for name, weight in own.items()}, strict=False)

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        """What each answers to its own validation images; empty where there are none."""
        if self.validation_set is None:
            return [{} for _ in self.sessions]
        images, labels = self.validation_set
        weights = self._view_as_params(self.weight_table if self.ema_table is None else self.ema_table)
        at_once = max(1, MAX_SCORED_TOKENS // self.first_session.recipe.model.num_tokens // self.num_models)
        parts = []
        for part in images.split(at_once, dim=1):
            pixels = self.preprocessing(part.flatten(0, 1)).unflatten(0, part.shape[:2]).to(self.weight_table.dtype)
            parts.append(self._compute_logits(weights, pixels).float())
        logits = torch.cat(parts, dim=1)
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1).tolist()
        right = (logits.argmax(-1) == labels).double().mean(1).tolist()
        return [{"val_loss": one, "val_accuracy": other} for one, other in zip(loss, right, strict=True)]

    def _stack_splits(self, splits: list[Split]) -> tuple[Tensor, Tensor]:
        """Images and labels on the device, model × image (…)."""
        parts = ([split.images for split in splits], [split.labels for split in splits])
        images, labels = (torch.stack(part).to(self.device) for part in parts)
        return images, labels

    def _stack_channel_statistics(self, statistic_name: str) -> Tensor:
        """model × 1 × channel × 1 × 1, float32 as a single run's."""
        rows = [getattr(session.data.preprocessing, statistic_name) for session in self.sessions]
        return torch.tensor(rows, device=self.device)[:, None, :, None, None]

    def _compute_schedule_values(self, step: int) -> dict[str, float]:
        first, second = self.train_config.betas
        corrections = {"first": 1 - first ** (step + 1), "second": 1 - second ** (step + 1)}
        return compute_schedule_values(step, self.first_session.total_steps, self.first_session.recipe) | corrections

    def _view_as_params(self, weight_table: Tensor) -> dict[str, Tensor]:
        """Views of a table, each model × the parameter's shape."""
        parts = zip(self.param_names, weight_table.split(self.param_sizes, dim=1), self.param_shapes, strict=True)
        return {name: part.unflatten(1, shape) for name, part, shape in parts}

    def _load_epoch(self, epoch: int) -> None:
        """The epoch's order and draws into the places the recorded step reads; the next one's are made meanwhile."""
        order, draws = (
            self.prefetched_plans.pop(epoch, None) or self.thread_pool.submit(self._make_epoch_plans, epoch)
        ).result()
        if epoch + 1 < self.train_config.epochs:
            self.prefetched_plans[epoch + 1] = self.thread_pool.submit(self._make_epoch_plans, epoch + 1)
        if self.image_order is None:
            self.image_order = order.to(self.device)
            self.draws = {name: draw.to(self.device) for name, draw in draws.items()}
        self.image_order.copy_(order)
        for name, draw in draws.items():
            self.draws[name].copy_(draw)
        if self.cuda_graph is None and self.first_session.hardware.captured:
            self._capture_cuda_graph()
        self.step_in_epoch.zero_()
        self.step_in_run.fill_(epoch * self.steps_per_epoch)

    def _make_epoch_plans(self, epoch: int) -> tuple[Tensor, RandomDraws]:
        """step × model × image (…)."""
        plans = [make_epoch_plan(session, epoch) for session in self.sessions]
        draws = {name: torch.stack([plan[1][name] for plan in plans], dim=1) for name in plans[0][1]}
        return torch.stack([plan[0] for plan in plans], dim=1), draws

    def _capture_cuda_graph(self) -> None:
        """As `CapturedStep`: warm up, record, put everything back as it was."""
        with self._restore_state_on_exit():
            self.cuda_graph = capture_cuda_graph(self._run_warm_up_steps, self._run_step)

    def _run_warm_up_steps(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self.step_in_epoch.zero_()
            self._run_step()

    @contextmanager
    def _restore_state_on_exit(self) -> Iterator[None]:
        changing = [
            self.weight_table,
            self.momentum_table,
            self.squared_gradient_table,
            self.metric_sums,
            self.step_in_epoch,
            self.step_in_run,
        ]
        changing += [] if self.ema_table is None else [self.ema_table]
        before = [tensor.clone() for tensor in changing]
        yield
        for tensor, old in zip(changing, before, strict=True):
            tensor.copy_(old)

    def _run_step(self) -> None:
        if self.image_order is None:
            return
        index = self.image_order.index_select(0, self.step_in_epoch)[0]
        draws = {name: draw.index_select(0, self.step_in_epoch)[0] for name, draw in self.draws.items()}
        model = torch.arange(self.num_models, device=self.device)[:, None]
        pixels, answers, wanted = self.prepare_batch(self.images[model, index], self.labels[model, index], draws)
        losses, right = self.compute_losses_and_accuracies(self.weights, pixels, answers, wanted)
        gradients = torch.autograd.grad(losses.sum(), list(self.weights.values()))
        self.update_weights([gradient.detach() for gradient in gradients])
        self.metric_sums += torch.stack([losses.detach(), right]).to(self.metric_sums.dtype)
        self.step_in_epoch.add_(1)
        self.step_in_run.add_(1)

    def _prepare_batch(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> tuple[Tensor, Tensor, Tensor]:
        """Varied and mixed, model × image (…); only mixing must know which images are of one model."""
        alone = {name: draw.flatten(0, 1) for name, draw in draws.items() if name != "mix"}
        pixels = self.preprocessing.augment(images.flatten(0, 1), alone, self.first_session.recipe.data.augment)
        pixels = pixels.unflatten(0, images.shape[:2])
        if "mix" in draws:
            pixels, own, partner, share = vmap(_mix_batch)(pixels, labels, draws["mix"])
            target = MixedLabels(own.flatten(), partner.flatten(), share.flatten().to(self.weight_table.dtype))
        else:
            target = make_unmixed_labels(labels.flatten())
        answers = target.compute_probabilities(len(self.first_session.data.classes)).unflatten(0, labels.shape)
        return pixels.to(self.weight_table.dtype), answers, target.get_dominant_labels().unflatten(0, labels.shape)

    def _compute_losses_and_accuracies(
        self, weights: dict[str, Tensor], images: Tensor, target_probabilities: Tensor, target_labels: Tensor
    ):
        """Each model's loss, and its share of right answers."""
        logits = self._compute_logits(weights, images)
        losses = vmap(lambda said, answer: soft_cross_entropy(said, answer, self.train_config.label_smoothing))(
            logits, target_probabilities
        )
        return losses, (logits.detach().argmax(-1) == target_labels).float().mean(1)

    def _compute_logits(self, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        hardware = self.first_session.hardware
        if hardware.precision != "float32":
            weights = weights | {name: weights[name].to(hardware.dtype) for name in self.autocast_param_names}
        with hardware.autocast():
            return vmap(lambda own, seen: functional_call(self.first_session.model, own, (seen,)))(weights, images)

    @torch.no_grad()
    def _update_weights(self, gradients: list[Tensor]) -> None:
        gradient = torch.cat([part.flatten(1) for part in gradients], dim=1)
        now = {name: values.index_select(0, self.step_in_run) for name, values in self.schedule_tables.items()}
        if self.train_config.clip_grad:  # each model's by their own norm
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (self.train_config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        self._apply_adamw(gradient[:, : self.num_adamw_weights], now)
        if self.muon_param_names:
            self._apply_muon(gradient[:, self.num_adamw_weights :], now["rate"])
        if self.ema_table is not None:
            self.ema_table.lerp_(self.weight_table, 1 - now["decay"])

    def _apply_adamw(self, gradient: Tensor, schedule: dict[str, Tensor]) -> None:
        """Loshchilov & Hutter 2019, with a rate and a decay per model."""
        first, second = self.train_config.betas
        weight, moment, lr = (
            self.weight_table[:, : self.num_adamw_weights],
            self.momentum_table[:, : self.num_adamw_weights],
            self.lr * schedule["rate"],
        )
        weight.mul_(1 - lr * self.weight_decay * self.decay_mask[: self.num_adamw_weights])
        moment.lerp_(gradient, 1 - first)
        self.squared_gradient_table.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (self.squared_gradient_table / schedule["second"]).sqrt() + ADAMW_EPS
        weight.sub_(lr / schedule["first"] * moment / size)

    def _apply_muon(self, gradient: Tensor, lr_factor: Tensor) -> None:
        """All matrices of all models in few batches."""
        moment, weight = (
            self.momentum_table[:, self.num_adamw_weights :],
            self.weight_table[:, self.num_adamw_weights :],
        )
        moment.lerp_(gradient, 1 - self.train_config.momentum)
        pulled = torch.lerp(gradient, moment, self.train_config.momentum)
        count = len(self.muon_param_names)
        matrices = zip(pulled.split(self.param_sizes[-count:], dim=1), self.param_shapes[-count:], strict=True)
        stacks = [own.unflatten(1, shape) for own, shape in matrices]
        steps = orthogonalise_updates(stacks, [num_packed_matrices(name) for name in self.muon_param_names])
        lr = self.muon_lr * lr_factor
        weight.mul_(1 - lr * self.weight_decay).sub_(torch.cat([step.flatten(1) for step in steps], dim=1) * lr)


def _mix_batch(images: Tensor, labels: Tensor, mix_draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pixels, target = mix_images_and_labels(images, labels, mix_draws)
    return pixels, target.labels, target.partner_labels, target.lam
