"""The operators as everybody calls them: each checks its input, asks ``dispatch`` who computes it, and calls that."""

from fastcollab.ops.attention import copy_blocks, packed_attention, paged_attention
from fastcollab.ops.dispatch import NATIVE_ABSENT, impl_report, use_impl
from fastcollab.ops.head import Scores, linear_logprob, linear_policy_loss, linear_scores
from fastcollab.ops.losses import advantage_regression, policy_loss
from fastcollab.ops.sampling import sample

__all__ = ["NATIVE_ABSENT", "Scores", "advantage_regression", "copy_blocks", "impl_report", "linear_logprob",
           "linear_policy_loss", "linear_scores", "packed_attention", "paged_attention", "policy_loss", "sample",
           "use_impl"]  # fmt: skip
