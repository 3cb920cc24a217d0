// Compute one query's map from the stored maps: attention of a head, the mean over heads, rollout, or relevance.

// Indices of the query tokens: one patch, or what the classifier reads (the class token, or all patches).
function queryTokens(layout, query) {
  if (query !== null) return [layout.prefix + query];
  if (layout.reads_class) return [0];
  return Array.from({ length: layout.rows * layout.columns }, (_, patch) => layout.prefix + patch);
}

// One row of attention over all tokens, normalised to sum to 1.
function attentionRow(example, block, head, token) {
  const [, heads, tokens] = example.maps.shape;
  return dequantiseRow(example.maps, example.maps_scale, (block * heads + head) * tokens + token);
}

// Stored bytes times the row's scale, divided by their sum.
function dequantiseRow(stored, scales, rowIndex) {
  const length = stored.shape[stored.shape.length - 1];
  const values = Float64Array.from(stored.data.subarray(rowIndex * length, (rowIndex + 1) * length), (byte) => byte * scales.data[rowIndex]);
  const sum = values.reduce((total, value) => total + value, 0) || 1;
  return values.map((value) => value / sum);
}

// Relevance for the prediction, through all blocks (Chefer et al. 2021), as fractions of the total.
export function relevanceMap(example, layout, query) {
  const queries = queryTokens(layout, query);
  const total = new Float64Array(example.relevance.shape[1]);
  for (const token of queries)
    dequantiseRow(example.relevance, example.relevance_scale, token).forEach((value, key) => (total[key] += value / queries.length));
  return total;
}

// Attention of a head ('mean': of all heads), averaged over the query tokens.
export function attentionMap(example, layout, block, head, query) {
  const heads = head === 'mean' ? [...Array(example.maps.shape[1]).keys()] : [head];
  const queries = queryTokens(layout, query);
  const total = new Float64Array(example.maps.shape[2]);
  for (const headIndex of heads)
    for (const token of queries) attentionRow(example, block, headIndex, token).forEach((value, key) => (total[key] += value));
  return total.map((value) => value / (heads.length * queries.length));
}

// Attention rollout up to this block: the residual connection keeps half of each token.
export function rolloutMap(example, layout, block, query) {
  const numTokens = example.maps.shape[2];
  let weights = new Float64Array(numTokens);
  const queries = queryTokens(layout, query);
  for (const token of queries) weights[token] = 1 / queries.length;
  for (let step = block; step >= 0; step--) {
    const next = weights.map((value) => value / 2);
    for (let token = 0; token < numTokens; token++) {
      if (!weights[token]) continue;
      for (let head = 0; head < example.maps.shape[1]; head++) {
        const headWeight = weights[token] / (2 * example.maps.shape[1]);
        attentionRow(example, step, head, token).forEach((value, key) => (next[key] += headWeight * value));
      }
    }
    weights = next;
  }
  return weights;
}
