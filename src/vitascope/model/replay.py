"""Run any ViT and return its logits with the attention maps of every block, hidden states, and merged tokens.

Vitascope's models run block by block as in `explicit_blocks`. Other models are recorded. Fused attention does not
return its maps. While such a model runs, every call of scaled_dot_product_attention is therefore replaced by an
explicit computation that returns them. Both outputs are compared; maps that do not reproduce the block's output are
rejected. The code around the call (packed projections, QK-norm, rotary positions, masks, learned temperatures) is the
model's own, in its own dtype.

No model is changed: a recorded model is a copy of its modules that shares all parameters. So several threads can replay
one model at the same time.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitascope.errors import UserError
from vitascope.model.explicit_blocks import (
    ExplicitAttention,
    MapEditor,
    apply_and_record_blocks,
    apply_blocks_to_groups,
)
from vitascope.model.patches import check_image_shape_and_dtype
from vitascope.model.scaled_dot_product import check_maps_reproduce_output, compute_attention_maps
from vitascope.model.token_merging import expand_maps_to_all_tokens, expand_tokens_to_all_tokens, make_singleton_groups
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images, Logits, PatchMembership, TokenSizes, TokenWeights


class Recording(NamedTuple):
    logits: Logits
    maps: list[Tensor]  # one per attention call
    hidden_states: list[Tensor]  # before block 1 and after every block; empty if the model has no list of blocks


class AttentionRecorder(TorchFunctionMode):
    """Record attention: while active, in this thread, `maps` receives one tensor per attention call, in order.

    `edit_maps(call_index, maps)` may return other maps, which the model then uses instead.
    """

    def __init__(self, edit_maps: MapEditor | None = None) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.edit_maps = edit_maps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend_and_record_edited_maps(*args, **(kwargs or {}))

    def _attend_and_record_edited_maps(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p:
            raise UserError("Attention maps cannot be recorded with dropout. Call model.eval() first.")
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        mask = attn_mask
        if is_causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        factor = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
        maps = compute_attention_maps(query * factor if factor != 1.0 else query, key, mask)
        with torch.no_grad():
            fused = F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
            check_maps_reproduce_output(maps @ value, fused, len(self.maps))
        if self.edit_maps:
            maps = self.edit_maps(len(self.maps), maps)
        self.maps.append(maps)
        return maps @ value


def record_attention(model: nn.Module, images: Images, edit_maps: MapEditor | None = None) -> Recording:
    """Return the logits, all attention maps and all hidden states of one forward pass, with gradients."""
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    clone = clone_with_fused_attention(model)
    hidden_states = _record_hidden_states_by_hooks(clone)
    recorder = AttentionRecorder(edit_maps)
    with recorder:
        logits = compute_logits_with_all_tokens(clone, images)
    if not recorder.maps:
        raise UserError(
            f"{type(model).__name__} does not call torch's scaled_dot_product_attention, so its attention maps cannot "
            "be recorded. Models of Vitascope, timm and transformers are supported."
        )
    return Recording(logits, recorder.maps, hidden_states)


def compute_logits(model: nn.Module, images: Images) -> Logits:
    """Return the model's logits; models of transformers wrap them in an object."""
    output = model(images)
    return getattr(output, "logits", output)


def compute_logits_with_all_tokens(model: nn.Module, images: Images) -> Logits:
    """Compute all tokens in every block; our forward pass skips unread tokens in the last block."""
    if isinstance(model, VisionTransformer):
        return model.forward_head(model.forward_features(images))
    return compute_logits(model, images)


def clone_with_fused_attention(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares all tensors, and whose attention layers call PyTorch's fused function.

    timm and transformers can otherwise compute attention themselves, and our models can use other kernels."""
    clones: dict[int, Any] = {}
    clone = _clone_module_sharing_tensors(model, clones)
    for module in clone.modules():
        if isinstance(getattr(module, "fused_attn", None), bool):
            module.fused_attn = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        if isinstance(getattr(module, "kernel", None), str):
            module.kernel = "default"  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        config: Any = module.__dict__.get("config")
        if isinstance(getattr(config, "_attn_implementation", None), str):
            if id(config) not in clones:
                clones[id(config)] = copy.copy(config)
                clones[id(config)]._attn_implementation = "sdpa"
            module.__dict__["config"] = clones[id(config)]
    return clone


def _clone_module_sharing_tensors(module: nn.Module, clones: dict[int, Any]) -> nn.Module:
    """Copy the module and its children, not their tensors. A module that occurs twice is copied once."""
    if id(module) not in clones:
        clone = clones[id(module)] = object.__new__(type(module))
        clone.__dict__.update(module.__dict__)
        for name, value in module.__dict__.items():
            if isinstance(value, dict):  # hooks, parameters, buffers: the containers are copied, not their contents
                clone.__dict__[name] = value.copy()
        for name, child in module._modules.items():
            clone._modules[name] = None if child is None else _clone_module_sharing_tensors(child, clones)
    return clones[id(module)]


def _record_hidden_states_by_hooks(model: nn.Module) -> list[Tensor]:
    """Return a list that receives the input of the first block and the output of each block when the model runs."""
    states: list[Tensor] = []
    blocks = find_longest_uniform_module_list(model)

    def record_input(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        states.append(inputs[0])

    def record_output(_: nn.Module, __: object, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    for block in blocks:
        block.register_forward_hook(record_output)
    if blocks:
        blocks[0].register_forward_pre_hook(record_input)
    return states


def find_longest_uniform_module_list(model: nn.Module) -> list[nn.Module]:
    """Return the blocks: the longest list of modules of one type; empty if there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)]
    uniform_lists = [modules for modules in lists if len({type(module) for module in modules}) == 1]
    return list(max(uniform_lists, key=len, default=[]))


class Replay(NamedTuple):
    """One forward pass. With merged or dropped tokens, the number of tokens differs between blocks."""

    logits: Logits
    maps: list[Tensor]  # AttentionMaps of each block, over the tokens before the block
    hidden_states: list[Tensor]  # Tokens before block 1 and after every block; empty if the model has no list of blocks
    memberships: list[PatchMembership] | None = None  # of each hidden state; None: no tokens are merged or dropped
    pool_weights: TokenWeights | None = None  # weights of the last hidden state's tokens in the features; None: unknown

    @property
    def token_sizes(self) -> list[TokenSizes] | None:
        """The number of patches in each token of each hidden state; None: one."""
        return None if self.memberships is None else [membership.sum(-1) for membership in self.memberships]

    def expand_maps_to_all_tokens(self) -> list[Tensor]:
        """Return the maps between the original tokens: merged patches share a token's attention equally.

        Rows sum to 1; rows and columns of dropped patches are zero."""
        if self.memberships is None:
            return self.maps
        return [expand_maps_to_all_tokens(*pair) for pair in zip(self.maps, self.memberships, strict=False)]

    def expand_hidden_states_to_all_tokens(self) -> list[Tensor]:
        """Return one token per original token: merged patches have equal ones, dropped patches keep their last."""
        if self.memberships is None:
            return self.hidden_states
        states = self.hidden_states[:1]
        for tokens, membership in zip(self.hidden_states[1:], self.memberships[1:], strict=True):
            states.append(expand_tokens_to_all_tokens(tokens, membership, states[-1]))
        return states

    def expand_pool_weights_to_all_tokens(self) -> TokenWeights | None:
        """Return the weight of each original token: merged patches share a token's weight equally."""
        if self.memberships is None or self.pool_weights is None:
            return self.pool_weights
        shares = self.memberships[-1] / self.memberships[-1].sum(-1, keepdim=True)
        return (self.pool_weights[:, None] @ shares)[:, 0]


def replay_forward_pass(model: nn.Module, images: Tensor, *, edit_maps: MapEditor | None = None) -> Replay:
    """Run the model in evaluation mode and return its logits, attention maps and hidden states, with gradients.

    Works with models of Vitascope, timm and transformers. The model uses the maps that `edit_maps(block_index, maps)`
    returns instead of its own."""
    if isinstance(model, VisionTransformer):
        return _replay_vision_transformer(model, images, edit_maps)
    return Replay(*record_attention(model, images, edit_maps))


def _replay_vision_transformer(model: VisionTransformer, images: Tensor, edit_maps: MapEditor | None) -> Replay:
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    check_image_shape_and_dtype(images, model.config, next(model.patch_embed.parameters()).dtype)
    groups = make_singleton_groups(model.embed(images), track_membership=bool(model.config.token_reduction))
    results = apply_and_record_blocks(model, groups, ExplicitAttention(edit_maps))
    all_groups = [groups, *(result.groups for result in results)]
    memberships = [group.patch_membership for group in all_groups if group.patch_membership is not None]
    pool: Any = model.pool
    tokens = model.norm(all_groups[-1].tokens)
    token_sizes = all_groups[-1].sizes if memberships else None
    return Replay(
        model.forward_head(tokens, token_sizes=token_sizes),
        [result.maps for result in results if result.maps is not None],
        [group.tokens for group in all_groups],
        memberships or None,
        pool.compute_weights(tokens, token_sizes),
    )


def make_logits_function_with_fixed_token_groups(model: nn.Module, images: Images) -> Callable[[Images], Logits]:
    """Return the model as a function, in which the same tokens are merged or dropped as for these images.

    Without it, the logits jump wherever a change of the image changes which tokens are merged."""
    if not isinstance(model, VisionTransformer) or not model.config.token_reduction:
        return partial(compute_logits, model)
    with torch.no_grad():
        results = apply_and_record_blocks(model, make_singleton_groups(model.embed(images)), None)
    keys_or_maps_per_block = [result.keys_or_maps for result in results]

    def compute_frozen_logits(other_images: Images) -> Logits:
        groups = make_singleton_groups(model.embed(other_images))
        groups = apply_blocks_to_groups(model, groups, keys_or_maps_per_block=keys_or_maps_per_block)
        return model.forward_head(model.norm(groups.tokens), token_sizes=groups.sizes)

    return compute_frozen_logits
