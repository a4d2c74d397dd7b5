"""One thread: the tests' tensors are small, and spinning OpenMP threads on a busy machine take ten times as long."""

import torch

torch.set_num_threads(1)
