"""The vision transformer, part by part.

Read in this order: `config` (settings), `vit` (the complete model), `patches`, `tokens`, `block`, `attention`, `mlp`,
`head`. Other modules: `scaled_dot_product` (attention as a function, masks), `positions`, `initialize`,
`token_merging`, `anatomy` (shapes and costs, computed without running the model).
"""
