"""Train several small models as one batched computation. Each gets the same result as if it were trained alone.

A small model leaves most of a device idle. Runs that differ only in their seed, rates or decay have tensors of the same
shapes. All weights of all models are stored in one table (model × weight), and every step updates all models at once:
`torch.func.vmap` batches the forward pass over models, and the gradient of the summed losses is each model's gradient.
Each model keeps its own images, order, random draws, learning rates and EMA. On a GPU the step is a CUDA graph.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from vitascope.data.sampling import RandomDraws
from vitascope.kernels.launch import make_repeated_call, restore_tensors_on_exit, warm_up_and_record_cuda_graph
from vitascope.training.engines.prepare_batched import (
    BatchedInputs,
    check_batchable,
    flatten_draws_of_all_models,
    make_batched_preprocessing,
    make_unmixed_targets,
    mix_batch_of_each_model,
    set_batchable_attention_kernels,
    stack_splits,
)
from vitascope.training.engines.single_run import WARM_UP_STEPS
from vitascope.training.loader import EpochPlan, EpochPlanner, make_epoch_plan
from vitascope.training.objectives.classify import LossAndAccuracy, soft_cross_entropy
from vitascope.training.optim.build import has_weight_decay
from vitascope.training.optim.muon import count_packed_matrices, orthogonalise_and_scale_updates
from vitascope.training.optim.optimizer import is_block_matrix
from vitascope.training.optim.schedule import compute_schedule_values
from vitascope.training.state import TrainState

ADAMW_EPS = 1e-8
MAX_SCORED_TOKENS = 2**20  # tokens of all models in one batch of validation images


class BatchedTraining:
    """An engine for several states, trained as one. `copy_weights_and_ema_to_states` updates the states."""

    def __init__(self, states: list[TrainState]) -> None:
        check_batchable([state.recipe for state in states])
        self.states, self.first_state, self.num_models = states, states[0], len(states)
        self.train_config, self.device = self.first_state.recipe.train, self.first_state.hardware.device
        self.batch_size, self.steps_per_epoch = self.first_state.batch_size, self.first_state.steps_per_epoch
        set_batchable_attention_kernels(self.first_state)
        self._build_weight_and_optimizer_tables()
        self.images, self.labels = stack_splits([state.data.train for state in states], self.device)
        splits = [state.data.validation for state in states]
        has_validation = all(splits)
        self.validation_set = (
            stack_splits([split for split in splits if split], self.device) if has_validation else None
        )
        self.preprocessing = make_batched_preprocessing(states, self.device)
        self.lr, self.muon_lr, self.weight_decay = (
            self.weight_table.new_tensor([getattr(state.recipe.train, name) for state in states])[:, None]
            for name in ("lr", "muon_lr", "weight_decay")
        )
        rows = [
            self._compute_schedule_and_bias_corrections(step)
            for step in range(self.first_state.total_steps + WARM_UP_STEPS)
        ]
        self.schedule_tables = {name: self.weight_table.new_tensor([row[name] for row in rows]) for name in rows[0]}
        self.step_in_epoch, self.step_in_run = (torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(2))
        self.metric_sums = self.weight_table.new_zeros(2, self.num_models)  # loss and accuracy, summed over an epoch
        hardware = self.first_state.hardware
        self.augment_batch, self.compute_losses_and_accuracies = (
            hardware.compile(self._augment_and_mix_batches),
            hardware.compile(self._compute_losses_and_accuracies),
        )
        self.update_weights = hardware.compile(self._clip_and_update_weights_and_ema)
        self.planner = EpochPlanner(self._stack_epoch_plans_of_all_models, self.train_config.epochs)
        self.image_order: Tensor | None = None
        self.draws: RandomDraws = {}
        self.cuda_graph: torch.cuda.CUDAGraph | None = None

    def _build_weight_and_optimizer_tables(self) -> None:
        """Store all weights in one table, those of Muon last. The parameters are views of it."""
        named = dict(self.first_state.model.named_parameters())
        uses_muon = self.train_config.optimizer == "muon"
        muon_names = [name for name, weight in named.items() if uses_muon and is_block_matrix(name, weight)]
        names = [name for name in named if name not in muon_names] + muon_names
        sizes = [named[name].numel() for name in names]
        models = [dict(state.model.named_parameters()) for state in self.states]
        rows = [torch.cat([model[name].detach().flatten() for name in names]) for model in models]
        self.weight_table = torch.stack(rows)
        self.param_names, self.param_shapes, self.param_sizes = names, [named[name].shape for name in names], sizes
        self.weights = {
            name: view.detach().requires_grad_()
            for name, view in self._split_table_into_param_views(self.weight_table).items()
        }
        self.ema_table = self.weight_table.clone() if self.train_config.ema else None
        self.num_adamw_weights = sum(size for name, size in zip(names, sizes, strict=True) if name not in muon_names)
        self.muon_param_names, self.autocast_param_names = muon_names, self._list_autocast_param_names()
        decayed = [
            torch.full((size,), has_weight_decay(name, named[name])) for name, size in zip(names, sizes, strict=True)
        ]
        self.decay_mask = torch.cat(decayed).to(self.weight_table)
        self.momentum_table, self.squared_gradient_table = (
            torch.zeros_like(self.weight_table),
            torch.zeros_like(self.weight_table[:, : self.num_adamw_weights]),
        )

    def _list_autocast_param_names(self) -> list[str]:
        """Return the parameters to convert to the autocast dtype. Under vmap, autocast leaves biases in float32."""
        modules = self.first_state.model.named_modules()
        layers = [(name, module) for name, module in modules if isinstance(module, nn.Linear | nn.Conv2d)]
        return [f"{name}.{param}" for name, layer in layers for param, _ in layer.named_parameters(recurse=False)]

    def train_epoch(self, epoch: int) -> LossAndAccuracy:
        """Train all models for one epoch. Return the mean loss and accuracy of each model."""
        self.start_epoch(epoch)
        for _ in range(self.steps_per_epoch):
            self.run_next_step()
        return LossAndAccuracy(*(self.metric_sums / self.steps_per_epoch))

    def run_next_step(self) -> None:
        self.cuda_graph.replay() if self.cuda_graph else self._run_step()

    def reset_step_counters(self) -> None:
        self.step_in_epoch.zero_()
        self.step_in_run.zero_()

    def close(self) -> None:
        self.planner.close()

    def copy_weights_and_ema_to_states(self) -> None:
        """Copy every model's weights and EMA weights into its state."""
        for index, state in enumerate(self.states):
            pairs = [(state.model, self.weight_table)]
            if state.ema and self.ema_table is not None:
                pairs.append((state.ema.model, self.ema_table))
            for model, table in pairs:
                params = self._split_table_into_param_views(table[index : index + 1])
                model.load_state_dict({name: weight[0] for name, weight in params.items()}, strict=False)

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        """Return val_loss and val_accuracy of each model on its validation images; empty if there are none."""
        if self.validation_set is None:
            return [{} for _ in self.states]
        images, labels = self.validation_set
        weights = self._split_table_into_param_views(self.weight_table if self.ema_table is None else self.ema_table)
        chunk_size = max(1, MAX_SCORED_TOKENS // self.first_state.recipe.model.num_tokens // self.num_models)
        parts = []
        for part in images.split(chunk_size, dim=1):
            pixels = self.preprocessing(part.flatten(0, 1)).unflatten(0, part.shape[:2]).to(self.weight_table.dtype)
            parts.append(self._compute_logits_of_all_models(weights, pixels).float())
        logits = torch.cat(parts, dim=1)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1).tolist()
        accuracies = (logits.argmax(-1) == labels).double().mean(1).tolist()
        return [{"val_loss": loss, "val_accuracy": accuracy} for loss, accuracy in zip(losses, accuracies, strict=True)]

    def _compute_schedule_and_bias_corrections(self, step: int) -> dict[str, float]:
        """Return the schedule values and AdamW's bias corrections of a step."""
        beta1, beta2 = self.train_config.betas
        corrections = {"beta1_correction": 1 - beta1 ** (step + 1), "beta2_correction": 1 - beta2 ** (step + 1)}
        return compute_schedule_values(step, self.first_state.total_steps, self.first_state.recipe) | corrections

    def _split_table_into_param_views(self, weight_table: Tensor) -> dict[str, Tensor]:
        """Return views of a table by parameter name, each model × the parameter's shape."""
        parts = zip(self.param_names, weight_table.split(self.param_sizes, dim=1), self.param_shapes, strict=True)
        return {name: part.unflatten(1, shape) for name, part, shape in parts}

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Copy the epoch's plan into the tensors that the CUDA graph reads. Start to draw the next epoch's plan."""
        order, draws = self.planner.get_plan_and_start_next(epoch)
        if self.image_order is None:
            self.image_order = order.to(self.device)
            self.draws = {name: draw.to(self.device) for name, draw in draws.items()}
        self.image_order.copy_(order)
        for name, draw in draws.items():
            self.draws[name].copy_(draw)
        if self.cuda_graph is None and self.first_state.hardware.captured:
            self._capture_cuda_graph()
        self.step_in_epoch.fill_(first_step)
        self.step_in_run.fill_(epoch * self.steps_per_epoch + first_step)
        if first_step == 0:
            self.metric_sums.zero_()

    def _stack_epoch_plans_of_all_models(self, epoch: int) -> EpochPlan:
        """Return the plans of all models in one, step × model × image (…)."""
        plans = [make_epoch_plan(state, epoch) for state in self.states]
        draws = {name: torch.stack([plan.draws[name] for plan in plans], dim=1) for name in plans[0].draws}
        return EpochPlan(torch.stack([plan.image_order for plan in plans], dim=1), draws)

    def _capture_cuda_graph(self) -> None:
        """Warm up, capture the step and restore the state, as `CudaGraphEngine` does."""
        with self._restore_state_on_exit():
            self.cuda_graph, _ = warm_up_and_record_cuda_graph(
                self._run_step, make_repeated_call(self._run_warm_up_step, WARM_UP_STEPS)
            )

    def _run_warm_up_step(self) -> None:
        self.step_in_epoch.zero_()
        self._run_step()

    def _restore_state_on_exit(self) -> AbstractContextManager[None]:
        """Return a context that undoes the steps inside it."""
        tables = [self.weight_table, self.momentum_table, self.squared_gradient_table]
        tables += [] if self.ema_table is None else [self.ema_table]
        return restore_tensors_on_exit([*tables, self.metric_sums, self.step_in_epoch, self.step_in_run])

    def _run_step(self) -> None:
        if self.image_order is None:
            return
        indices = self.image_order.index_select(0, self.step_in_epoch)[0]
        draws = {name: draw.index_select(0, self.step_in_epoch)[0] for name, draw in self.draws.items()}
        model = torch.arange(self.num_models, device=self.device)[:, None]
        inputs = self.augment_batch(self.images[model, indices], self.labels[model, indices], draws)
        losses, accuracies = self.compute_losses_and_accuracies(self.weights, *inputs)
        gradients = torch.autograd.grad(losses.sum(), list(self.weights.values()))
        self.update_weights([gradient.detach() for gradient in gradients])
        self.metric_sums += torch.stack([losses.detach(), accuracies]).to(self.metric_sums.dtype)
        self.step_in_epoch.add_(1)
        self.step_in_run.add_(1)

    def _augment_and_mix_batches(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> BatchedInputs:
        """Augment and mix a batch of every model, model × image (…). Only mixing depends on the model of an image."""
        first, dtype = self.first_state, self.weight_table.dtype
        pixels = self.preprocessing.augment(
            images.flatten(0, 1), flatten_draws_of_all_models(draws), first.recipe.data.augment
        )
        pixels = pixels.unflatten(0, images.shape[:2])
        if "mix" in draws:
            pixels, target = mix_batch_of_each_model(pixels, labels, draws["mix"], dtype)
        else:
            target = make_unmixed_targets(labels)
        probabilities = target.compute_probabilities(len(first.data.classes)).unflatten(0, labels.shape)
        return BatchedInputs(pixels.to(dtype), probabilities, target.get_dominant_labels().unflatten(0, labels.shape))

    def _compute_losses_and_accuracies(
        self, weights: dict[str, Tensor], images: Tensor, target_probabilities: Tensor, target_labels: Tensor
    ) -> LossAndAccuracy:
        """Return the loss and the accuracy of each model on its batch."""
        logits = self._compute_logits_of_all_models(weights, images)
        losses = vmap(
            lambda own_logits, target: soft_cross_entropy(own_logits, target, self.train_config.label_smoothing)
        )(logits, target_probabilities)
        return LossAndAccuracy(losses, (logits.detach().argmax(-1) == target_labels).float().mean(1))

    def _compute_logits_of_all_models(self, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        """Return each model's logits for its own images, model × image × class."""
        hardware = self.first_state.hardware
        if hardware.precision != "float32":
            weights = weights | {name: weights[name].to(hardware.dtype) for name in self.autocast_param_names}
        with hardware.autocast():
            return vmap(lambda params, batch: functional_call(self.first_state.model, params, (batch,)))(
                weights, images
            )

    @torch.no_grad()
    def _clip_and_update_weights_and_ema(self, gradients: list[Tensor]) -> None:
        """Apply the gradients, one tensor per parameter (model × shape), to all models in the table."""
        gradient = torch.cat([part.flatten(1) for part in gradients], dim=1)
        schedule = {name: values.index_select(0, self.step_in_run) for name, values in self.schedule_tables.items()}
        if self.train_config.clip_grad:  # by the norm of each model's gradient
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (self.train_config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        self._update_weights_by_adamw(gradient[:, : self.num_adamw_weights], schedule)
        if self.muon_param_names:
            self._update_weights_by_muon(gradient[:, self.num_adamw_weights :], schedule["lr_factor"])
        if self.ema_table is not None:
            self.ema_table.lerp_(self.weight_table, 1 - schedule["ema_decay"])

    def _update_weights_by_adamw(self, gradient_table: Tensor, schedule: dict[str, Tensor]) -> None:
        """Apply AdamW (Loshchilov & Hutter 2019) with a learning rate and a weight decay per model."""
        beta1, beta2 = self.train_config.betas
        weight, moment, lr = (
            self.weight_table[:, : self.num_adamw_weights],
            self.momentum_table[:, : self.num_adamw_weights],
            self.lr * schedule["lr_factor"],
        )
        weight.mul_(1 - lr * self.weight_decay * self.decay_mask[: self.num_adamw_weights])
        moment.lerp_(gradient_table, 1 - beta1)
        self.squared_gradient_table.mul_(beta2).addcmul_(gradient_table, gradient_table, value=1 - beta2)
        scale = (self.squared_gradient_table / schedule["beta2_correction"]).sqrt() + ADAMW_EPS
        weight.sub_(lr / schedule["beta1_correction"] * moment / scale)

    def _update_weights_by_muon(self, gradient_table: Tensor, lr_factor: Tensor) -> None:
        """Apply Muon to all block matrices of all models, batched by shape. `gradient_table`: model × weight."""
        moment, weight = (
            self.momentum_table[:, self.num_adamw_weights :],
            self.weight_table[:, self.num_adamw_weights :],
        )
        moment.lerp_(gradient_table, 1 - self.train_config.momentum)
        nesterov = torch.lerp(gradient_table, moment, self.train_config.momentum)
        count = len(self.muon_param_names)
        matrices = zip(nesterov.split(self.param_sizes[-count:], dim=1), self.param_shapes[-count:], strict=True)
        stacks = [update.unflatten(1, shape) for update, shape in matrices]
        steps = orthogonalise_and_scale_updates(stacks, [count_packed_matrices(name) for name in self.muon_param_names])
        lr = self.muon_lr * lr_factor
        weight.mul_(1 - lr * self.weight_decay).sub_(torch.cat([step.flatten(1) for step in steps], dim=1) * lr)
