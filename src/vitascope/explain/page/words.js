// Sentences that depend on the selection.

export const percent = (value) => `${(100 * value).toFixed(1)} %`;

export function place(layout, patch) {
  return `row ${Math.floor(patch / layout.columns)}, column ${patch % layout.columns}`;
}

export function asker(layout, query) {
  if (query !== null) return `the patch in ${place(layout, query)}`;
  return layout.reads_class ? 'the class token' : 'all patches (mean)';
}

export function sentence(layout, state, values) {
  const patches = Array.from(values.subarray(layout.prefix));
  const order = patches.map((_, patch) => patch).sort((a, b) => patches[b] - patches[a]);
  const most = order.slice(0, 3).map((patch) => `${percent(patches[patch])} (${place(layout, patch)})`);
  const elsewhere = layout.prefix ? ` ${percent(values.subarray(0, layout.prefix).reduce((a, b) => a + b, 0))} is on class and register tokens.` : '';
  const head = state.head === 'mean' ? 'mean over heads' : `head ${state.head + 1}`;
  if (state.map === 'relevance')
    return `Relevance for the prediction, through all blocks. Largest contributions to ${asker(layout, state.query)}: ${most.join('; ')}.${elsewhere}`;
  const where = state.map === 'rollout' ? `Rollout up to block ${state.block + 1}` : `Block ${state.block + 1}, ${head}`;
  const even = percent(1 / values.length);
  return `${where}. Largest attention of ${asker(layout, state.query)}: ${most.join('; ')}.${elsewhere} Uniform attention would be ${even}.`;
}
