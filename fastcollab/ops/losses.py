"""The losses on packed log-probs, one pass forward and backward."""

from fastcollab.reference.losses import advantage_regression, policy_loss

__all__ = ["advantage_regression", "policy_loss"]
