"""The head's operators in C++: as exact as plain torch, bounded memory, equal bits, and the loss in one pass."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastcollab import ops
from fastcollab.losses import linear_policy_loss, policy_loss
from fastcollab.ops import linear_logprob, linear_scores
from fastcollab.reference import head as reference

pytestmark = pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))
CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def naive(h, weight, bias, target, temperature=1.0, softcap=None):
    z = h @ weight.T + (0 if bias is None else bias)
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    lp = z.log_softmax(-1)
    return lp.gather(1, target[:, None])[:, 0], -torch.where(lp.exp() > 0, lp.exp() * lp, 0).sum(-1)


def make(N=33, D=17, V=5003, h_dtype=F32, w_dtype=F32, scale=1.5):
    g = torch.Generator().manual_seed(N + D + V)
    h, weight, bias = (torch.randn(s, generator=g) for s in ((N, D), (V, D), (V,)))
    weight *= scale * D**-0.5
    h, weight = h.to(h_dtype).requires_grad_(), weight.to(w_dtype).requires_grad_()
    return h, weight, bias.requires_grad_(), torch.randint(0, V, (N,), generator=g)


def run(f, inputs, target, upstream, dtype=None, **settings):
    """Values and gradients of f at the inputs, in ``dtype``."""
    leaves = [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out = f(*leaves, target, **settings)
    total = sum((a * g.to(a.dtype)).sum() for a, g in zip(out, upstream, strict=True))
    return [*out, *torch.autograd.grad(total, [x for x in leaves if x is not None])]


def within(got, plain, exact):
    """STYLE 2: at most twice the error of plain fp32 torch, and one rounding of the result's own dtype."""
    assert got.shape == exact.shape and got.isfinite().all()
    if exact.numel():
        size = max(1.0, exact.abs().max().item())
        allowed = 2 * (plain.double() - exact).abs().max().item() + 2.4e-7 * size
        rounding = exact.abs() * 2**-8 if got.dtype == BF16 else 0
        assert ((got.double() - exact).abs() <= allowed + rounding).all()


SHAPES = [(33, 17, 5003), (33, 64, 4097), (1, 64, 5003), (600, 17, 2100), (33, 1, 7), (33, 17, 1), (1, 1, 1), (0, 9, 7)]
SETTINGS = [{}, {"temperature": 0.7, "softcap": 2.0}]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "capped"])
@pytest.mark.parametrize("dtypes", list(itertools.product((F32, BF16), repeat=2)), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_plain_torch(shape, dtypes, settings):
    h, weight, bias, target = make(*shape, *dtypes)
    bias = bias if settings else None
    upstream = torch.linspace(-1, 2, len(h)), torch.linspace(1, -2, len(h))
    args = (h, weight, bias), target, upstream
    exact, plain = run(naive, *args, F64, **settings), run(naive, *args, F32, **settings)
    got = run(lambda *a, **k: linear_logprob(*a, **k, entropy=True), *args, **settings)
    assert got[0].dtype == got[1].dtype == F32 and [g.dtype for g in got[2:4]] == list(dtypes)
    for triple in zip(got, plain, exact, strict=True):
        within(*triple)


@pytest.mark.parametrize("dtypes", list(itertools.product((F32, BF16), repeat=2)), ids=str)
@pytest.mark.parametrize(("N", "V"), [(64, 1), (64, 2000), (64, 2049), (600, 600)])
def test_few_confident_rows_get_the_forward_passes_products(N, V, dtypes):
    """Rounded otherwise, as at another number of rows, a logit is an ulp off and e^(x - lse) no longer 1."""
    g = torch.Generator().manual_seed(0)
    weight, target = torch.randn(V, 1024, generator=g) / 32, torch.randint(0, V, (N,), generator=g)
    h = 40 * weight[target] + 0.1 * torch.randn(N, 1024, generator=g)
    h, weight = h.to(dtypes[0]).requires_grad_(), weight.to(dtypes[1]).requires_grad_()
    for active in (1, 3, 30, N - 1):
        upstream = (torch.arange(N) < active).float()
        for rows in (N, active):
            logprob, _ = linear_logprob(h[:rows], weight, None, target[:rows])
            grads = torch.autograd.grad(logprob, (h, weight), upstream[:rows])
            assert all(x.abs().max() < 1e-10 for x in grads), (active, rows)


def test_bias_in_bf16_and_forbidden_tokens():
    h, weight, bias, target = make(V=100)
    bias = torch.where(torch.arange(100) % 3 == 1, -torch.inf, bias.detach().bfloat16())
    target = target // 3 * 3
    args = (h, weight, bias), target, (torch.ones(33), torch.linspace(1, -2, 33))
    got = run(lambda *a: linear_logprob(*a, entropy=True), *args)
    with ops.use_impl("reference"):
        exact = run(lambda *a: linear_logprob(*a, entropy=True), *args, F64)
    assert got[4].dtype == BF16 and (got[4][bias == -torch.inf] == 0).all()
    for g, e in zip(got, exact, strict=True):
        torch.testing.assert_close(g.double(), e, atol=3e-6, rtol=2**-8 if g.dtype == BF16 else 1e-6)


def test_views_and_tied_slices():
    """Rows of h and weight any distance apart, a weight that is part of a larger one; h^T is copied."""
    h, weight, _, target = make(40, 16, 300)
    upstream = (torch.linspace(-1, 1, 40),)
    want = run(lambda *a: linear_logprob(*a)[:1], (h, weight, None), target, upstream)
    wide, table = torch.full((40, 3, 16), torch.nan), torch.full((350, 20), torch.nan)
    wide[:, 1], table[5:305, 2:18] = h.detach(), weight.detach()
    table.requires_grad_()
    for view in (wide[:, 1], h.detach().T.contiguous().T):
        view.requires_grad_()
        lp, _ = linear_logprob(view, table[5:305, 2:18], None, target)
        dh, dtable = torch.autograd.grad(lp, (view, table), upstream[0])
        assert torch.equal(lp, want[0]) and torch.equal(dh, want[1]) and torch.equal(dtable[5:305, 2:18], want[2])
        assert dtable.count_nonzero() == want[2].count_nonzero()


def test_rows_without_gradient():
    h, weight, bias, target = make(50, 8, 70)
    g = torch.linspace(-1, 1, 50) * (torch.arange(50) % 4 == 0)
    one = lambda *a: linear_logprob(*a)[:1]  # noqa: E731
    got = run(one, (h, weight, bias), target, (g,))
    kept = g.nonzero().flatten()
    want = run(one, (h[kept], weight, bias), target[kept], (g[kept],))
    assert torch.equal(got[1][kept], want[1]) and torch.equal(got[2], want[2]) and torch.equal(got[3], want[3])
    assert (got[1][g == 0] == 0).all()
    assert all((x == 0).all() for x in run(one, (h, weight, bias), target, (torch.zeros(50),))[1:])
    lp, ent = linear_logprob(h, weight.detach(), None, target, entropy=True)
    ent.sum().backward()
    assert h.grad is not None and weight.grad is None


@pytest.mark.parametrize("level", [61.3, 97.1, 250.7])
def test_large_logits_have_gradients_that_sum_to_zero(level):
    """A log-sum-exp rounded to fp32 would scale every probability of its row, here by 2e-6 and more."""
    bias = (level + torch.randn(1000, generator=torch.Generator().manual_seed(0))).requires_grad_()
    zero = torch.zeros(1, 1)
    linear_logprob(zero, torch.zeros(1000, 1), bias, torch.tensor([3]))[0].sum().backward()
    assert bias.grad.double().sum().abs() < 4e-7 and bias.grad[3] > 0.9
    weight = torch.zeros(1000, 1)
    args = (zero, weight, torch.tensor([3]), torch.tensor([-7.0]), torch.ones(1), torch.ones(1) > 0, torch.tensor([0]))
    (grad,) = torch.autograd.grad(linear_policy_loss(*args, bias=bias, form="reinforce")[0], bias)
    assert grad.double().sum().abs() < 4e-7


@pytest.mark.parametrize("w_dtype", [F32, BF16])
def test_a_row_alone_has_the_same_bits(w_dtype):
    """At one number of rows: torch's product rounds differently for another."""
    h, weight, bias, target = make(64, 96, 5003, w_dtype=w_dtype)
    ones = torch.ones(64), torch.ones(64)
    f = lambda *a: linear_logprob(*a, entropy=True)  # noqa: E731
    batch = run(f, (h, weight, bias), target, ones)
    for row in (0, 17, 63):
        others = torch.arange(64) != row
        alone, ids = torch.where(others[:, None], 0.5, h.detach()), torch.where(others, 0, target)
        got = run(f, (alone, weight, bias), ids, ones)
        assert all(torch.equal(a[row], b[row]) for a, b in zip(got[:3], batch[:3], strict=True))


@pytest.mark.parametrize("D, w_dtype", [(64, F32), (64, BF16), (512, F32), (512, BF16)])
def test_the_bits_do_not_depend_on_threads(D, w_dtype):
    h, weight, bias, target = make(700, D, 3000, w_dtype=w_dtype)
    upstream = torch.linspace(-1, 1, 700), torch.linspace(1, -1, 700)
    results, loss = [], policy_case(700, 3000)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            got = run(lambda *a: linear_logprob(*a, entropy=True), (h, weight, bias), target, upstream)
            results.append(got + loss_and_gradients(linear_policy_loss, (h, weight, bias), loss)[2])
        finally:
            torch.set_num_threads(1)
    for a, b in [pair for other in results[1:] for pair in zip(results[0], other, strict=True)]:
        split = D == 64 and a.shape == h.shape  # so narrow, MKL's own product splits the sum of dh over threads
        assert torch.equal(a, b) or split and (a - b).abs().max() <= 2e-6 * a.abs().max()


def test_every_byte_is_written_before_it_is_read():
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        for N in (20, 0):
            h, weight, bias, target = make(N, 5, 37)
            got = run(lambda *a: linear_logprob(*a, entropy=True), (h, weight, bias), target, (torch.ones(N),) * 2)
            scores = linear_scores(h, weight, bias, target, target)
            loss, metrics, grads = loss_and_gradients(linear_policy_loss, (h, weight, bias), policy_case(N, 37))
            assert all(x.isfinite().all() for x in (*got, *scores, loss, *grads))
            assert all(x.isfinite() for name, x in metrics.items() if N or name != "min/ratio")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("V", [1, 7, 4097])
def test_scores(V):
    h, weight, bias, target = make(33, 17, V)
    second = target.flip(0)
    got = linear_scores(h, weight, bias, target, second, 0.8)
    exact = [x.detach().double() for x in (h, weight, bias)]
    want = reference.linear_scores(*exact, target, second, 0.8)
    assert torch.equal(got.top1, want.top1) and not got.logprob.requires_grad
    for a, b in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(a.double(), b, atol=5e-6, rtol=0)
    assert linear_scores(h, weight, bias, target).second_logprob is None
    ties = linear_scores(torch.zeros(1, 17), weight, torch.zeros(V).index_fill(0, torch.tensor(V - 1), 0), target[:1])
    assert ties.top1 == 0


GOOD = {"h": torch.zeros(2, 4), "weight": torch.zeros(11, 4), "bias": None, "target": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, 11])}, r"target: got \(0, 11\), need ids in \[0, 11\)"),
        ({"target": torch.tensor([0, -100])}, "target: got"),
        ({"target": torch.tensor([0])}, "h, weight, bias, target"),
        ({"target": torch.tensor([0, 1], dtype=torch.int32)}, "target: got Int, need Long"),
        ({"temperature": 0.0}, "temperature: got 0.0, need > 0"),
        ({"softcap": 0.0}, "softcap"),
        ({"h": torch.tensor([[0.0] * 4, [torch.nan] * 4])}, "row 1: got log-sum-exp nan, need a finite one"),
        ({"bias": torch.full((11,), -torch.inf)}, "row 0: got log-sum-exp -inf"),
        ({"bias": torch.arange(11) / 0}, "row 0: got log-sum-exp"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        linear_logprob(**GOOD | change)


def policy_case(N, V, S=5, **settings):
    g = torch.Generator().manual_seed(N)
    case = {
        "target": torch.randint(0, V, (N,), generator=g),
        "old_logprob": 0.4 * torch.randn(N, generator=g) - torch.tensor(float(V)).log(),
        "advantage": torch.randn(S, generator=g),
        "mask": torch.rand(N, generator=g) < 0.7,
        "segment_ids": torch.randint(0, S, (N,), generator=g),
    }
    case["advantage"][1] = 0
    return case | settings


def loss_and_gradients(f, inputs, case, dtype=None, upstream=1.0):
    h, weight, bias = (x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs)
    loss, metrics = f(h, weight, **case, bias=bias)
    return loss, metrics, list(torch.autograd.grad(loss * upstream, (h, weight, bias)))


TERMS = [
    {"clip_low": 0.2, "clip_high": 0.28},
    {"aggregation": "sequence-mean", "dual_clip": 3.0, "entropy": True, "temperature": 0.7, "softcap": 3.0},
    {"aggregation": "constant", "max_length": 9, "form": "reinforce", "denominator": 3.0},
    {"form": "cispo", "clip_low": 1.0, "beta": 0.1, "kl": "k3", "denominator": torch.tensor(40.0)},
    {"form": "clip", "beta": 0.1, "kl": "k2", "aggregation": "sequence-mean"},
    {"form": "reinforce", "beta": 0.1, "kl": "k1"},
]


@pytest.mark.parametrize("terms", [{}, *TERMS[1:4:2]], ids=str)
@pytest.mark.parametrize("dtypes", list(itertools.product((F32, BF16), repeat=2)), ids=str)
@pytest.mark.parametrize("shape", [*SHAPES[:-1], (257, 31, 1025)], ids=str)
def test_one_pass_is_as_exact_as_plain_torch(shape, dtypes, terms):
    h, weight, bias, _ = make(*shape, *dtypes)
    N, V = len(h), len(weight)
    case = policy_case(N, V) | {"mask": torch.arange(N) % 4 != 1}
    with torch.no_grad():
        logprob = naive(h.float(), weight.float(), bias, case["target"], terms.get("temperature", 1.0),
                        terms.get("softcap"))[0]  # fmt: skip
        case["old_logprob"] = logprob + 0.1 * case["old_logprob"].sin()
    if "beta" in terms:
        case["ref_logprob"] = case["old_logprob"].flip(0)
    head = {k: v for k, v in terms.items() if k in ("temperature", "softcap")}
    case |= {k: v for k, v in terms.items() if k not in (*head, "entropy")}

    def plain(h, weight, *, target, bias, **rest):
        kept = rest["mask"].nonzero().flatten()
        logprob = naive(h, weight, bias, target, **head)[0]
        return policy_loss(logprob.new_zeros(N).index_put((kept,), logprob[kept]), **rest)

    def ours(*args, **rest):
        return linear_policy_loss(*args, **rest, **head)

    with ops.use_impl("reference"):
        exact, torch_32 = (loss_and_gradients(plain, (h, weight, bias), case, dtype) for dtype in (F64, F32))
    loss, _, grads = loss_and_gradients(ours, (h, weight, bias), case)
    assert [g.dtype for g in grads[:2]] == list(dtypes)
    for triple in zip((loss, *grads), *([x[0], *x[2]] for x in (torch_32, exact)), strict=True):
        within(*triple)


@pytest.mark.parametrize("w_dtype", [F32, BF16])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_one_pass_is_the_loss_of_the_log_probs(terms, w_dtype):
    h, weight, bias, _ = make(120, 17, 203, w_dtype=w_dtype)
    weight = (weight.detach() * 0.3).requires_grad_()
    case = policy_case(120, 203, **terms)
    if "beta" in terms:
        case["ref_logprob"] = case["old_logprob"].flip(0)
    want, want_metrics, want_grads = loss_and_gradients(reference.linear_policy_loss, (h, weight, bias), case, F64)
    head = {k: case.pop(k) for k in ("temperature", "softcap", "entropy") if k in case}
    got, metrics, grads = loss_and_gradients(
        lambda *a, **k: linear_policy_loss(*a, **k, **head), (h, weight, bias), case, upstream=2.5
    )
    assert got.dtype == F32 and metrics.keys() == want_metrics.keys()
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=3e-6)
    for name, value in want_metrics.items():
        torch.testing.assert_close(metrics[name].double(), value.double(), atol=2e-5, rtol=1e-5, msg=name)
    for a, b in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(a.double(), 2.5 * b, atol=2e-6, rtol=2**-7 if a.dtype == BF16 else 2e-5)


def test_one_pass_over_several_buffers():
    """2,000 kept rows of 40,000 logits are more than the buffer holds."""
    h, weight, bias, _ = make(2000, 4, 40_000)
    case = policy_case(2000, 40_000, mask=torch.ones(2000, dtype=torch.bool))
    got, metrics, grads = loss_and_gradients(linear_policy_loss, (h, weight, bias), case)

    def two_steps(h, weight, target, bias, **rest):
        return policy_loss(linear_logprob(h, weight, bias, target)[0], **rest)

    want, want_metrics, want_grads = loss_and_gradients(two_steps, (h, weight, bias), case)
    torch.testing.assert_close([got, *grads], [want, *want_grads], atol=1e-7, rtol=1e-4)
    assert metrics["count/tokens"] == want_metrics["count/tokens"] == 2000


def test_one_pass_reads_no_masked_token():
    h, weight, bias, _ = make(60, 8, 50)
    case = policy_case(60, 50)
    want = loss_and_gradients(linear_policy_loss, (h, weight, bias), case)
    off = ~case["mask"]
    for name, value in (("target", -100), ("old_logprob", torch.nan), ("segment_ids", 999)):
        case[name][off] = value
    spoiled = torch.where(off[:, None], torch.nan, h.detach())
    got = loss_and_gradients(linear_policy_loss, (spoiled, weight, bias), case)
    assert torch.equal(got[0], want[0]) and all(torch.equal(a, b) for a, b in zip(got[2], want[2], strict=True))
    zero = off | (case["segment_ids"] == 1)  # advantage 0
    assert (got[2][0][zero] == 0).all() and (got[2][0][~zero] != 0).any()
    case["mask"] = torch.zeros(60, dtype=torch.bool)
    loss, metrics, grads = loss_and_gradients(linear_policy_loss, (spoiled, weight, bias), case)
    assert loss == 0 and metrics["count/tokens"] == 0 and all((g == 0).all() for g in grads)


def test_one_pass_backward_scales():
    h, weight, bias, _ = make(30, 8, 50)
    case = policy_case(30, 50)
    loss, _ = linear_policy_loss(h, weight, **case, bias=bias)
    first = torch.autograd.grad(loss, (h, weight, bias), retain_graph=True)
    kept = [g.clone() for g in first]
    tripled = torch.autograd.grad(3 * loss, (h, weight, bias), retain_graph=True)
    torch.testing.assert_close(tripled, tuple(3 * g for g in kept))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, (h, weight, bias)), kept, strict=True))
    loss, _ = linear_policy_loss(h, weight.detach(), **case)
    loss.backward()
    torch.testing.assert_close(h.grad, torch.autograd.grad(linear_policy_loss(h, weight, **case)[0], h)[0])
    with torch.no_grad():
        assert torch.equal(linear_policy_loss(h, weight, **case)[0], loss.detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": "sequence"}, "ratio: got 'sequence', need token; for a sequence's ratio use linear_logprob and"),
        ({"mask": None}, "mask: got '?no mask"),
        ({"target": torch.full((6,), 50)}, r"target: got \(50, 50\), need ids in \[0, 50\)"),
        ({"segment_ids": torch.full((6,), 5)}, r"segment_ids: got \(5, 5\), need in \[0, 5\)"),
        ({"advantage": torch.full((5,), torch.nan)}, "advantage of segment 2: got 'NaN or inf', need a finite value"),
        ({"old_logprob": torch.full((6,), -torch.inf)}, "token 0 of segment 2: got {'old_logprob': -inf}, need"),
        ({"ref_logprob": torch.full((6,), torch.nan)}, "token 0 of segment 2: got .*, 'ref_logprob': nan}, need"),
        ({"bias": torch.where(torch.arange(50) == 3, -torch.inf, 0)}, "token 0 of segment 2: got {'logprob': -inf}"),
        ({"h": torch.full((6, 8), torch.nan)}, "row 0: got log-sum-exp nan"),
        ({"form": "ppo"}, "form: got 'ppo'"),
    ],
)
def test_bad_input_of_the_loss(change, message):
    h, weight, *_ = make(6, 8, 50)
    ids, mask = torch.full((6,), 2), torch.ones(6, dtype=torch.bool)
    case = policy_case(6, 50, mask=mask, segment_ids=ids, target=torch.full((6,), 3)) | {"h": h, "weight": weight}
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**case | change)


MEMORY = """
import torch
from fastcollab import ops
torch.set_num_threads(1)
N, D, V = 1700, 16, 50_000
h = torch.randn(N, D).requires_grad_()
target, ids, old = torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=torch.int64), torch.full((N,), -11.0)
def read(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024
def grown(f):
    f(2)
    open("/proc/self/clear_refs", "w").write("5")
    before = read("VmRSS")
    f(N)
    print(read("VmHWM") - before)
for dtype in (torch.float32, torch.bfloat16):
    w = torch.randn(V, D).to(dtype).requires_grad_()
    grown(lambda n: ops.linear_logprob(h[:n], w, None, target[:n])[0].sum().backward())
    w.grad = None
    tokens = lambda n: (target[:n], old[:n], torch.ones(1), old[:n] < 0, ids[:n])
    grown(lambda n: ops.linear_policy_loss(h[:n], w, *tokens(n))[0].backward())
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's VmHWM")
def test_memory():
    """324 MiB of logits never exist: MiB that a call adds at most, its outputs (dW: 3 MiB) included."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    recomputed, one_pass, recomputed_bf16, one_pass_bf16 = map(float, done.stdout.split())
    assert max(recomputed, recomputed_bf16) <= 40 and max(one_pass, one_pass_bf16) <= 200


def test_opcheck_and_one_graph():
    h, weight, bias, target = make(9, 5, 33)
    inputs = (h.detach(), weight.detach(), bias.detach(), target)
    raw = torch.ops.fastcollab
    torch.library.opcheck(raw.linear_logprob_forward.default, (*inputs, target, 0.7, 2.0, True, True))
    _, lse, ent, _, _ = raw.linear_logprob_forward(*inputs, None, 0.7, 2.0, True, False)
    g = torch.ones(9)
    need = (0.7, 2.0, True, True, False)
    torch.library.opcheck(raw.linear_logprob_backward.default, (g, g, *inputs, lse, ent, *need))
    case = policy_case(9, 33)
    tokens = [case[k] for k in ("advantage", "mask", "segment_ids")]
    args = (*inputs, 1.0, 0.0, True, case["old_logprob"], None, *tokens, 0.2, 0.2, 0.0, 0, False, 0.0, 3, 0.1)
    torch.library.opcheck(raw.linear_policy_loss_forward.default, (*args, True, False, True))

    def layer(h, weight):
        logprob, entropy = linear_logprob(h * 2, weight, None, target, entropy=True)
        return (logprob + entropy).sum()

    want = torch.autograd.grad(layer(h, weight), (h, weight))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(h, weight), (h, weight)), want))


def test_other_dtypes_go_to_the_reference():
    h, weight, _, target = make(5, 4, 9)
    lp, ent = linear_logprob(h.double(), weight, None, target, entropy=True)
    assert lp.dtype == ent.dtype == F64
    case = policy_case(5, 9, entropy=True)
    args = [x.detach().double().requires_grad_() for x in (h, weight)]
    assert torch.autograd.gradcheck(lambda h, w: linear_policy_loss(h, w, **case)[0], args)


def test_c12_log_probs_from_bf16_logits():
    case = CASES["C12"]
    j = torch.arange(case["input"]["V"], dtype=F64)
    z, ids = (8 * torch.sin(0.37 * j) + 0.001 * j).to(BF16), torch.tensor(case["input"]["ids"])
    got, _ = linear_logprob(torch.ones(len(ids), 1, dtype=BF16), z[:, None], None, ids)
    want = torch.tensor(case["expected"]["logp"], dtype=F64)
    assert got.dtype == F32 and (got.double() - want).abs().max() <= case["expected"]["max_abs_error_allowed"]


def test_c14_forbidden_tokens():
    case = CASES["C14"]
    logits = torch.tensor([float(x) for x in case["input"]["logits"]], requires_grad=True)
    h, w = torch.zeros(4, 2), torch.zeros(4, 2)
    logp, ent = linear_logprob(h, w, logits, torch.arange(4), entropy=True)
    close = lambda a, b: torch.testing.assert_close(a, torch.tensor(b), atol=case["tolerance"], rtol=0)  # noqa: E731
    close(logp, [float(x) for x in case["expected"]["logp"]])
    close(ent, [case["expected"]["entropy"]] * 4)
    close(torch.autograd.grad(ent[0], logits, retain_graph=True)[0], case["expected"]["dentropy_dlogits"])
    (grad,) = torch.autograd.grad(logp[0], logits, retain_graph=True)
    assert grad.isfinite().all() and (grad[logits == -torch.inf] == 0).all()
    banned = logits.detach() == -torch.inf  # as a target too: one-hot minus probabilities
    (grad,) = torch.autograd.grad(logp[banned].sum(), logits)
    close(grad, (banned.float() - banned.sum() * logits.detach().softmax(0)).tolist())


def test_c18_per_token_upstream_and_bias():
    case = CASES["C18"]
    given, want = case["input"], {k: torch.tensor(v) for k, v in case["expected"].items()}
    h, w, b = (torch.tensor(given[k], requires_grad=True) for k in ("h", "W", "b"))
    nll = -linear_logprob(h, w, b, torch.tensor(given["targets"]))[0]
    grads = torch.autograd.grad(nll, (h, w, b), torch.tensor(given["upstream"]))
    for got, name in zip((nll, *grads), ("nll", "dh", "dW", "db"), strict=True):
        torch.testing.assert_close(got, want[name], atol=max(case["tolerance"], 5e-7), rtol=1e-6)
