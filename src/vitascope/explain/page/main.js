// Entry point of the report page: opens the stored examples and sets up the controls.

import { openArrays } from './arrays.js';
import { makeHeads } from './heads.js';
import { attentionMap, relevanceMap, rolloutMap } from './maps.js';
import { makeStage } from './stage.js';
import { makeStore } from './store.js';

const data = JSON.parse(document.getElementById('page-data').textContent);
const openedExamples = new Map();

async function openExample(index) {
  if (!openedExamples.has(index)) {
    const arrays = await openArrays(data.examples[index].arrays);
    openedExamples.set(index, { ...arrays, table: data.colours });
  }
  return openedExamples.get(index);
}

function computeMap(state) {
  if (state.map === 'rollout') return rolloutMap(state.example, data.layout, state.block, state.query);
  if (state.map === 'relevance') return relevanceMap(state.example, data.layout, state.query);
  return attentionMap(state.example, data.layout, state.block, state.head, state.query);
}

function addOptions(select, options) {
  for (const [value, text] of options) select.add(new Option(text, value));
}

async function start() {
  const root = document.getElementById('viewer');
  const [examples, block, head, map] = ['example', 'block', 'head', 'map'].map((name) => root.querySelector(`[name=${name}]`));
  addOptions(examples, data.examples.map(({ caption }, index) => [index, caption]));
  const example = await openExample(0);
  const [depth, heads] = example.maps.shape;
  addOptions(block, Array.from({ length: depth }, (_, index) => [index, `block ${index + 1}`]));
  addOptions(head, [['mean', 'mean over heads'], ...Array.from({ length: heads }, (_, index) => [index, `head ${index + 1}`])]);
  const store = makeStore({
    example, exampleIndex: 0, block: depth - 1, head: 'mean', map: 'attention', query: null, pinned: false,
  });
  examples.addEventListener('change', async () => store.set({ exampleIndex: Number(examples.value), example: await openExample(Number(examples.value)) }));
  block.addEventListener('change', () => store.set({ block: Number(block.value) }));
  head.addEventListener('change', () => store.set({ head: head.value === 'mean' ? 'mean' : Number(head.value) }));
  map.addEventListener('change', () => store.set({ map: map.value }));
  store.subscribe((state) => {
    examples.value = state.exampleIndex;
    block.value = state.block;
    head.value = state.head;
    map.value = state.map;
    head.disabled = state.map !== 'attention';
    block.disabled = state.map === 'relevance';
  });
  makeStage(root, data.layout, store, computeMap);
  makeHeads(root.querySelector('.heads'), data.layout, store, depth, heads);
  root.dataset.ready = 'yes';
}

start();
