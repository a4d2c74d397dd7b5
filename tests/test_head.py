"""The LM head's log-probs: values and gradients against plain autograd, bounded memory, and the public fault cases."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastcollab.reference import head
from fastcollab.reference.head import linear_logprob

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}


def plain(h, weight, bias, target, temperature=1.0, softcap=None):
    z = h @ weight.T + (0 if bias is None else bias)
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    lp = z.log_softmax(-1)
    return lp.gather(1, target[:, None])[:, 0], -(lp.exp() * lp).sum(-1)


def inputs(N=7, D=5, V=11, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    h, w, b = (
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in ((N, D), (V, D), (V,))
    )
    return h, w, b, torch.randint(0, V, (N,), generator=g)


@pytest.fixture
def small_chunks(monkeypatch):
    """Three rows a chunk, four vocabulary rows a tile."""
    monkeypatch.setattr(head, "_CHUNK_BYTES", 3 * 11 * 8)
    monkeypatch.setattr(head, "_TILE_BYTES", 4 * 5 * 4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_autograd(small_chunks, temperature, softcap, with_bias):
    h, w, b, target = inputs()
    leaves = (h, w, b) if with_bias else (h, w)
    bias = b if with_bias else None
    got = linear_logprob(h, w, bias, target, temperature, softcap, entropy=True)
    want = plain(h, w, bias, target, temperature, softcap)
    upstream = torch.linspace(-1, 2, 7, dtype=h.dtype), torch.linspace(0.5, -0.5, 7, dtype=h.dtype)
    for a, c in zip(got, want, strict=True):
        torch.testing.assert_close(a, c, atol=1e-13, rtol=0)
    for a, c in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, c, atol=1e-12, rtol=0)


def test_gradcheck(small_chunks):
    h, w, b, target = inputs(4, 3, 5)
    for entropy in (False, True):
        f = lambda h, w, b, e=entropy: [x for x in linear_logprob(h, w, b, target, 0.7, 2.0, e) if x is not None]  # noqa: E731
        assert torch.autograd.gradcheck(f, (h, w, b))


def test_rows_without_gradient_are_skipped(small_chunks):
    h, w, b, target = inputs()
    upstream = torch.tensor([0.0, 1, 0, 0, -2, 0, 0], dtype=h.dtype)
    got = torch.autograd.grad(linear_logprob(h, w, b, target)[0], (h, w, b), upstream)
    want = torch.autograd.grad(plain(h, w, b, target)[0], (h, w, b), upstream)
    for a, c in zip(got, want, strict=True):
        torch.testing.assert_close(a, c, atol=1e-13, rtol=0)
    assert (got[0][upstream == 0] == 0).all()
    nothing = torch.autograd.grad(linear_logprob(h, w, b, target)[0], (h, w, b), torch.zeros_like(upstream))
    assert all((g == 0).all() for g in nothing)


@pytest.mark.parametrize("V", [1, 2000])
def test_few_confident_rows_get_the_forward_passes_products(V):
    """Rounded otherwise, as at another number of rows, a logit is an ulp off and e^(x - lse) no longer 1."""
    g = torch.Generator().manual_seed(0)
    weight, target = torch.randn(V, 1024, generator=g) / 32, torch.randint(0, V, (64,), generator=g)
    h = 40 * weight[target] + 0.1 * torch.randn(64, 1024, generator=g)
    for active in (1, 3, 30):
        upstream = (torch.arange(64) < active).float()
        for rows in (64, active):
            leaves = [x.clone().requires_grad_() for x in (h[:rows], weight)]
            logprob, _ = linear_logprob(*leaves, None, target[:rows])
            grads = torch.autograd.grad(logprob, leaves, upstream[:rows])
            assert all(x.abs().max() < 1e-10 for x in grads), (active, rows)


def test_autocast_changes_nothing():
    h, w, b, target = inputs(20, 64, 50, torch.float32)
    outside = linear_logprob(h, w, b, target, entropy=True)
    ones, leaves = [torch.ones(20)] * 2, (h, w, b)
    want = [*outside, *torch.autograd.grad(outside, leaves, ones), *head.linear_scores(*leaves, target)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_logprob(h, w, b, target, entropy=True)
        got = [*inside, *torch.autograd.grad(inside, leaves, ones), *head.linear_scores(*leaves, target)]
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True) if x is not None)


def test_a_second_derivative_is_refused():
    h, w, b, target = inputs()
    with pytest.raises(ValueError, match="create_graph: got True, need False"):
        torch.autograd.grad(linear_logprob(h, w, b, target)[0].sum(), h, create_graph=True)


def test_low_precision_is_as_good_as_the_input(small_chunks):
    h, w, b, target = inputs(dtype=torch.bfloat16)
    got, ent = linear_logprob(h, w, b, target, entropy=True)
    exact = [x.detach().double().requires_grad_() for x in (h, w, b)]
    want, want_ent = plain(*exact, target)
    assert got.dtype == ent.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=0)
    torch.testing.assert_close(ent.double(), want_ent, atol=2e-6, rtol=0)
    grads = torch.autograd.grad(got.sum() + ent.sum(), (h, w, b))
    for a, c, x in zip(grads, torch.autograd.grad(want.sum() + want_ent.sum(), exact), (h, w, b), strict=True):
        assert a.dtype == x.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), c, atol=1e-5, rtol=2**-8)  # one rounding of the result


def test_every_byte_is_written_before_it_is_read(small_chunks):
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        h, w, b, target = inputs()
        got = linear_logprob(h, w, b, target, softcap=2.0, entropy=True)
        grads = torch.autograd.grad(sum(x.sum() for x in got), (h, w, b))
    finally:
        torch.use_deterministic_algorithms(was)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert all(x.isfinite().all() for x in (*got, *grads))


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch):
    monkeypatch.setattr(head, "_CHUNK_BYTES", 16 * 1000 * 4)
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(300, 8, generator=g).requires_grad_(), torch.randn(1000, 8, generator=g).requires_grad_()
    with _Largest() as largest:
        linear_logprob(h, w, None, torch.zeros(300, dtype=torch.int64), entropy=True)[0].sum().backward()
    assert largest.numel == 16 * 1000


@pytest.mark.parametrize("N", [0, 1])
def test_few_rows(N):
    h, w, b, target = inputs(N)
    got, ent = linear_logprob(h, w, b, target, entropy=True)
    assert got.shape == ent.shape == (N,)
    grads = torch.autograd.grad(got.sum(), (h, w, b))
    assert [g.shape for g in grads] == [h.shape, w.shape, b.shape]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, 11])}, r"target: got \(0, 11\), need ids in \[0, 11\)"),
        ({"target": torch.tensor([0, -100])}, "target: got"),
        ({"target": torch.tensor([0])}, "h, weight, bias, target"),
        ({"temperature": 0.0}, "temperature: got 0.0, need > 0"),
        ({"softcap": 0.0}, "softcap"),
        ({"h": torch.tensor([[0.0] * 5, [float("nan")] * 5], dtype=torch.float64)}, "row 1: got log-sum-exp nan"),
    ],
)
def test_bad_input(change, message):
    h, w, b, target = inputs(2)
    arguments = {"h": h, "weight": w, "bias": b, "target": target} | change
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)


def test_c12_log_probs_from_bf16_logits():
    case = CASES["C12"]
    j = torch.arange(case["input"]["V"], dtype=torch.float64)
    z = (8 * torch.sin(0.37 * j) + 0.001 * j).to(torch.bfloat16)
    ids = torch.tensor(case["input"]["ids"])
    got, _ = linear_logprob(torch.ones(len(ids), 1, dtype=torch.bfloat16), z[:, None], None, ids)
    assert got.dtype == torch.float32
    want = torch.tensor(case["expected"]["logp"], dtype=torch.float64)
    assert (got.double() - want).abs().max() <= case["expected"]["max_abs_error_allowed"]
    wrong = torch.tensor(case["wrong_value_to_watch"]["all_bf16"], dtype=torch.float64)
    assert (got.double() - wrong).abs().max() > 1e-3


def test_c14_forbidden_tokens():
    case = CASES["C14"]
    logits = torch.tensor([float(x) for x in case["input"]["logits"]], requires_grad=True)
    h, w = torch.zeros(4, 2), torch.zeros(4, 2)
    logp, ent = linear_logprob(h, w, logits, torch.arange(4), entropy=True)
    want = torch.tensor([float(x) for x in case["expected"]["logp"]])
    torch.testing.assert_close(logp, want, atol=case["tolerance"], rtol=0)
    torch.testing.assert_close(ent, torch.full((4,), case["expected"]["entropy"]), atol=case["tolerance"], rtol=0)
    (grad,) = torch.autograd.grad(ent[0], logits, retain_graph=True)
    torch.testing.assert_close(grad, torch.tensor(case["expected"]["dentropy_dlogits"]), atol=case["tolerance"], rtol=0)
    (grad,) = torch.autograd.grad(logp[0], logits, retain_graph=True)
    assert grad.isfinite().all() and (grad[logits == -torch.inf] == 0).all()
    banned = logits.detach() == -torch.inf  # as a target too: one-hot minus probabilities
    (grad,) = torch.autograd.grad(logp[banned].sum(), logits)
    want = banned.float() - banned.sum() * logits.detach().softmax(0)
    torch.testing.assert_close(grad, want, atol=case["tolerance"], rtol=0)
    record = [x if x > -torch.inf else None for x in logp.tolist()]
    read = json.loads(json.dumps(record, allow_nan=False))
    assert [-torch.inf if x is None else x for x in read] == logp.tolist()
    with pytest.raises(ValueError, match="row 0: got log-sum-exp -inf"):
        linear_logprob(h, w, torch.full((4,), -torch.inf), torch.arange(4))


def test_c18_per_token_upstream_and_bias():
    case = CASES["C18"]
    given, want = case["input"], {k: torch.tensor(v, dtype=torch.float64) for k, v in case["expected"].items()}
    h, w, b = (torch.tensor(given[k], dtype=torch.float64, requires_grad=True) for k in ("h", "W", "b"))
    target, upstream = torch.tensor(given["targets"]), torch.tensor(given["upstream"], dtype=torch.float64)
    close = lambda a, name: torch.testing.assert_close(a, want[name], atol=case["tolerance"], rtol=0)  # noqa: E731
    nll = -linear_logprob(h, w, b, target)[0]
    close(nll, "nll")
    for grad, name in zip(torch.autograd.grad(nll, (h, w, b), upstream), ("dh", "dW", "db"), strict=True):
        close(grad, name)
    wrong = torch.tensor(case["wrong_value_to_watch"]["db_if_first_scalar_used_for_all"], dtype=torch.float64)
    assert (grad - wrong).abs().max() > 0.1

    with torch.no_grad():
        close(-linear_logprob(h, w, b, target)[0], "nll")
    without = -linear_logprob(h, w, None, target)[0]
    torch.testing.assert_close(without, -plain(h, w, None, target)[0])
    frozen = w.detach()
    lp, _ = linear_logprob(h, frozen, None, target)
    (lp * -upstream).sum().backward()
    assert frozen.grad is None and h.grad is not None
