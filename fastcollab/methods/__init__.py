"""Methods: what differs between them, as small objects that the one training loop asks."""

from fastcollab.methods.grpo import GRPO
from fastcollab.methods.mintrl import MInTRL
from fastcollab.methods.tandem import Tandem

METHODS = {"grpo": GRPO, "tandem": Tandem, "mintrl": MInTRL}
