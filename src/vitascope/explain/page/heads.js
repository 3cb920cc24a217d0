// Small maps of every block and head for the selected query, one scale per block; click one to enlarge it.

import { attentionMap } from './maps.js';
import { paintMap, scaleEnd } from './colour.js';
import { formatFraction } from './text.js';

export function makeHeads(root, layout, store, depth, heads) {
  const tiles = [];
  root.style.setProperty('--heads', heads);
  const addLabel = (text, parent = root) => {
    const span = parent.appendChild(document.createElement('span'));
    span.textContent = text;
    return span;
  };
  addLabel('block ↓ head →');
  for (let head = 0; head < heads; head++) addLabel(`${head + 1}`).title = `head ${head + 1}`;
  addLabel('');
  const scaleLabels = [];
  for (let block = 0; block < depth; block++) {
    addLabel(`${block + 1}`).title = `block ${block + 1}`;
    for (let head = 0; head < heads; head++) {
      const tile = root.appendChild(document.createElement('button'));
      tile.type = 'button';
      tile.setAttribute('aria-label', `block ${block + 1}, head ${head + 1}`);
      tile.title = `block ${block + 1}, head ${head + 1}`;
      tiles.push({ block, head, tile, canvas: tile.appendChild(document.createElement('canvas')) });
      tile.addEventListener('click', () => store.set({ block, head, map: 'attention' }));
    }
    scaleLabels.push(addLabel(''));
  }
  store.subscribe((state) => {
    const rows = tiles.map(({ block, head }) => attentionMap(state.example, layout, block, head, state.query));
    const patches = rows.map((values) => values.subarray(layout.prefix));
    const scaleEnds = scaleLabels.map((_, block) => scaleEnd(patches.slice(block * heads, (block + 1) * heads).flatMap((values) => [...values]), rows[0].length));
    scaleLabels.forEach((span, block) => (span.textContent = formatFraction(scaleEnds[block])));
    tiles.forEach(({ block, head, tile, canvas }, index) => {
      paintMap(canvas, patches[index], layout.columns, state.example.table, scaleEnds[block]);
      const selected = block === state.block && (head === state.head || state.head === 'mean');
      tile.setAttribute('aria-pressed', String(selected && state.map === 'attention'));
    });
  });
}
