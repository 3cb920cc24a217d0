// Every sentence that changes with what is chosen.

export const percent = (value) => `${(100 * value).toFixed(1)} %`;

export function place(layout, patch) {
  return `row ${Math.floor(patch / layout.columns)}, column ${patch % layout.columns}`;
}

export function asker(layout, query) {
  if (query !== null) return `the patch in ${place(layout, query)}`;
  return layout.reads_class ? 'the class token' : 'the mean of all patches';
}

export function sentence(layout, state, values) {
  const patches = Array.from(values.subarray(layout.prefix));
  const order = patches.map((_, patch) => patch).sort((a, b) => patches[b] - patches[a]);
  const most = order.slice(0, 3).map((patch) => `${percent(patches[patch])} from ${place(layout, patch)}`);
  const elsewhere = layout.prefix ? ` ${percent(values.subarray(0, layout.prefix).reduce((a, b) => a + b, 0))} goes to tokens without a place.` : '';
  const head = state.head === 'mean' ? 'mean of the heads' : `head ${state.head + 1}`;
  if (state.map === 'relevance')
    return `Relevance for the answer, through all blocks: of what reaches ${asker(layout, state.query)}, ${most.join(', ')}.${elsewhere}`;
  const where = state.map === 'rollout' ? `Rollout up to block ${state.block + 1}` : `Block ${state.block + 1}, ${head}`;
  const even = percent(1 / values.length);
  return `${where}: ${asker(layout, state.query)} takes ${most.join(', ')}.${elsewhere} Even attention would be ${even}.`;
}
