"""FASTCOLLAB_NAN_SCRATCH fills the C++ operators' own memory with NaN, which changes no bit of what they answer."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_head_native as head
import test_ops as cache
import torch

from fastcollab import ops
from fastcollab.losses import linear_policy_loss

ROOT = Path(__file__).parent.parent
CXX = shlex.split(os.environ.get("CXX") or "g++")
NAN = os.environ | {"FASTCOLLAB_NAN_SCRATCH": "1"}
PROGRAM = """
#include <cmath>
#include "cpu/scratch.h"
int main() {
  const fc::Floats p = fc::uninitialised(3);
  return std::isnan(p[0]) && std::isnan(p[2]) ? 7 : 0;
}
"""


def everything() -> list[torch.Tensor]:
    """What the head and paged attention answer at odd shapes."""
    out = []
    for h_dtype, w_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        for N, D, V in ((33, 17, 2100), (600, 5, 37), (0, 5, 37)):
            h, weight, bias, target = head.make(N, D, V, h_dtype, w_dtype)
            upstream = (torch.arange(N) % 3).float(), torch.ones(N)
            for given in (upstream[:1], upstream):
                both = len(given) == 2
                run = lambda *a, both=both: ops.linear_logprob(*a, entropy=both)[: 1 + both]  # noqa: E731
                out += head.run(run, (h, weight, bias), target, given)
            out += ops.linear_scores(h, weight, bias, target, target)
            loss, _, grads = head.loss_and_gradients(linear_policy_loss, (h, weight, bias), head.policy_case(N, V))
            out += [loss, *grads]
    for heads, kv_heads, dk, dv, block, window, softcap, sinks in cache.SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            case = cache.make_case(cache.LENGTHS, cache.TOKENS, heads, kv_heads, dk, dv, block, dtype)
            case |= {"window": window, "softcap": softcap, "sinks": torch.zeros(heads) if sinks else None}
            out.append(ops.paged_attention(**case))
    return [x.detach() for x in out]


@pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))
def test_scratch_is_written_before_it_is_read(tmp_path):
    code = "import sys, torch, test_scratch as t; torch.set_num_threads(1); torch.save(t.everything(), sys.argv[1])"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", code, tmp_path / "x"], check=True, env=NAN | {"PYTHONPATH": path})
    for x, y in zip(torch.load(tmp_path / "x"), everything(), strict=True):
        assert x.isfinite().all() and torch.equal(x, y)


@pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"no C++ compiler ({CXX[0]}) on PATH")
def test_the_switch_fills_with_nan(tmp_path):
    (tmp_path / "x.cpp").write_text(PROGRAM)
    subprocess.run([*CXX, "-std=c++20", f"-I{ROOT / 'csrc'}", tmp_path / "x.cpp", "-o", tmp_path / "x"], check=True)
    assert subprocess.run([tmp_path / "x"], env=NAN).returncode == 7
