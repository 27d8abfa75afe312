/** Light and dark: what the reader chose, or what the system has. */

import type { Theme } from "./colour.ts";

export type ThemeChoice = "auto" | Theme;
export const THEME_CHOICES: readonly ThemeChoice[] = ["auto", "light", "dark"];

const known = new Map<string, string>();
const system = () => matchMedia("(prefers-color-scheme: dark)");

export function resolveTheme(choice: ThemeChoice): Theme {
  return choice === "auto" ? (system().matches ? "dark" : "light") : choice;
}

/** The style sheet has both looks and takes the one that the root element names. */
export function showTheme(theme: Theme): void {
  if (document.documentElement.dataset.theme === theme) return;
  document.documentElement.dataset.theme = theme;
  known.clear();
}

export function followSystemTheme(changed: () => void): void {
  system().addEventListener("change", changed);
}

/** A colour of the style sheet by its name, for what is drawn. It is asked once: to ask makes the browser restyle. */
export function colourOf(name: string): string {
  let colour = known.get(name);
  if (colour === undefined) {
    colour = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    known.set(name, colour);
  }
  return colour;
}
