/** Fields and buttons that pages have in common. */

import type { ComponentChildren } from "preact";
import { useEffect, useId, useState } from "preact/hooks";
import { copyText } from "./copy.ts";

export function Choice<T extends string>(props: {
  label: string;
  value: T;
  options: readonly { value: T; text: string; disabled?: boolean }[];
  change: (value: T) => void;
}) {
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      <select id={id} value={props.value} onChange={(event) => props.change(event.currentTarget.value as T)}>
        {props.options.map((option) => (
          <option key={option.value} value={option.value} disabled={option.disabled ?? false} selected={option.value === props.value}>
            {option.text}
          </option>
        ))}
      </select>
    </div>
  );
}

/** A number by slider and by keyboard. The slider reaches as far as the number goes. */
export function NumberSlider(props: {
  label: string;
  about: string;
  value: number;
  reach: number;
  step: number;
  allowInfinite?: boolean;
  change: (value: number) => void;
}) {
  const { value } = props;
  const [typed, setTyped] = useState<string | null>(null);
  const reach = Number.isFinite(value) ? Math.max(props.reach, Math.ceil(Math.abs(value))) : props.reach;
  const read = (text: string): number | null => {
    const plain = text.trim().replace("−", "-").replace(",", ".");
    if (props.allowInfinite && /^[-+]?(inf|∞)$/i.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
    const number = plain === "" ? NaN : Number(plain);
    return Number.isFinite(number) && Math.abs(number) <= 1e6 ? number : null;
  };
  const wrong = typed !== null && read(typed) === null;
  const shown = Number.isFinite(value) ? String(value) : value > 0 ? "inf" : "-inf";
  return (
    <div class="slider">
      <label>
        <b>{props.label}</b> <small>{props.about}</small>
        <input
          type="range"
          min={-reach}
          max={reach}
          step={props.step}
          value={Number.isFinite(value) ? value : Math.sign(value) * reach}
          aria-label={`${props.label}, ${props.about}`}
          onInput={(event) => props.change(Number(event.currentTarget.value))}
        />
      </label>
      <input
        class="number"
        type="text"
        inputMode="decimal"
        autocomplete="off"
        aria-label={`${props.label}, as a number`}
        aria-invalid={wrong}
        value={typed ?? shown}
        onInput={(event) => {
          const text = event.currentTarget.value;
          setTyped(text);
          const number = read(text);
          if (number !== null) props.change(number);
        }}
        onBlur={() => setTyped(null)}
      />
    </div>
  );
}

/** A button that copies a text and says so. */
export function CopyButton(props: { text: () => string; children: ComponentChildren }) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (!said) return;
    const timer = setTimeout(() => setSaid(""), 1800);
    return () => clearTimeout(timer);
  }, [said]);
  return (
    <span class="copy">
      <button type="button" onClick={async () => setSaid((await copyText(props.text())) ? "copied" : "not copied")}>
        {props.children}
      </button>
      <span role="status">{said}</span>
    </span>
  );
}
