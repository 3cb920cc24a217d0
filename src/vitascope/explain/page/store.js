// The one state of the page: what is chosen, and who wants to know.

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
