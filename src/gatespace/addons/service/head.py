"""The head of a teacher as bytes, which go to every client once."""

from __future__ import annotations

import hashlib

from torch import Tensor

from gatespace.addons.service.wire import PART_BYTES, Array, Frame, HeadInfo, array_of
from gatespace.errors import UsageError
from gatespace.models.load import Model


class HeadBytes:
    """The bytes of a model's head, weight and then bias; of one on the CPU they are not copied."""

    def __init__(self, model: Model) -> None:
        head = model.head
        weight, bias = _head_array(head.weight), None if head.bias is None else _head_array(head.bias)
        if bias is not None and bias.dtype != weight.dtype:
            raise UsageError(
                "the head of this model cannot be sent",
                got=f"a weight of type {weight.dtype}, a bias of type {bias.dtype}",
                instead="the payload top_k",
            )
        self._buffers = [memoryview(part.data) for part in (weight, bias) if part is not None]
        digest = hashlib.sha256()
        for buffer in self._buffers:
            digest.update(buffer)
        size = sum(buffer.nbytes for buffer in self._buffers)
        rows, columns = weight.shape
        self.info = HeadInfo(
            sha256=digest.hexdigest(),
            bytes=size,
            dtype=weight.dtype,  # type: ignore[arg-type]  # checked in _head_array
            shape=(rows, columns),
            bias=bias is not None,
            scale=float(head.scale),
            softcap=None if head.softcap is None else float(head.softcap),
            parts=-(-size // PART_BYTES),
        )

    def part(self, number: int) -> Array:
        """A part, as a buffer."""
        start, pieces = number * PART_BYTES, []
        left = PART_BYTES
        for buffer in self._buffers:
            piece = buffer[min(start, buffer.nbytes) : min(start + left, buffer.nbytes)]
            pieces.append(piece)
            start, left = max(0, start - buffer.nbytes), left - piece.nbytes
        data: Frame = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return Array("uint8", (memoryview(data).nbytes,), data)


def _head_array(tensor: Tensor) -> Array:
    if str(tensor.dtype).removeprefix("torch.") not in ("float32", "float16", "bfloat16"):
        raise UsageError(
            "the head of this model cannot be sent",
            got=str(tensor.dtype),
            instead="the teacher in fp32, fp16 or bf16; or the payload top_k",
        )
    return array_of(tensor)
