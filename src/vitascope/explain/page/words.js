// Sentences that depend on the selection.

export const fraction = (value) => value.toFixed(3);

// Rows and columns are counted from 1, as blocks and heads are.
export function place(layout, patch) {
  return `row ${Math.floor(patch / layout.columns) + 1}, column ${(patch % layout.columns) + 1}`;
}

// The query: one patch or the class token; null if the maps are averaged over all query patches.
function asker(layout, query) {
  if (query !== null) return `the patch in ${place(layout, query)}`;
  return layout.reads_class ? 'the class token' : null;
}

export function sentence(layout, state, values) {
  const patches = Array.from(values.subarray(layout.prefix));
  const order = patches.map((_, patch) => patch).sort((a, b) => patches[b] - patches[a]);
  const most = order.slice(0, 3).map((patch) => `${fraction(patches[patch])} (${place(layout, patch)})`);
  const elsewhere = layout.prefix ? ` On the ${layout.prefix_name}: ${fraction(values.subarray(0, layout.prefix).reduce((a, b) => a + b, 0))}.` : '';
  const who = asker(layout, state.query);
  const head = state.head === 'mean' ? 'mean over heads' : `head ${state.head + 1}`;
  if (state.map === 'relevance') {
    const what = who ? `Largest contributions to ${who}` : 'Largest contributions, averaged over all patches';
    return `Relevance for the prediction, through all blocks. ${what}: ${most.join('; ')}.${elsewhere}`;
  }
  const where = state.map === 'rollout' ? `Rollout up to block ${state.block + 1}` : `Block ${state.block + 1}, ${head}`;
  const even = fraction(1 / values.length);
  const what = who ? `Largest attention from ${who}` : 'Largest attention that patches receive, averaged over all query patches';
  return `${where}. ${what}: ${most.join('; ')}.${elsewhere} Uniform attention would be ${even}.`;
}
