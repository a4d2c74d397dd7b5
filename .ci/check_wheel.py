"""The installed wheel, away from the repository, triton blocked: its parts are there and two models write with it."""

import sys

sys.modules["triton"] = None

from pathlib import Path  # noqa: E402

import torch  # noqa: E402

import fastcollab as fc  # noqa: E402

NATIVE = ("paged_attention", "copy_blocks", "sample", "linear_logprob", "linear_policy_loss", "policy_loss",
          "advantage_regression")  # fmt: skip

home = Path(fc.__file__).parent
assert "site-packages" in home.parts, f"imported from {home}, need the installed wheel"

report = fc.ops.impl_report()
assert report["native"] is None, f"compiled operators: {report['native']}"
slow = {op: report[op]["cpu"] for op in NATIVE if report[op]["cpu"] != "native"}
assert not slow, f"not computed by the compiled operators on CPU: {slow}"
from fastcollab import engine  # noqa: E402

assert engine.native_scheduler is not None, "the compiled scheduler is absent"
assert fc.kernels.__name__ == "fastcollab.kernels" and fc.bench.__name__ == "fastcollab.bench"

senior, junior = fc.tiny.senior(), fc.tiny.junior()
assert all((path / "model.safetensors").is_file() for path in (senior, junior)), "the tiny models are not in the wheel"
torch.set_num_threads(1)
rollouts = fc.Engine({"senior": senior, "junior": junior}, kv_memory="16MiB").generate(
    [row["prompt"] for row in fc.tiny.problems(4, seed=0)], n=2, schedule=fc.Word()
)
assert len(rollouts) == 8 and {writer for r in rollouts for writer in r.writers} == {"senior", "junior"}
print(f"wheel: ok, {sum(len(r.ids) for r in rollouts)} tokens written with the package in {home}")
