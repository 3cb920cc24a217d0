// Every block and head at once, for the query that is chosen: small maps on one scale; click one to enlarge it.

import { attention } from './maps.js';
import { paint, topOf } from './colour.js';
import { percent } from './words.js';

export function makeHeads(root, layout, store, depth, heads) {
  const tiles = [];
  root.style.setProperty('--heads', heads);
  for (let block = 0; block < depth; block++) {
    for (let head = 0; head < heads; head++) {
      const tile = root.appendChild(document.createElement('button'));
      tile.type = 'button';
      tile.setAttribute('aria-label', `block ${block + 1}, head ${head + 1}`);
      tile.title = `block ${block + 1}, head ${head + 1}`;
      tiles.push({ block, head, tile, canvas: tile.appendChild(document.createElement('canvas')) });
      tile.addEventListener('click', () => store.set({ block, head, map: 'attention' }));
    }
  }
  store.watch((state) => {
    const rows = tiles.map(({ block, head }) => attention(state.example, layout, block, head, state.query));
    const top = topOf(rows.flatMap((values) => [...values.subarray(layout.prefix)]), rows[0].length);
    root.parentElement.querySelector('.heads-top').textContent = percent(top);
    tiles.forEach(({ block, head, tile, canvas }, number) => {
      paint(canvas, rows[number].subarray(layout.prefix), layout.columns, state.example.table, top);
      const chosen = block === state.block && (head === state.head || state.head === 'mean');
      tile.setAttribute('aria-pressed', String(chosen && state.map === 'attention'));
    });
  });
}
