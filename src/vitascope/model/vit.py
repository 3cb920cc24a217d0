"""Images -> Logits: the vision transformer (Dosovitskiy et al. 2021)."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitascope.errors import UserError
from vitascope.model.attention import check_token_shape_and_dtype
from vitascope.model.block import Block, check_depth_noise_shape
from vitascope.model.config import ModelConfig
from vitascope.model.explicit_blocks import apply_reducing_blocks_and_final_norm
from vitascope.model.head import POOLS
from vitascope.model.initialize import INITIALIZERS
from vitascope.model.norm import make_norm
from vitascope.model.patches import TOKENIZERS, check_image_shape_and_dtype
from vitascope.model.positions import make_absolute_position_table_if_any, make_rotary_table
from vitascope.model.precision import to_autocast_dtype
from vitascope.model.tokens import concat_prefix_tokens, prepend_prefix_and_add_positions
from vitascope.shapes import DepthNoise, Features, Images, Logits, OutputTokens, RotaryTable, Tokens, TokenSizes


class VisionTransformer(nn.Module):
    """Split images into patches, embed them, apply `depth` transformer blocks, pool and classify.

    Parameter names and shapes are those of timm, so state dicts can be exchanged in both directions.
    """

    pos_embed: Tensor | None
    rotation: Tensor | None

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        width = config.embed_dim
        self.patch_embed = TOKENIZERS[config.tokenizer](config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, config.reg_tokens, width)) if config.reg_tokens else None
        self._register_parameter_or_buffer("pos_embed", make_absolute_position_table_if_any(config))
        self._register_parameter_or_buffer("rotation", self._make_rotary_table() if config.uses_rotary else None)
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        self.blocks = nn.ModuleList([Block(config, rate) for rate in config.drop_path_rates])
        # Mean pooling normalises after pooling, the others before, as in timm.
        pools_first = config.global_pool == "avg"
        self.norm = nn.Identity() if pools_first else make_norm(config.norm, width, config.norm_eps)
        self.pool = POOLS[config.global_pool](config)
        self.fc_norm = make_norm(config.norm, width, config.norm_eps) if pools_first else nn.Identity()
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = nn.Linear(width, config.num_classes) if config.num_classes else nn.Identity()
        INITIALIZERS[config.initialize](self)

    def forward(self, images: Tensor, depth_noise: Tensor | None = None) -> Logits:
        """Return the logits: forward_head(forward_features(images)), without computing tokens that the head ignores.

        At inference, tokens are merged or dropped as `merge_tokens` and `drop_tokens` set. `depth_noise` selects the
        branches that stochastic depth drops in training: uniform from 0 to 1, image × branch (attention and MLP of each
        block). Without it, PyTorch's global generator decides."""
        return self.head(self.compute_pooled_features(images, depth_noise))

    def compute_pooled_features(self, images: Tensor, depth_noise: Tensor | None = None) -> Features:
        """Return the input of the classifier: one feature vector per image."""
        check_image_shape_and_dtype(images, self.config, next(self.patch_embed.parameters()).dtype)
        num_output_tokens = 1 if self.config.global_pool == "token" else None
        if not self.training and self.config.token_reduction:
            tokens, token_sizes = apply_reducing_blocks_and_final_norm(self, self.embed(images), num_output_tokens)
            return self.forward_head(tokens, pre_logits=True, token_sizes=token_sizes)
        tokens = self.encode(self.embed(images), num_output_tokens=num_output_tokens, depth_noise=depth_noise)
        return self.forward_head(tokens, pre_logits=True)

    def forward_features(self, images: Tensor) -> Tokens:
        """(batch, channel, height, width) -> all tokens of the last block, normalised as the head expects them."""
        check_image_shape_and_dtype(images, self.config, next(self.patch_embed.parameters()).dtype)
        return self.encode(self.embed(images))

    def embed(self, images: Images) -> Tokens:
        """Images -> the first block's tokens: patches projected, prefix in front, positions added."""
        prefix = concat_prefix_tokens(self.cls_token, self.reg_token)
        tokens = self.pos_drop(prepend_prefix_and_add_positions(self.patch_embed(images), prefix, self.pos_embed))
        return to_autocast_dtype(tokens)  # under autocast, tokens between blocks have its dtype

    def encode(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        num_output_tokens: int | None = None,
        rotation: Tensor | None = None,
        depth_noise: Tensor | None = None,
    ) -> OutputTokens:
        """Embeddings -> Tokens: the blocks and the final norm, for any number of tokens (sheet C).

        With `num_output_tokens`, the last block returns only the first `num_output_tokens` tokens. `rotation` replaces
        the model's rotary table, for tokens at other positions. `depth_noise`: as in `forward`."""
        check_token_shape_and_dtype(tokens, self.config.embed_dim)
        table = self.rotation if rotation is None else rotation
        if table is not None and tokens.shape[1] != table.shape[-2]:
            raise UserError(
                f"{tokens.shape[1]} tokens were given, but positions={self.config.positions} needs the "
                f"{table.shape[-2]} tokens of a {self.config.grid[0]}×{self.config.grid[1]} grid."
            )
        if depth_noise is not None:
            check_depth_noise_shape(depth_noise, len(tokens), 2 * len(self.blocks))
        for index, block in enumerate(self.blocks):
            outputs = num_output_tokens if index + 1 == len(self.blocks) else None
            block_noise = None if depth_noise is None else depth_noise[:, 2 * index : 2 * index + 2]
            tokens = self._run_block_with_optional_checkpointing(block, tokens, mask, table, outputs, block_noise)
        return self.norm(tokens)

    def forward_head(
        self, tokens: OutputTokens, pre_logits: bool = False, token_sizes: TokenSizes | None = None
    ) -> Features | Logits:
        """Return logits, or pooled features with `pre_logits`. `token_sizes`: number of patches in each token."""
        features = self.head_drop(self.fc_norm(self.pool(tokens, token_sizes)))
        return features if pre_logits else self.head(features)

    def _run_block_with_optional_checkpointing(
        self,
        block: nn.Module,
        tokens: Tokens,
        mask: Tensor | None,
        rotation: RotaryTable | None,
        num_output_tokens: int | None,
        depth_noise: DepthNoise | None,
    ) -> OutputTokens:
        if self.config.grad_checkpointing and self.training:
            return checkpoint(
                block,
                tokens,
                mask,
                rotation,
                num_output_tokens,
                depth_noise,
                use_reentrant=False,
                preserve_rng_state=self.config.uses_dropout,
            )
        return block(tokens, mask, rotation, num_output_tokens, depth_noise)

    def _make_rotary_table(self) -> Tensor:
        config = self.config
        return make_rotary_table(config.grid, config.head_width, config.rotary_base, config.num_prefix_tokens)

    def _register_parameter_or_buffer(self, name: str, table: Tensor | None) -> None:
        """Register a learned table as a parameter, a fixed one as a buffer that is not saved."""
        if isinstance(table, nn.Parameter):
            self.register_parameter(name, table)
        else:
            self.register_buffer(name, table, persistent=False)
