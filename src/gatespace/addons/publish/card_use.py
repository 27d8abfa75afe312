"""How a model is asked, as code that a reader of its card can run without gatespace."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gatespace.config import TaskConfig
from gatespace.tasks import Example, Prompt, Task, synthetic_task
from gatespace.tasks.tweeteval import HUB_NAME as HUB_TWEETEVAL
from gatespace.tasks.tweeteval_labels import KNOWN, Labels

__all__ = ["HUB_TWEETEVAL", "HubData", "code", "hub_data", "inline", "prompt_of", "use"]

_DATASET = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?::([\w.-]+))?")
_EXAMPLE = "they saved our garden, we love the song"


@dataclass(frozen=True)
class HubData:
    """A dataset of the Hub, and the part of it."""

    name: str
    config: str | None = None


def hub_data(task: TaskConfig) -> HubData | None:
    """The Hub's dataset behind a task, where it is known to be one."""
    if task.table is not None:
        source = task.table.source
        found = _DATASET.fullmatch(source) if isinstance(source, str) else None
        is_file = found is None or Path(str(source)).suffix.lower() in (".jsonl", ".csv", ".tsv", ".parquet")
        # A relative folder looks like the name of a dataset, and comes before it.
        if found is None or is_file or Path(str(source)).expanduser().exists():
            return None
        return HubData(found[1], found[2])
    family, _, name = (task.name or "").partition("/")
    return HubData(HUB_TWEETEVAL, name.replace("/", "_")) if family == "tweeteval" and name in KNOWN else None


def prompt_of(task: TaskConfig, labels: Sequence[str]) -> Prompt | None:
    """The prompt of a task without its rows; None where its labels are not known.

    Args:
        task: The section `task`.
        labels: As an evaluation had them, in their order; () where there was none.
    """
    table, (family, _, name) = task.table, (task.name or "").partition("/")
    if table is not None:
        labels, about = table.labels, Labels(table.question, dict(table.definitions))
    elif task.name == "synthetic":
        made = synthetic_task(size=6)
        labels, about = made.labels, Labels(made.question, dict(made.definitions))
    elif family == "tweeteval":
        about = KNOWN.get(name, Labels("", {}))
        labels = tuple(labels) or tuple(about.definitions)
        if set(labels) != set(about.definitions):  # a mapping of somebody's own
            about = Labels("Which label fits the tweet best?", {})
    if not labels:
        return None
    rows = [Example("-", labels[0])]
    found = Task(task.name or "table", tuple(labels), about.definitions, rows, [], [], question=about.question)
    return Prompt.of(found, task.prefill, brief=task.brief)


def use(name: str, prompt: Prompt | None, *, chat_template: str | None, max_new_tokens: int, dtype: str) -> list[str]:
    """The lines that load a model and ask it, with transformers and with vLLM."""
    if prompt is None:
        return [
            "It is a normal model folder: `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` "
            "load it, and so does vLLM. The prompt that it was trained with is that of its run."
        ]
    given = "torch.bfloat16" if dtype == "bf16" else "torch.float32"
    asking = [
        f"ASK = {_literal(prompt.fixed)}",
        f"PREFILL = {prompt.prefill!r}  # how its answer begins" if prompt.prefill else "",
        "",
        "def encode(text):",
        *(f"    {line}" for line in _encoding(prompt, chat_template)),
    ]
    begun = "PREFILL + " if prompt.prefill else ""
    transformers = [
        "import torch",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"name = {json.dumps(name, ensure_ascii=False)}",
        "tokenizer = AutoTokenizer.from_pretrained(name)",
        f"model = AutoModelForCausalLM.from_pretrained(name, dtype={given})",
        *asking,
        "",
        "def answer(text):",
        "    ids = torch.tensor([encode(text)])",
        f"    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens={max_new_tokens}, "
        "do_sample=False)",
        f"    return {begun}tokenizer.decode(whole[0, ids.shape[1]:], skip_special_tokens=True)",
        "",
        f'print(answer("{_EXAMPLE}"))',
    ]
    vllm = [
        "from vllm import LLM, SamplingParams",
        "",
        'if __name__ == "__main__":  # vLLM starts processes of its own, which read this file too',
        f'    llm = LLM(name, dtype="{"bfloat16" if dtype == "bf16" else "float32"}")',
        f"    greedy = SamplingParams(temperature=0, max_tokens={max_new_tokens})",
        f'    (found,) = llm.generate([{{"prompt_token_ids": encode("{_EXAMPLE}")}}], greedy)',
        f"    print({begun}found.outputs[0].text)",
    ]
    return [
        "The prompt is part of the model: it was trained with this one.",
        _fenced("python", transformers),
        "With vLLM, and `name`, `tokenizer`, `ASK` and `encode` from above:",
        _fenced("python", vllm),
    ]


def _encoding(prompt: Prompt, chat_template: str | None) -> list[str]:
    """The body of `encode`, which does what `Prompt.render` does."""
    begun = " + PREFILL" if prompt.prefill else ""
    if chat_template is None:
        closing = 'prompt = (ASK + text.strip() + "\\n\\nAnswer: "' + begun + ').rstrip(" ")'
        return [
            closing,
            "ids = tokenizer.encode(prompt)",
            "return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids",
        ]
    options = ", enable_thinking=False" if "enable_thinking" in chat_template else ""
    return [
        'chat = [{"role": "user", "content": ASK + text.strip()}]',
        f"prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True{options})",
        f"return tokenizer.encode(prompt{begun}, add_special_tokens=False)",
    ]


def _literal(text: str) -> str:
    """A text as Python source, over several lines where that says the same."""
    lines = text.split("\n")
    plain = all(line.isprintable() for line in lines) and "\\" not in text and '"""' not in text
    if len(lines) > 2 and plain and not text.startswith('"') and not text.endswith('"'):
        return f'"""{text}"""'
    return repr(text)


def _fenced(language: str, lines: Sequence[str]) -> str:
    body = "\n".join(lines)
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{body}\n{fence}"


def inline(text: str) -> str:
    """A text of somebody else's that stays within its line or cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """A name as code, whatever is in it."""
    flat = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", flat)), default=0) + 1)
    return f"{fence} {flat} {fence}" if len(fence) > 1 else f"`{flat}`"
