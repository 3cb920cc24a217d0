// Entry point of the report page: opens the stored examples and sets up the controls.

import { openArrays } from './arrays.js';
import { makeHeads } from './heads.js';
import { attention, relevance, rollout } from './maps.js';
import { makeStage } from './stage.js';
import { makeStore } from './store.js';

const manifest = JSON.parse(document.getElementById('manifest').textContent);
const texts = [...document.querySelectorAll('script.example')].map((block) => block.textContent);
const opened = new Map();

async function open(number) {
  if (!opened.has(number)) {
    const arrays = await openArrays(texts[number]);
    opened.set(number, { ...arrays, table: manifest.table });
  }
  return opened.get(number);
}

function look(state) {
  if (state.map === 'rollout') return rollout(state.example, manifest.layout, state.block, state.query);
  if (state.map === 'relevance') return relevance(state.example, manifest.layout, state.query);
  return attention(state.example, manifest.layout, state.block, state.head, state.query);
}

function choices(select, words) {
  for (const [value, text] of words) select.add(new Option(text, value));
}

async function start() {
  const root = document.getElementById('look');
  const [examples, block, head, map] = ['example', 'block', 'head', 'map'].map((name) => root.querySelector(`[name=${name}]`));
  choices(examples, manifest.examples.map((text, number) => [number, text]));
  const example = await open(0);
  const [depth, heads] = example.maps.shape;
  choices(block, Array.from({ length: depth }, (_, number) => [number, `block ${number + 1}`]));
  choices(head, [['mean', 'mean over heads'], ...Array.from({ length: heads }, (_, number) => [number, `head ${number + 1}`])]);
  const store = makeStore({
    example, number: 0, block: depth - 1, head: 'mean', map: 'attention', query: null, pinned: false,
  });
  examples.addEventListener('change', async () => store.set({ number: Number(examples.value), example: await open(Number(examples.value)) }));
  block.addEventListener('change', () => store.set({ block: Number(block.value) }));
  head.addEventListener('change', () => store.set({ head: head.value === 'mean' ? 'mean' : Number(head.value) }));
  map.addEventListener('change', () => store.set({ map: map.value }));
  store.watch((state) => {
    examples.value = state.number;
    block.value = state.block;
    head.value = state.head;
    map.value = state.map;
    head.disabled = state.map !== 'attention';
    block.disabled = state.map === 'relevance';
  });
  makeStage(root, manifest.layout, store, look);
  makeHeads(root.querySelector('.heads'), manifest.layout, store, depth, heads);
  root.dataset.ready = 'yes';
}

start();
