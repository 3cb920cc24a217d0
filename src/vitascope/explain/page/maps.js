// Compute one query's map from the stored maps: attention of a head, the mean over heads, rollout, or relevance.

// Indices of the query tokens: one patch, or what the classifier reads (the class token, or all patches).
export function askers(layout, query) {
  if (query !== null) return [layout.prefix + query];
  if (layout.reads_class) return [0];
  return Array.from({ length: layout.rows * layout.columns }, (_, patch) => layout.prefix + patch);
}

// One row of attention over all tokens, normalised to sum to 1.
export function row(example, block, head, token) {
  const [, heads, tokens] = example.maps.shape;
  return unpacked(example.maps, example.maps_scale, (block * heads + head) * tokens + token);
}

// Stored bytes times the row's scale, divided by their sum.
function unpacked(stored, scales, at) {
  const length = stored.shape[stored.shape.length - 1];
  const values = Float64Array.from(stored.data.subarray(at * length, (at + 1) * length), (byte) => byte * scales.data[at]);
  const sum = values.reduce((total, value) => total + value, 0) || 1;
  return values.map((value) => value / sum);
}

// Relevance for the prediction, through all blocks (Chefer et al. 2021), as fractions of the total.
export function relevance(example, layout, query) {
  const asking = askers(layout, query);
  const total = new Float64Array(example.relevance.shape[1]);
  for (const token of asking)
    unpacked(example.relevance, example.relevance_scale, token).forEach((value, key) => (total[key] += value / asking.length));
  return total;
}

// Attention of a head ('mean': of all heads), averaged over the query tokens.
export function attention(example, layout, block, head, query) {
  const heads = head === 'mean' ? [...Array(example.maps.shape[1]).keys()] : [head];
  const asking = askers(layout, query);
  const total = new Float64Array(example.maps.shape[2]);
  for (const one of heads)
    for (const token of asking) row(example, block, one, token).forEach((value, key) => (total[key] += value));
  return total.map((value) => value / (heads.length * asking.length));
}

// Attention rollout up to this block: the residual connection keeps half of each token.
export function rollout(example, layout, block, query) {
  const tokens = example.maps.shape[2];
  let at = new Float64Array(tokens);
  const asking = askers(layout, query);
  for (const token of asking) at[token] = 1 / asking.length;
  for (let step = block; step >= 0; step--) {
    const next = at.map((value) => value / 2);
    for (let token = 0; token < tokens; token++) {
      if (!at[token]) continue;
      for (let head = 0; head < example.maps.shape[1]; head++) {
        const weight = at[token] / (2 * example.maps.shape[1]);
        row(example, step, head, token).forEach((value, key) => (next[key] += weight * value));
      }
    }
    at = next;
  }
  return at;
}
