"""Convert GSM8K to conversations in the TRL/OpenAI format: `python gsm8k_messages.py FOLDER`.

The files are read from $GATESPACE_TEXT/gsm8k.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SYSTEM = "Solve the problem step by step, and end with #### and the number."


def main(output: str) -> None:
    source, folder = Path(os.environ["GATESPACE_TEXT"]) / "gsm8k", Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        with (source / f"{split}.jsonl").open(encoding="utf-8") as rows, (folder / f"{split}.jsonl").open("w") as out:
            for row in map(json.loads, rows):
                turns = [("system", SYSTEM), ("user", row["question"]), ("assistant", row["answer"])]
                messages = [{"role": role, "content": content} for role, content in turns]
                out.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
