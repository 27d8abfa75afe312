"""On-policy distillation in a plain PyTorch loop: sample, score, gated loss, optimizer step.

`python examples/plain_loop.py` builds a tiny pair; with `STUDENT TEACHER` it uses two models, by folder or name.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gatespace import Gate, gated_kl
from gatespace.config import TeachConfig, load_config
from gatespace.models import build_tiny
from gatespace.tasks import Prompt, synthetic_task
from gatespace.training.train import teach


def respond(student, prompts, length, vocab):
    """Sample responses: (B, P+T) ids, (B, P+T) attention mask, (B, T) response mask."""
    unreal = list(range(vocab, student.config.vocab_size)) or None  # padding rows of the head
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "suppress_tokens": unreal}
    ids = student.generate(**prompts, **sampling, max_new_tokens=length)
    ends = torch.isin(ids[:, prompts["input_ids"].shape[1] :], torch.tensor(student.generation_config.eos_token_id))
    mask = ends.cumsum(1) - ends.long() == 0  # up to and including the end token
    return ids, torch.cat([prompts["attention_mask"], mask.long()], 1), mask


def response_logits(model, ids, attention, length):
    """(B, T, V) logits that predict each response token."""
    places = (attention.cumsum(1) - 1).clamp(min=0)  # left padding takes no positions
    return model(ids, attention_mask=attention, position_ids=places, logits_to_keep=length + 1).logits[:, :-1]


def main(student="", teacher="", steps=40):
    if not student:
        made = "task.name=synthetic task.brief=true model=tiny steps=60 optimizer.lr=3e-3 output=runs/loop-teacher"
        teach(load_config(TeachConfig, overrides=[*made.split(), "evaluation.every=0", "evaluation.final=[]"]))
        student, teacher = build_tiny(synthetic_task()).student, "runs/loop-teacher/model"
    gate, task = Gate.named("G5"), synthetic_task(seed=1)  # texts the teacher was not trained on
    prompt, tokenizer = Prompt.of(task, brief=True), AutoTokenizer.from_pretrained(student, padding_side="left")
    student, teacher = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (student, teacher))
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=0.0)
    torch.manual_seed(0)
    for step in range(steps):
        rows = [prompt.render(tokenizer, row.text) for row in task.train[24 * step : 24 * (step + 1)]]
        prompts = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        ids, attention, mask = respond(student, prompts, 8, len(tokenizer))
        with torch.no_grad():
            wanted = response_logits(teacher, ids, attention, mask.shape[1])
        found = response_logits(student, ids, attention, mask.shape[1])
        out = gated_kl(found, wanted, gate=gate, mask=mask, vocab_size=len(tokenizer))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1:3}  loss {out.loss:.4f}  E[λ] {out.lam.sum() / out.tokens:.3f}  {out.tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
