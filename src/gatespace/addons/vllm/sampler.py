"""A sampler in a vLLM server, which is given the student's weights after every update.

vLLM is faster at writing than a network that is made for learning; but what it writes is the student's only if it has
the student's weights, all of them. So the weights are written with a head of their own, the server is asked for the
log-probabilities of a text after every sync, and one that does not agree with the student is not sampled from. That
check cannot tell two updates apart that differ by less than the engine rounds, so it is rehearsed once, with weights
that differ everywhere: a part that a server keeps from the old ones shows then.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatespace.addons.vllm.server import Choice, RefusedError, VllmServer, read_position
from gatespace.addons.vllm.untied import save_untied
from gatespace.errors import RunError, UsageError
from gatespace.files import Closing
from gatespace.models.load import Model
from gatespace.models.lora import merged
from gatespace.rollout.native import Rollout, Sampling

_TEXT = 'The price rose by 12.5 %, "really"?!\n\t@user #tag naïve {"label": "x"}'
_PROBE = 32
"""Tokens of the text on which server and student have to agree."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.03}
"""Nats by which the log-probabilities of the text may differ on average, by the less precise side. SmolLM2 differs by
less than 1e-4 in float32 and by .05 in bfloat16 (its single tokens by up to .24)."""
_HOT = 2.0
"""The highest temperature that vLLM takes: drawn tokens have plainly other log-probabilities than the model's own."""
_ALTERED = 0.03
"""By what share of its neighbour a weight is altered in the rehearsal."""
_NEVER = -100.0
"""Added to the logits of ids that are padding; the least that the protocol knows."""
_AT_ONCE = 32
_REPEATS = 4
_SEED = (1 << 63) - 1


class VllmWriter(Closing):
    """Writes with a vLLM server that has a model's weights. Whether it has them is checked on a text.

    Args:
        address: ``vllm://host:port[/model]``.
        model: The model.
        dtype: Precision of the server.
        tolerance: Nats by which log-probabilities may differ from the model's on average; None: by the precision.
        timeout: Seconds after which a question is asked again.
        patience: Seconds without an answer after which `ServerAwayError` is raised.
        wait: As in `VllmServer`.
        report: Is told what a user should know.
    """

    def __init__(
        self,
        address: str,
        model: Model,
        *,
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
        wait: bool = True,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._model, self._dtype = model, dtype
        rough = max(dtype, model.head.weight.dtype, key=lambda dtype: _TOLERANCE.get(dtype, math.inf))
        self._tolerance = _TOLERANCE[rough] if tolerance is None else tolerance
        self._probe: list[int] = model.tokenizer.encode(_TEXT, add_special_tokens=False)[:_PROBE]
        self._seen = 0
        self._processed: bool | None = None
        self._server = VllmServer(
            address, timeout=timeout, patience=patience, wait=wait, report=report, at_once=_AT_ONCE
        )
        try:
            self._name = self._server.card().id
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up what is under way."""
        self._server.close()

    # ------------------------------------------------------------------ weights

    def _prepare(self) -> None:
        """Before anything is written."""
        self.verify()

    def _renew(self) -> None:
        """A server that was away may have come back with other weights."""
        self.verify()

    def verify(self) -> float:
        """By how much the log-probabilities of server and model differ; `RunError` if that is more than rounding."""
        apart = self._verify(self._model, self._tolerance)
        self._seen = self._server.interruptions
        return apart

    def _verify(self, model: Model, tolerance: float) -> float:
        ours, theirs = _log_probs(model, self._probe), torch.tensor(self._told(self._probe))
        apart = float((ours - theirs).abs().mean())
        if not apart <= tolerance:
            raise RunError(
                f"{self._server} does not have the weights of {model.name}",
                got=f"the log-probabilities of a text differ by {apart:.3g} on average, more than {tolerance:g}",
                why=self._reason,
                instead=self._remedy,
            )
        return apart

    _reason = "it has another model, or computes in another precision"
    _remedy = "start it with this model, in the same precision"

    def _told(self, ids: list[int]) -> list[float]:
        """What the server says of every token of a text but the first."""
        body = {"model": self._name, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        (choice,) = self._server.complete([ids], body)
        told = choice.prompt_logprobs or []
        if len(told) != len(ids):
            raise RunError(f"{self._server} has not told of every position", got=f"{len(told)} of {len(ids)}")
        values = [read_position(raw).get(id) for id, raw in zip(ids[1:], told[1:], strict=True)]
        if None in values:
            raise RunError(f"{self._server} does not tell of the tokens themselves")
        return [value for value in values if value is not None]

    # ------------------------------------------------------------------ responses

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        stop: Callable[[list[int]], bool],
        seeds: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> Rollout:
        """Continue every prompt; as `gatespace.rollout.sample` does, but with vLLM's random numbers.

        Args:
            prompts: Whole prompts, with what they share.
            sampling: How tokens are chosen.
            stop: Whether a response, its last token included, is at its end. vLLM writes on to an end token or the
                longest response, and what it wrote after the end is cut off.
            seeds: Per row, of its own named stream; not needed at temperature 0.
            vocab_size: Ids from here on are padding. None: by the model's tokenizer.
        """
        if sampling.temperature > 0 and len(seeds) != len(prompts):
            raise UsageError("sampling needs a seed per row", got=f"{len(seeds)} for {len(prompts)} rows")
        self._check_mode(sampling)
        size = vocab_size or self._model.vocab_size
        body = {
            "model": self._name,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature > 0 else 1.0,
            "logprobs": 1,
            **_PLAIN,
            "ignore_eos": True,  # the server's idea of an end; ours follows
            "stop_token_ids": list(self._model.end_ids),
        }
        if padding := range(size, len(self._model.head.weight)):
            body["logit_bias"] = dict.fromkeys(map(str, padding), _NEVER)
        if sampling.temperature == 0:
            requests = [(list(prompts), body)] if prompts else []
        else:  # a request has one seed
            requests = [([prompt], {**body, "seed": seed & _SEED}) for prompt, seed in zip(prompts, seeds, strict=True)]
        for _ in range(_REPEATS):
            begun = [self._server.later(partial(self._server.complete, rows, body)) for rows, body in requests]
            choices = [choice for part in begun for choice in part.result()]
            if self._server.interruptions == self._seen:
                break
            self._renew()
        else:
            raise RunError(f"{self._server} does not stay long enough to write", got=f"{_REPEATS} interruptions")
        rollout = Rollout()
        for choice in choices:
            ids, log_probs = self._written(choice, sampling, size)
            end = next((i for i in range(1, len(ids) + 1) if stop(ids[:i])), None)
            rollout.responses.append(ids[:end])
            rollout.log_probs.append(log_probs[:end])
            rollout.ended.append(end is not None)
        return rollout

    def _written(self, choice: Choice, sampling: Sampling, vocab_size: int) -> tuple[list[int], list[float]]:
        ids = choice.token_ids or []
        told = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        if not 0 < len(ids) <= sampling.max_new_tokens or len(told) != len(ids):
            raise RunError(
                f"{self._server} has written something else than it was asked for",
                got=f"{len(ids)} tokens and {len(told)} log-probabilities ({choice.finish_reason})",
            )
        values = [math.nan if value is None else value for value in told]
        if not all(math.isfinite(value) and value <= 1e-3 for value in values):
            raise RunError(f"{self._server} has sent what is no log-probability", got=values)
        if max(ids) >= vocab_size or min(ids) < 0:
            raise RunError(f"{self._server} has written an id that is no token", got=max(ids))
        if len(ids) < sampling.max_new_tokens and ids[-1] not in self._model.end_ids:
            raise RunError(f"{self._server} has ended a response early", got=choice.finish_reason)
        return ids, values

    def _check_mode(self, sampling: Sampling) -> None:
        """Log-probabilities have to be those of the distribution that was drawn from, not of the bare model."""
        if sampling.temperature == 0 or (sampling.temperature, sampling.top_p) == (1, 1):
            return
        if self._processed is None:
            body = {"model": self._name, "max_tokens": 1, "temperature": _HOT, "top_p": 1.0, "logprobs": 1, "seed": 1}
            (choice,) = self._server.complete([self._probe], body | _PLAIN)
            (token,), (drawn,) = self._written(choice, Sampling(max_new_tokens=1), 1 << 62)
            own = self._told([*self._probe, token])[-1]
            self._processed = abs(drawn - own) > self._tolerance
        if not self._processed:
            raise UsageError(
                f"{self._server} tells log-probabilities before temperature and top_p",
                got=f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}",
                instead="start it with --logprobs-mode processed_logprobs, or sample at temperature 1 and top_p 1",
            )


class VllmSampler(VllmWriter):
    """Samples a student with a vLLM server that is given its weights.

    The server has to be started with ``VLLM_SERVER_DEV_MODE=1``, best from a folder that `save_untied` wrote, and to
    see `folder` under the same name as this process: on this machine, or on a shared disk.

    Args:
        address: ``vllm://host:port[/model]``.
        model: The student.
        folder: New weights are written below it.
        rehearse: Try once, with weights that differ everywhere, whether the server takes all of them. It needs the
            memory of a second student for a moment.
        settings: Of the `VllmWriter`; `dtype` is also the precision of the weights that are written.
    """

    _reason = (
        "it computes with old weights somewhere, or in another precision; where embedding and head are tied it may keep"
        " its old head without a word"
    )
    _remedy = "start it from a folder that gatespace.addons.vllm.untied.save_untied wrote, in the same precision"

    def __init__(self, address: str, model: Model, folder: Path, *, rehearse: bool = True, **settings: Any) -> None:
        self._folder = folder.expanduser().absolute()
        self._rehearse = rehearse
        self._syncs = 0
        super().__init__(address, model, **settings)

    def close(self) -> None:
        """Give up what is under way, and remove the weights from the disk."""
        super().close()
        for place in (self._place(0), self._place(1)):
            shutil.rmtree(place, ignore_errors=True)

    def _prepare(self) -> None:
        if self._rehearse:
            self._send(_altered(self._model), 2 * self._tolerance)
        self.sync()

    def _renew(self) -> None:
        self.sync()

    def sync(self) -> float:
        """Give the server the student's weights as they are now; by how much their log-probabilities still differ.

        Raises `RunError` if that is more than rounding.
        """
        return self._send(self._model, self._tolerance)

    def _send(self, model: Model, tolerance: float) -> float:
        place = self._place(self._syncs % 2)  # never the folder that the server may still have open
        self._syncs += 1
        save_untied(model, place, dtype=self._dtype)
        try:
            self._server.tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(place)}})
            self._server.tell("/reset_prefix_cache")
        except RefusedError as error:
            if error.status == 404:
                raise UsageError(
                    f"{self._server} takes no new weights",
                    got=error.got,
                    instead="start it with VLLM_SERVER_DEV_MODE=1 in its environment",
                ) from None
            raise
        shutil.rmtree(self._place(self._syncs % 2), ignore_errors=True)
        apart = self._verify(model, tolerance)
        self._seen = self._server.interruptions
        return apart

    def _place(self, number: int) -> Path:
        return self._folder / f"weights-{number}"


_PLAIN: dict[str, Any] = {
    # Whatever a request leaves open, a server may fill in from the model's own generation_config.json.
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@torch.no_grad()
def _log_probs(model: Model, ids: list[int]) -> Tensor:
    """The log-probability of every token but the first, over all rows of the head, as vLLM has them."""
    network: Any = model.network
    logits = network(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, :-1]
    log_probs = torch.log_softmax(logits.float(), -1)
    return log_probs.gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0].cpu()


@torch.no_grad()
def _altered(model: Model) -> Model:
    """A copy all of whose weights are others: the body's a little, so that rounding stays what it is; the head's by a
    turn of its rows, so that one that is still the old one, or only follows the embedding, is far off."""
    whole = merged(model) if hasattr(model.network, "merge_and_unload") else model
    network: Any = copy.deepcopy(whole.network) if whole is model else whole.network
    layer = network.get_output_embeddings()
    turned = layer.weight.roll(1, 0)
    for parameter in network.parameters():
        parameter.add_(parameter.roll(1, 0), alpha=_ALTERED)
    layer.weight = torch.nn.Parameter(turned, requires_grad=False)
    return Model(network.eval(), model.tokenizer, model.name, model.source)
