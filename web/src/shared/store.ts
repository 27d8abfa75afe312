/** A value that views follow. Changes within one frame are told once, when the next frame is drawn. */
export class Store<T extends object> {
  private listeners = new Set<() => void>();
  private asked = false;

  constructor(private value: T) {}

  get(): T {
    return this.value;
  }

  set(change: Partial<T>): void {
    this.value = { ...this.value, ...change };
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      for (const listener of this.listeners) listener();
    });
  }

  /** Follow the value; the returned function ends it. */
  follow(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }
}
