// Hold the state of the page (the selection) and call the listeners when it changes.

export function makeStore(state) {
  const listeners = [];
  return {
    get: () => state,
    set(change) {
      state = { ...state, ...change };
      for (const listener of listeners) listener(state);
    },
    subscribe(listener) {
      listeners.push(listener);
      listener(state);
    },
  };
}
