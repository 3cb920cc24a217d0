// The state of the page: the selection, and its listeners.

export function makeStore(state) {
  const listeners = [];
  return {
    get: () => state,
    set(change) {
      state = { ...state, ...change };
      for (const listener of listeners) listener(state);
    },
    watch(listener) {
      listeners.push(listener);
      listener(state);
    },
  };
}
