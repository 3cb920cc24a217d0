"""The vision transformer, part by part.

Read in this order: `config` (settings), `vit` (the complete model), `patches`, `tokens`, `block`, `attention`, `mlp`,
`head`. Other modules: `scaled_dot_product` (attention as a function, masks), `positions`, `initialize`,
`explicit_blocks` (the blocks step by step), `token_merging`, `replay` (a forward pass with all maps and hidden states),
`anatomy` (shapes and costs, computed without running the model).
"""
