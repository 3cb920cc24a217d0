// The large image with the selected map, and one cell per patch to hover, tap or reach with the arrow keys.

import { paintMap, paintImage, scaleEnd } from './colour.js';
import { describeSelection, formatFraction, formatPatch } from './text.js';

export function makeStage(root, layout, store, computeMap) {
  const image = root.querySelector('.stage-image');
  const overlay = root.querySelector('.stage-map');
  const grid = root.querySelector('.stage-grid');
  const cells = [];
  grid.style.setProperty('--columns', layout.columns);
  for (let row = 0; row < layout.rows; row++) {
    const line = grid.appendChild(document.createElement('div'));
    line.setAttribute('role', 'row');
    for (let column = 0; column < layout.columns; column++) {
      const cell = line.appendChild(document.createElement('button'));
      cell.type = 'button';
      cell.setAttribute('role', 'gridcell');
      cell.tabIndex = cells.length ? -1 : 0;
      cells.push(cell);
      addListeners(cell, cells.length - 1);
    }
  }

  function addListeners(cell, patch) {
    const selectQuery = () => store.get().pinned || store.set({ query: patch });
    cell.addEventListener('pointerenter', selectQuery);
    cell.addEventListener('focus', selectQuery);
    cell.addEventListener('click', () => {
      const unpin = store.get().pinned && store.get().query === patch;
      store.set({ query: patch, pinned: !unpin });
    });
    cell.addEventListener('keydown', (event) => moveFocus(event, patch));
  }

  function moveFocus(event, patch) {
    const row = Math.floor(patch / layout.columns);
    const column = patch % layout.columns;
    const next = {
      ArrowRight: [row, Math.min(column + 1, layout.columns - 1)],
      ArrowLeft: [row, Math.max(column - 1, 0)],
      ArrowDown: [Math.min(row + 1, layout.rows - 1), column],
      ArrowUp: [Math.max(row - 1, 0), column],
      Home: [row, 0],
      End: [row, layout.columns - 1],
    }[event.key];
    if (event.key === 'Escape') store.set({ query: null, pinned: false });
    if (!next) return;
    event.preventDefault();
    const target = cells[next[0] * layout.columns + next[1]];
    for (const cell of cells) cell.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  }

  grid.addEventListener('pointerleave', () => store.get().pinned || store.set({ query: null }));

  store.subscribe((state) => {
    const values = computeMap(state);
    const patches = values.subarray(layout.prefix);
    const end = scaleEnd(patches, values.length);
    paintImage(image, state.example.image);
    paintMap(overlay, patches, layout.columns, state.example.table, end);
    cells.forEach((cell, patch) => {
      cell.setAttribute('aria-label', `${formatPatch(layout, patch)}, ${formatFraction(patches[patch])}`);
      cell.setAttribute('aria-selected', String(patch === state.query));
    });
    paintMap(root.querySelector('.legend canvas'), Array.from({ length: 64 }, (_, step) => step / 63), 64, state.example.table, 1);
    root.querySelector('.legend-top').textContent = formatFraction(end);
    root.querySelector('.sentence').textContent = describeSelection(layout, state, values);
  });
}
