// Compute one query's map from the stored maps: attention of a head, the mean over heads, rollout, or relevance.

// Weights of the query tokens: one patch, or what the classifier reads (stored with the image).
function queryWeights(example, layout, query) {
  if (query === null) return Float64Array.from(example.query_weights.data);
  const weights = new Float64Array(example.maps.shape[2]);
  weights[layout.prefix + query] = 1;
  return weights;
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
  const total = new Float64Array(example.relevance.shape[1]);
  queryWeights(example, layout, query).forEach((weight, token) => {
    if (weight) dequantiseRow(example.relevance, example.relevance_scale, token).forEach((value, key) => (total[key] += weight * value));
  });
  return total;
}

// Attention of a head ('mean': of all heads), averaged over the query tokens.
export function attentionMap(example, layout, block, head, query) {
  const heads = head === 'mean' ? [...Array(example.maps.shape[1]).keys()] : [head];
  const total = new Float64Array(example.maps.shape[2]);
  queryWeights(example, layout, query).forEach((weight, token) => {
    if (!weight) return;
    for (const headIndex of heads)
      attentionRow(example, block, headIndex, token).forEach((value, key) => (total[key] += (weight * value) / heads.length));
  });
  return total;
}

// Attention rollout up to this block: the residual connection keeps half of each token.
export function rolloutMap(example, layout, block, query) {
  const numTokens = example.maps.shape[2];
  let weights = queryWeights(example, layout, query);
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
