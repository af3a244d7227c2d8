// A value that others watch.

/** `cell(0)`: .value, .set(next), .watch(call) -> stop. Watchers are told of changes alone. */
export function cell(value) {
  const watchers = new Set();
  return {
    get value() {
      return value;
    },
    set(next) {
      if (Object.is(next, value)) return;
      value = next;
      for (const call of [...watchers]) call(value);
    },
    watch(call) {
      watchers.add(call);
      return () => watchers.delete(call);
    },
  };
}
