// Write the sentences that depend on the selection.

export const formatFraction = (value) => value.toFixed(3).replace(/^-(0\.0*)$/, "$1");

// Rows and columns are counted from 1, as blocks and heads are.
export function formatPatch(layout, patch) {
  return `row ${Math.floor(patch / layout.columns) + 1}, column ${(patch % layout.columns) + 1}`;
}

// The query: one patch or the class token; null if the maps are averaged over all query patches.
function describeQuery(layout, query) {
  if (query !== null) return `the patch in ${formatPatch(layout, query)}`;
  return layout.reads_class ? 'the class token' : null;
}

export function describeSelection(layout, state, values) {
  const weighting = layout.has_pool_weights ? ' with the weights of the sequence pooling' : '';
  const patches = Array.from(values.subarray(layout.prefix));
  const order = patches.map((_, patch) => patch).sort((a, b) => patches[b] - patches[a]);
  const largest = order.slice(0, 3).map((patch) => `${formatFraction(patches[patch])} (${formatPatch(layout, patch)})`);
  const prefixText = layout.prefix ? ` On the ${layout.prefix_name}: ${formatFraction(values.subarray(0, layout.prefix).reduce((a, b) => a + b, 0))}.` : '';
  const query = describeQuery(layout, state.query);
  const head = state.head === 'mean' ? 'mean over heads' : `head ${state.head + 1}`;
  if (state.map === 'relevance') {
    const finding = query ? `Largest contributions to ${query}` : `Largest contributions, averaged over all patches${weighting}`;
    return `Relevance for the prediction, through all blocks. ${finding}: ${largest.join('; ')}.${prefixText}`;
  }
  const source = state.map === 'rollout' ? `Rollout up to block ${state.block + 1}` : `Block ${state.block + 1}, ${head}`;
  const uniform = formatFraction(1 / values.length);
  const finding = query ? `Largest attention from ${query}` : `Largest attention that patches receive, averaged over all query patches${weighting}`;
  return `${source}. ${finding}: ${largest.join('; ')}.${prefixText} Uniform attention would be ${uniform}.`;
}
