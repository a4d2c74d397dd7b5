"""One thread: the tests' tensors are small, and spinning OpenMP threads on a busy machine take ten times as long.

Without a GPU the Triton kernels run in the interpreter, which must be known before anything imports triton.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
