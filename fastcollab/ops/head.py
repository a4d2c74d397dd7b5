"""The LM head's log-probs and loss, straight from hidden states."""

from fastcollab.reference.head import linear_logprob

__all__ = ["linear_logprob"]
