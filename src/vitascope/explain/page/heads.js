// Small maps of every block and head for the selected query, one scale per block; click one to enlarge it.

import { attention } from './maps.js';
import { paint, topOf } from './colour.js';
import { fraction } from './words.js';

export function makeHeads(root, layout, store, depth, heads) {
  const tiles = [];
  root.style.setProperty('--heads', heads);
  const word = (text, parent = root) => {
    const span = parent.appendChild(document.createElement('span'));
    span.textContent = text;
    return span;
  };
  word('block ↓ head →');
  for (let head = 0; head < heads; head++) word(`${head + 1}`).title = `head ${head + 1}`;
  word('');
  const tops = [];
  for (let block = 0; block < depth; block++) {
    word(`${block + 1}`).title = `block ${block + 1}`;
    for (let head = 0; head < heads; head++) {
      const tile = root.appendChild(document.createElement('button'));
      tile.type = 'button';
      tile.setAttribute('aria-label', `block ${block + 1}, head ${head + 1}`);
      tile.title = `block ${block + 1}, head ${head + 1}`;
      tiles.push({ block, head, tile, canvas: tile.appendChild(document.createElement('canvas')) });
      tile.addEventListener('click', () => store.set({ block, head, map: 'attention' }));
    }
    tops.push(word(''));
  }
  store.watch((state) => {
    const rows = tiles.map(({ block, head }) => attention(state.example, layout, block, head, state.query));
    const patches = rows.map((values) => values.subarray(layout.prefix));
    const top = tops.map((_, block) => topOf(patches.slice(block * heads, (block + 1) * heads).flatMap((values) => [...values]), rows[0].length));
    tops.forEach((span, block) => (span.textContent = fraction(top[block])));
    tiles.forEach(({ block, head, tile, canvas }, number) => {
      paint(canvas, patches[number], layout.columns, state.example.table, top[block]);
      const chosen = block === state.block && (head === state.head || state.head === 'mean');
      tile.setAttribute('aria-pressed', String(chosen && state.map === 'attention'));
    });
  });
}
