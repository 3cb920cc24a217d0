"""Recipes -> whether their runs can learn together, as one computation, and by which attention."""

from dataclasses import replace

from vitascope.errors import UserError
from vitascope.kernels import HEAD_WIDTHS, HERE, SHORT
from vitascope.model.attention import WRITTEN
from vitascope.model.block import Block
from vitascope.recipe.schema import Recipe
from vitascope.training.kernels import use_kernels
from vitascope.training.session import Session


def check_together(recipes: list[Recipe]) -> None:
    """They may differ in seed, rates and decay; the rest decides shapes and what a step does."""
    alike = {repr(_without_own(recipe)) for recipe in recipes}
    if len(alike) > 1:
        raise UserError("Only runs that differ in train.seed, lr, muon_lr and weight_decay alone can learn together.")
    train, model = recipes[0].train, recipes[0].model
    if train.objective != "classify" or train.distill or train.tune != "full" or train.freeze or recipes[0].weights:
        raise UserError("Learning together is for training from scratch with labels.")
    if model.has_chance:
        raise UserError("Learning together does without dropout and stochastic depth. Set their rates to 0.")
    if model.fewer:
        name, count = next(iter(model.fewer.items()))
        raise UserError(f"Learning together does without model.{name}={count}: set it when the model answers.")
    without = {"grad_accum_steps": 1, "layer_decay": 1.0, "final_weight_decay": None, "patience": 0, "patch_share": 1.0}
    for name, wanted in without.items():
        if getattr(train, name) != wanted:
            raise UserError(f"Learning together does without train.{name}={getattr(train, name)}.")
    if recipes[0].data.balance != "none" or model.grad_checkpointing or train.precision == "float16":
        raise UserError("Learning together does without data.balance, model.grad_checkpointing and float16.")


def _without_own(recipe: Recipe) -> Recipe:
    return replace(recipe, train=replace(recipe.train, seed=0, lr=1.0, muon_lr=1.0, weight_decay=0.0))


def use_batched_attention(session: Session) -> None:
    """PyTorch's fused attention is never taken: where models are batched it does not see that gradients are wanted, and
    two of its CUDA kernels then leave out what their backward pass reads (torch 2.11), without a word."""
    kernel = kernel_for(session)
    use_kernels(session.model, {"attention": kernel})
    last = session.model.blocks[-1]
    if session.recipe.model.global_pool == "token" and isinstance(last, Block):
        last.attn.kernel = WRITTEN  # only the class token asks, and ours is for all tokens


def kernel_for(session: Session) -> str:
    """Our own for few tokens, where it works (its QK-norm has one model's weights), else attention written out."""
    hardware, model = session.hardware, session.recipe.model
    fits = hardware.device == "cuda" and hardware.precision == "bfloat16" and HERE
    plain = not model.qk_norm and not model.causal and model.attention == "plain" and not model.fewer_per_block[0]
    return "own" if fits and plain and model.num_tokens <= SHORT and model.head_width in HEAD_WIDTHS else WRITTEN
