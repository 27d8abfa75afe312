"""A task of gatespace as the JSONL files that verl reads: one line per text, with its prompt and its label.

Run it with `python examples/verl/prompts.py --task tweeteval/emotion --output data/emotion`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gatespace.errors import GatespaceError
from gatespace.tasks import Prompt, Task, load_task, synthetic_task


def rows(task: Task, split: str) -> list[dict[str, Any]]:
    """The texts of a split, in the columns that verl's dataset knows."""
    prompt = Prompt.of(task)
    return [
        {
            "data_source": task.name,
            "prompt": prompt.messages(example.text),
            "reward_model": {"style": "rule", "ground_truth": example.label},
            "extra_info": {"index": index, "split": split, "labels": list(task.labels)},
        }
        for index, example in enumerate(getattr(task, split))
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="tweeteval/emotion", help="a task of gatespace, or synthetic")
    parser.add_argument("--root", default=None, help="a folder with TweetEval; else $GATESPACE_TWEETEVAL, then the Hub")
    parser.add_argument("--output", type=Path, required=True, help="the folder for train.jsonl and test.jsonl")
    options = parser.parse_args(arguments)
    try:
        task = synthetic_task() if options.task == "synthetic" else load_task(options.task, root=options.root)
    except GatespaceError as error:
        sys.exit(f"error: {error}")
    options.output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows(task, split)]
        path = options.output / f"{split}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
