"""Triton's interpreter made like a device: it multiplies the bits of bfloat16 as integers, rounds to bfloat16 towards
zero, and lets BLAS choose an order of summation by a row's place in its tile."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def repair() -> None:
    """Patch the interpreter once; nothing changes on a device."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    if dot.__name__ == "exact_dot":
        return

    def exact_convert(x, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (x.astype(np.uint32) << 16).view(np.float32)
        return convert(x, source, target, rounding)

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def exact_dot(self, a, b, c, *rest):
        a, b = widen(a), widen(b)
        rows = [row.astype(c.data.dtype) @ b.data.astype(c.data.dtype) for row in a.data]
        return interpreter.TensorHandle(np.stack(rows) + c.data, c.dtype.scalar)

    interpreter._convert_float = exact_convert
    interpreter.InterpreterBuilder.create_dot = exact_dot
