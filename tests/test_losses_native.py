"""The losses in C++: exact as plain torch or better, whatever is masked, in any order of tokens, with any threads."""

from __future__ import annotations

import pytest
import torch
from loss_cases import F32, POLICY, REGRESSION, batch, check, poison, results

from fastcollab import ops
from fastcollab.losses import advantage_regression, policy_loss
from fastcollab.reference import losses as reference

pytestmark = pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))
BLOCK = 2048


def cpu(case):
    return [x.cpu() for x in case]


def run(case, **settings):
    with ops.use_impl("native"):
        return results(policy_loss, cpu(case), F32, **settings)


@pytest.mark.parametrize("order", ["sorted", "random"])
@pytest.mark.parametrize("T", [61, 3 * BLOCK + 5])
@pytest.mark.parametrize("settings", POLICY, ids=str)
def test_policy_loss_is_as_exact_as_torch(settings, T, order):
    check("native", cpu(batch(T, order=order)), **settings)


@pytest.mark.parametrize("order", ["sorted", "random"])
@pytest.mark.parametrize("T", [61, 3 * BLOCK + 5])
@pytest.mark.parametrize("settings", REGRESSION, ids=str)
def test_regression_is_as_exact_as_torch(settings, T, order):
    check("native", cpu(batch(T, order=order)), advantage_regression, **settings)


@pytest.mark.parametrize("T", [*range(18), 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("keep", [0.0, 0.1, 1.0])
def test_every_length(T, keep):
    """S = 900: most segments have no token, and runs are short."""
    for S, order in ((1, "sorted"), (2, "random"), (900, "sorted")):
        case = cpu(batch(T, S, order, keep))
        check("native", case, beta=0.1, dual_clip=1.2)
        check("native", case, ratio="sequence", aggregation="sequence-mean", beta=0.1)
        check("native", case, advantage_regression, length_norm="seq")


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.3, 8.0, 60.0])
def test_small_and_large_drift(spread):
    """k3 and expm1 keep their digits near 0; beyond the cap ratio and k3 are constant with a gradient of 0."""
    case = cpu(batch(1000, keep=1.0, spread=spread))
    for settings in ({"beta": 0.5}, {"form": "cispo", "beta": 0.5}, {"ratio": "sequence"}):
        ours = check("native", case, **settings)
    lp, old, ref = (x.double() for x in case[:3])
    exact = (lp - old).expm1() - (lp - old)
    if spread < 1:  # better than plain torch, which loses the digits that e^d - 1 and d share
        got = ours["token_sum/approx_kl"]
        assert (got - exact.sum()).abs() <= 2e-6 * exact.sum() + 1e-7 * spread * 30


def test_gradient_at_the_edges():
    """On policy min(r A, clip(r) A) ties everywhere; at a bound the gradient still passes; beyond the cap it is 0."""
    one = torch.ones(4)
    mask, ids = one.bool(), torch.arange(4)
    lp, old = torch.zeros(4), torch.tensor([0.0, 0.0, -20.0, -20.5])
    advantage = torch.tensor([2.0, -3.0, -1.0, -1.0])
    settings = {"clip_low": 0.0, "clip_high": 0.0}
    for impl, loss_of in (("native", policy_loss), ("reference", policy_loss)):
        with ops.use_impl(impl):
            grad = results(loss_of, (lp, old, old, advantage, mask, ids), F32, denominator=3.0, **settings)["grad"]
        assert grad[:2].tolist() == [-2.0, 3.0] and grad[3] == 0
        assert grad[2].item() == pytest.approx(torch.tensor(20.0).exp().item(), rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_hold_anything(value):
    case = cpu(batch(300))
    for settings in ({"beta": 0.1, "dual_clip": 1.5}, {"ratio": "sequence", "aggregation": "sequence-mean"}):
        clean, dirty = run(case, **settings), run(poison(case, value, 2**40), **settings)
        assert all(torch.equal(clean[k], dirty[k]) for k in clean)
    with ops.use_impl("native"):
        clean, dirty = (results(advantage_regression, c, F32) for c in (case, poison(case, value)))
    assert all(torch.equal(clean[k], dirty[k]) for k in clean)


def test_bits_depend_on_no_thread():
    case = cpu(batch(20 * BLOCK + 77, S=40, order="random"))
    outputs = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with ops.use_impl("native"):
                regression = {f"r/{k}": v for k, v in results(advantage_regression, case, F32).items()}
                outputs.append(regression | run(case, beta=0.1, ratio="sequence", aggregation="sequence-mean"))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(outputs[0][k], other[k]) for other in outputs[1:] for k in other)


def test_uninitialised_memory_is_never_read():
    case = poison(cpu(batch(500)))
    want = run(case, beta=0.1) | results(advantage_regression, case, F32)
    torch.use_deterministic_algorithms(True)  # then torch.empty is filled with NaN
    try:
        got = run(case, beta=0.1) | results(advantage_regression, case, F32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_strided_tensors_and_other_dtypes():
    lp, old, ref, advantage, mask, ids = cpu(batch(40))
    wide = [torch.stack([x, x], 1)[:, 0] for x in (lp, old, ref, mask, ids)]
    assert not wide[0].is_contiguous()
    strided = (*wide[:3], advantage.double(), wide[3], wide[4].int())
    a, b = (run(case, beta=0.1) for case in ((lp, old, ref, advantage, mask, ids), strided))
    assert all(torch.equal(a[k], b[k]) for k in a)
    half = lp.half().requires_grad_()
    loss, _ = policy_loss(half, old.half(), advantage, mask, ids)
    want, _ = policy_loss(half.float(), old.half().float(), advantage, mask, ids)
    assert torch.equal(loss, want) and torch.autograd.grad(loss, half)[0].dtype == torch.float16


def test_huge_finite_values_are_no_error():
    """A sum of finite log-probs may overflow (finfo.min stands for -inf in many codes)."""
    lp, old, ref, advantage, mask, ids = cpu(batch(40, keep=1.0))
    lp[:20] = torch.finfo(F32).min
    loss, metrics = policy_loss(lp, old, advantage, mask, ids)
    assert loss.isfinite() and metrics["min/ratio"] < 1e-37
    want, _ = reference.policy_loss(lp, old, advantage, mask, ids)
    torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("where", [0, 5, 2500, 4095])
@pytest.mark.parametrize("name", ["logprob", "old_logprob", "ref_logprob", "segment_ids", "advantage"])
@pytest.mark.parametrize("settings", [{}, {"ratio": "sequence"}, {"aggregation": "sequence-mean"}], ids=str)
def test_errors_are_the_references(name, where, settings):
    lp, old, ref, advantage, mask, ids = cpu(batch(4096, keep=1.0))
    given = {"logprob": lp, "old_logprob": old, "ref_logprob": ref, "advantage": advantage, "segment_ids": ids}
    if name == "segment_ids":
        ids[where] = 5 if where % 2 else -1
    elif name == "advantage":
        advantage[ids[where]] = float("nan")
    else:
        given[name][where] = -float("inf")
    sentences = []
    for impl in ("native", "reference"):
        with ops.use_impl(impl), pytest.raises(ValueError) as error:
            policy_loss(**given, mask=mask, **settings)
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]
    if name != "ref_logprob" and not settings:
        for impl in ("native", "reference"):
            with ops.use_impl(impl), pytest.raises(ValueError) as error:
                advantage_regression(lp, old, advantage, mask, ids, 0.1)
            sentences.append(str(error.value))
        assert sentences[2] == sentences[3]


def test_a_second_derivative_is_refused():
    lp, old, _, advantage, mask, ids = cpu(batch(20))
    lp.requires_grad_()
    loss, _ = policy_loss(lp, old, advantage, mask, ids)
    with pytest.raises(ValueError, match="create_graph: got True, need False"):
        torch.autograd.grad(loss, lp, create_graph=True)


def test_opcheck_and_one_graph():
    lp, old, ref, advantage, mask, ids = cpu(batch(50))
    raw = torch.ops.fastcollab
    for given in (ref, None):
        args = (lp, old, given, advantage, mask, ids, 0.2, 0.28, 0.0, 0, 1, True, 0.0, 3)
        torch.library.opcheck(raw.policy_loss_forward.default, args)
    args = (lp, old, advantage, mask, ids, 0.1, 0, 0, -float("inf"))
    torch.library.opcheck(raw.advantage_regression_forward.default, args)

    def both(lp, old, ref):
        loss, metrics = policy_loss(2 * lp, old, advantage, mask, ids, ref_logprob=ref, beta=0.1)
        return loss + advantage_regression(lp, old, advantage, mask, ids, 0.1)[0], metrics["token_sum/kl"]

    lp.requires_grad_()
    outputs = []
    for f in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        loss, kl = f(lp, old, ref)
        outputs.append((loss, kl, *torch.autograd.grad(loss, lp)))
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(3)}, r"old_logprob: got \[4\], need shape \[3\]"),
        ({3: torch.zeros(2, dtype=torch.float64)}, "advantage: got Double, need Float"),
        ({4: torch.zeros(4)}, "mask: got Float, need Bool"),
        ({9: 3}, "form: got 3, need 0"),
        ({10: 2}, "ratio: got 2, need 0"),
        ({12: 0.1}, "ref_logprob: got None, need a tensor"),
        ({13: 0}, "kl: got 0, need 1, 2 or 3"),
    ],
)
def test_raw_operator_checks_its_arguments(change, message):
    args = [torch.zeros(4), torch.zeros(4), None, torch.zeros(2), torch.ones(4, dtype=torch.bool),
            torch.zeros(4, dtype=torch.int64), 0.2, 0.2, 0.0, 0, 0, False, 0.0, 3]  # fmt: skip
    for at, value in change.items():
        args[at] = value
    with pytest.raises(ValueError, match=message):
        torch.ops.fastcollab.policy_loss_forward(*args)
