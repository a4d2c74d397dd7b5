"""The head's Triton kernels against plain autograd in fp64: values, gradients, options, odd shapes, poisoned memory.

Without a GPU they run under Triton's interpreter, whose tiles are small: these shapes cross several of them.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fastcollab.kernels import logits as gemm  # noqa: E402
from fastcollab.kernels.linear_logprob import linear_logprob_backward, linear_logprob_forward  # noqa: E402
from fastcollab.kernels.linear_policy_loss import linear_policy_loss_forward  # noqa: E402
from fastcollab.reference.losses import policy_loss  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory is NaN, and a chunk of the vocabulary two tiles."""
    monkeypatch.setattr("fastcollab.kernels.linear_logprob._TILES_OF_CHUNK", 2)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(was)


def inputs(N=19, D=21, V=77, dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(DEVICE, dtype)  # noqa: E731
    h, w, b = draw(N, D), draw(V, D), draw(V)
    target, second = (torch.randint(0, V, (N,), generator=g).to(DEVICE) for _ in range(2))
    return h, w, b if bias else None, target, second


def logits(h, w, b, temperature, softcap):
    z = h @ w.T + (0 if b is None else b)
    return (softcap * torch.tanh(z / softcap) if softcap else z) / temperature


def plain(h, w, b, target, second, temperature, softcap):
    """logprob, lse, entropy, second log-prob, top-1 by autograd's own operators, in the dtype of the inputs."""
    z = logits(h, w, b, temperature, softcap)
    lp = z.log_softmax(-1)
    pick = lambda id: lp.gather(1, id[:, None])[:, 0]  # noqa: E731
    return pick(target), z.logsumexp(-1), -(lp.exp() * lp).sum(-1), pick(second), z.argmax(1)


def judged(got, same, exact, dtype, what):
    """|got - exact| <= 2 |same dtype - exact| + a rounding of the result and of sums in fp32, largest norm."""
    error, theirs = ((x.double() - exact).abs().max().item() for x in (got, same))
    scale = exact.abs().max().item()
    assert got.isfinite().all(), what
    assert error <= 2 * theirs + scale * (2 * UNIT[got.dtype] + 2e-6), f"{what}: {error} against {theirs}"


def both(h, w, b, target, second, temperature, softcap, g, g_entropy):
    """(results, gradients) of plain torch in the inputs' dtype, and in fp64."""
    found = []
    for dtype in (h.dtype, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (h, w, b) if x is not None]
        out = plain(*leaves[:2], leaves[2] if b is not None else None, target, second, temperature, softcap)
        loss = (out[0] * g.to(dtype)).sum() + (0 if g_entropy is None else (out[2] * g_entropy.to(dtype)).sum())
        found.append(([x.detach() for x in out], torch.autograd.grad(loss, leaves)))
    return found


def backward(given, g, g_entropy, temperature=1.0, softcap=0.0, need=(True, True, True)):
    h, w, b, target, _ = given
    z = logits(h.double(), w.double(), None if b is None else b.double(), temperature, softcap)
    ent = None if g_entropy is None else torch.special.entr(z.softmax(-1)).sum(-1).float()
    lse = z.logsumexp(-1).float()
    return linear_logprob_backward(g, g_entropy, h, w, b, target, lse, ent, temperature, softcap, *need)


def upstream(N):
    g, g_entropy = torch.linspace(-1, 2, N, device=DEVICE), torch.linspace(0.5, -0.5, N, device=DEVICE)
    g[::3] = 0
    g_entropy[::2] = 0  # rows 0, 6, ... have neither
    return g, g_entropy


ALL, NONE = (True, 0.6, 3.0, True), (False, 1.0, 0.0, False)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, ALL), (torch.float32, NONE), (torch.bfloat16, ALL), (torch.bfloat16, NONE), (torch.float16, ALL)],
)
def test_as_exact_as_plain_torch(dtype, options):
    bias, temperature, softcap, entropy = options
    given = inputs(dtype=dtype, bias=bias)
    g, g_entropy = upstream(len(given[0]))
    g_entropy = g_entropy if entropy else None
    (same, same_grads), (exact, exact_grads) = both(*given, temperature, softcap, g, g_entropy)
    got = linear_logprob_forward(*given, temperature, softcap, entropy, True)
    for i, what in enumerate(("logprob", "lse", "entropy", "second")):
        if what == "entropy" and not entropy:
            assert got[i].shape == (0,)
        else:
            assert got[i].dtype == torch.float32
            judged(got[i], same[i], exact[i], dtype, what)
    assert got[4].tolist() == exact[4].tolist()
    grads = backward(given, g, g_entropy, temperature, softcap, (True, True, bias))
    for a, s, e, x, what in zip(grads, same_grads, exact_grads, given[:3], ("dh", "dw", "db"), strict=False):
        assert a.dtype == x.dtype and a.shape == x.shape
        judged(a, s, e, dtype, what)
    silent = (g == 0) if g_entropy is None else (g == 0) & (g_entropy == 0)
    assert (grads[0][silent] == 0).all()


def test_wide_hidden_states_with_a_narrow_weight():
    h, w, b, target, second = inputs()
    w, b = w.bfloat16(), b.bfloat16()
    g, _ = upstream(len(h))
    (same, same_grads), (exact, exact_grads) = both(h, w.float(), b.float(), target, second, 1.0, 0.0, g, None)
    got = linear_logprob_forward(h, w, b, target, second, 1.0, 0.0, False, False)
    judged(got[0], same[0], exact[0], h.dtype, "logprob")
    grads = backward((h, w, b, target, second), g, None)
    for a, s, e, x in zip(grads, same_grads, exact_grads, (h, w, b), strict=True):
        assert a.dtype == x.dtype
        judged(a, s, e, h.dtype, "gradient")


def test_a_row_alone_equals_the_row_in_a_batch():
    h, w, b, target, second = inputs(N=20, dtype=torch.bfloat16)
    batch = linear_logprob_forward(h, w, b, target, second, 0.7, 4.0, True, True)
    for i in (0, 17):
        alone = linear_logprob_forward(h[i : i + 1], w, b, target[i : i + 1], second[i : i + 1], 0.7, 4.0, True, True)
        assert all(torch.equal(x[i : i + 1], y) for x, y in zip(batch, alone, strict=True))


def test_any_row_stride_and_a_slice_of_a_larger_weight():
    h, w, b, target, second = inputs(N=3)
    g, g_entropy = upstream(len(h))
    wide = torch.full((2 * len(h), h.shape[1] + 3), torch.nan, device=DEVICE)
    wide[::2, 2:-1] = h
    tall = torch.cat([torch.full_like(w, torch.nan), w, torch.full_like(w, torch.nan)])
    strided = wide[::2, 2:-1], tall[len(w) : 2 * len(w)], b, target, second
    want = linear_logprob_forward(h, w, b, target, second, 1.0, 0.0, True, True)
    got = linear_logprob_forward(*strided, 1.0, 0.0, True, True)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    want = backward((h, w, b, target, second), g, g_entropy)
    assert all(torch.equal(x, y) for x, y in zip(backward(strided, g, g_entropy), want, strict=True))


def test_only_what_is_needed():
    given = inputs(N=5, V=30)
    g, g_entropy = upstream(len(given[0]))
    want = backward(given, g, g_entropy)
    for i in range(3):
        got = backward(given, g, g_entropy, need=[j == i for j in range(3)])
        assert all(x.numel() == 0 for j, x in enumerate(got) if j != i)
        assert torch.equal(got[i], want[i])


def test_many_chunks_of_the_vocabulary(monkeypatch):
    given = inputs(N=3, V=133)
    g, g_entropy = upstream(len(given[0]))
    want = backward(given, g, g_entropy)
    monkeypatch.setattr("fastcollab.kernels.linear_logprob._DZ_BYTES", 1)  # one tile of ids at a time
    for x, y in zip(backward(given, g, g_entropy), want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("N", [0, 1])
def test_few_rows(N):
    h, w, b, target, second = inputs(N)
    got = linear_logprob_forward(h, w, b, target, second, 1.0, 0.0, True, True)
    assert [x.shape for x in got] == [(N,)] * 5
    ones = torch.ones(N, device=DEVICE)
    grads = backward((h, w, b, target, second), ones, ones)
    assert [x.shape for x in grads] == [h.shape, w.shape, b.shape] and all(x.isfinite().all() for x in grads)


def test_no_upstream_gradient_at_all():
    given = inputs()
    zeros = torch.zeros(len(given[0]), device=DEVICE)
    assert all((x == 0).all() for x in backward(given, zeros, zeros))


def test_forbidden_tokens_and_rows_without_a_law():
    h, w, b, target, second = inputs(N=3, V=150)
    b[:130] = -torch.inf  # whole chunks without a finite logit
    target[0], target[1:] = 3, 140
    got = linear_logprob_forward(h, w, b, target, None, 1.0, 0.0, True, True)
    want = plain(h.double(), w.double()[130:], b.double()[130:], (target - 130).clamp(min=0), second * 0, 1.0, 0.0)
    assert got[0][0] == -torch.inf
    for i, rows in ((0, slice(1, None)), (1, slice(None)), (2, slice(None))):
        torch.testing.assert_close(got[i][rows].double(), want[i][rows], atol=2e-5, rtol=2e-6)
    assert torch.equal(got[4], want[4] + 130)
    grads = backward((h, w, b, target, second), *upstream(len(h)))
    assert all(x.isfinite().all() for x in grads) and (grads[1][4:130] == 0).all()
    ones = torch.ones(len(h), device=DEVICE)
    grads = backward((h, w, b, target, second), ones, None)  # row 0 too, whose own target is forbidden
    p = (h.double() @ w.double().T + b.double()).softmax(-1)
    want = torch.nn.functional.one_hot(target, len(w)).double() - p
    for got, exact in zip(grads, (want @ w.double(), want.T @ h.double(), want.sum(0)), strict=True):
        torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=2e-6)
    with pytest.raises(ValueError, match="linear_logprob, row 0: got log-sum-exp -inf, need a finite one"):
        linear_logprob_forward(h, w, torch.full_like(b, -torch.inf), target, None, 1.0, 0.0, False, False)
    h[2, 5] = torch.nan
    with pytest.raises(ValueError, match="row 2: got log-sum-exp nan"):
        linear_logprob_forward(h, w, b, target, None, 1.0, 0.0, False, False)
    h[2], b[140] = 0, torch.inf
    with pytest.raises(ValueError, match="row 0: got log-sum-exp inf"):
        linear_logprob_forward(h, w, b, target, None, 1.0, 0.0, False, False)


def test_top1_is_the_lowest_of_equals(monkeypatch):
    for name in ("_TILES_OF_CHUNK", "_MERGED_CHUNKS"):
        monkeypatch.setattr(f"fastcollab.kernels.linear_logprob.{name}", 1)
    h, w, _, target, _ = inputs(N=2, V=150)
    w[:] = 0
    h = h.round()  # exact sums in any order
    w[[37, 70, 149]] = h[0]
    assert linear_logprob_forward(h, w, None, target, None, 1.0, 0.0, False, True)[4][0] == 37
    assert linear_logprob_forward(h * 0, w, None, target, None, 1.0, 0.0, False, True)[4].tolist() == [0, 0]


SUMS = ["loss", "count/tokens", "count/segments", "token_sum/ratio", "min/ratio", "max/ratio", "token_sum/approx_kl"]
SUMS += [f"token_sum/clip_ratio/{x}_mean" for x in ("low", "high", "region", "dual")] + ["token_sum/kl"]


def loss_inputs(dtype=torch.float32, N=41, far=False):
    """Head inputs and tokens whose ratios spread so that every clip acts; six segments, the last one empty."""
    h, w, b, target, _ = inputs(N, dtype=dtype)
    g = torch.Generator().manual_seed(1)
    logprob = plain(h.double(), w.double(), b.double(), target, target, 0.8, 4.0)[0].cpu()
    old, ref = (logprob + 0.4 * torch.randn(N, generator=g, dtype=torch.float64) for _ in range(2))
    if far:  # beyond the cap on log-ratios
        old[:2], ref[2] = logprob[:2] - 25, logprob[2] + 25
    advantage = torch.tensor([1.0, -2.0, 0.5, -0.5, 0.0, 3.0])
    ids, mask = torch.randint(0, 5, (N,), generator=g), torch.rand(N, generator=g) < 0.7
    mask[:3], ids[:3] = True, torch.tensor([0, 1, 2])
    old[~mask], ids[~mask] = torch.nan, 99  # what a foreign token holds is never read
    h[~mask.to(DEVICE)] = torch.nan
    return (h, w, b, target), [x.to(DEVICE) for x in (old.float(), ref.float(), advantage, mask, ids)]


def exact_loss(head, tokens, dtype, form, per_sequence, kl, beta, dual_clip, scale):
    """(sums, gradients) from the reference loss on plain log-probs in ``dtype``."""
    h, w, b = (x.detach().to(dtype).requires_grad_() for x in head[:3])
    old, ref, advantage, mask, ids = tokens
    out = plain(torch.where(mask[:, None], h, 0), w, b, head[3], head[3], 0.8, 4.0)
    _, metrics = found = policy_loss(
        out[0], old.to(dtype), advantage.to(dtype), mask, ids, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip,
        form=form, aggregation="sequence-mean" if per_sequence else "token-mean", denominator=1.0,
        ref_logprob=ref.to(dtype) if beta else None, beta=beta, kl=kl,
    )  # fmt: skip
    sums = [found[0], *(metrics.get(name, torch.zeros(())) for name in SUMS[1:]), out[2][mask].sum()]
    return torch.stack([x.detach().double().to(DEVICE) for x in sums]), torch.autograd.grad(found[0] * scale, (h, w, b))


@pytest.mark.parametrize(
    ("dtype", "form", "per_sequence", "kl", "beta", "dual_clip", "tight"),
    [
        (torch.float32, "clip", False, "k3", 0.1, None, False),
        (torch.float32, "clip", True, "k1", 0.1, 3.0, True),
        (torch.float32, "cispo", False, "k2", 0.1, None, False),
        (torch.float32, "reinforce", True, "k3", 0.0, None, True),
        (torch.bfloat16, "clip", False, "k3", 0.1, 1.5, False),
        (torch.bfloat16, "cispo", True, "k3", 0.0, None, True),
        (torch.float16, "reinforce", False, "k2", 0.1, None, False),
    ],
)
def test_policy_loss_equals_the_reference(monkeypatch, dtype, form, per_sequence, kl, beta, dual_clip, tight):
    module = "fastcollab.kernels.linear_policy_loss"
    monkeypatch.setattr(f"{module}._ROW_IDS", 64)
    monkeypatch.setattr(f"{module}._DZ_IDS", 64)
    if tight:
        monkeypatch.setattr(f"{module}._BUFFER_BYTES", 80 * 4 * 18)
    head, tokens = loss_inputs(dtype, far=form == "clip" and dual_clip is None)
    args = form, per_sequence, kl, beta, dual_clip, 0.25
    got, *grads = linear_policy_loss_forward(
        *head, 0.8, 4.0, True, tokens[0], tokens[1] if beta else None, *tokens[2:], 0.2, 0.3, dual_clip or 0.0,
        ["clip", "cispo", "reinforce"].index(form), per_sequence, beta, int(kl[1]), 0.25, True, True, True,
    )  # fmt: skip
    want, want_grads = exact_loss(head, tokens, torch.float64, *args)
    assert got.dtype == torch.float64 and got.shape == (13,)
    assert (got[7:11] == want[7:11]).all() and (got[1:3] == want[1:3]).all()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    if dtype == torch.float16:  # torch's CPU has no fp16 reference worth the name: one rounding of dz and of the result
        same_grads = [x.to(dtype).double() for x in want_grads]
    else:
        same_grads = exact_loss(head, tokens, dtype, *args)[1]
    for a, s, e, x in zip(grads, same_grads, want_grads, head[:3], strict=True):
        assert a.dtype == x.dtype and a.shape == x.shape
        judged(a, s, e, dtype, "gradient")
    assert (grads[0][~tokens[3]] == 0).all()


def call(head, tokens, need=(True, True, True)):
    old, ref, *rest = tokens
    return linear_policy_loss_forward(
        *head, 1.0, 0.0, False, old, ref, *rest, 0.2, 0.2, 0.0, 0, False, 0.1, 3, 0.5, *need
    )


def test_policy_loss_of_few_or_no_kept_rows():
    head, tokens = loss_inputs(N=5)
    tokens[3] = torch.zeros_like(tokens[3])
    sums, *grads = call(head, tokens)
    assert sums.tolist() == [0, 0, 0, 0, torch.inf] + [0] * 8
    assert all((g == 0).all() and g.shape == x.shape for g, x in zip(grads, head[:3], strict=True))
    tokens[3][1] = True
    sums, *grads = call(head, tokens)
    assert sums[1] == sums[2] == 1 and [(g != 0).any().item() for g in grads] == [True] * 3
    some = call(head, tokens, (False, True, False))
    assert torch.equal(some[2], grads[1]) and some[1].numel() == some[3].numel() == 0


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        (0, torch.nan, r"token 1 of segment 1: got \{'old_logprob': nan"),
        (2, torch.inf, "token 1 of segment 1: got .*'advantage': inf"),
        (4, 6, r"segment_ids: got 6 at token 1, need in \[0, 6\)"),
    ],
)
def test_policy_loss_refuses(which, value, message):
    head, tokens = loss_inputs(N=5)
    tokens[which][1] = value
    with pytest.raises(ValueError, match=message):
        call(head, tokens)


def test_policy_loss_names_the_row_without_a_law():
    head, tokens = loss_inputs(N=5)
    head[0][2, 0] = torch.nan
    with pytest.raises(ValueError, match="linear_policy_loss, row 2: got log-sum-exp nan"):
        call(head, tokens)


def test_policy_loss_where_the_own_target_is_forbidden():
    head, tokens = loss_inputs(N=5)
    head[2][head[3][1]] = -torch.inf
    with pytest.raises(ValueError, match="token 1 of segment 1: got {'logprob': -inf}"):
        call(head, tokens)


class Waits(TorchDispatchMode):
    """Counts what a device would be waited for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.seen += [name] if name in ("aten._local_scalar_dense.default", "aten.nonzero.default") else []
        return function(*args, **(kwargs or {}))


def test_waits_for_the_device():
    given = inputs(N=3, V=30)
    with Waits() as waits:
        linear_logprob_forward(*given, 1.0, 0.0, True, True)
    assert len(waits.seen) == 1  # is all well
    head, tokens = loss_inputs(N=5)
    with Waits() as waits:
        call(head, tokens)
    assert len(waits.seen) == 2  # the number of kept rows, and that


@pytest.fixture
def loose_matmul():
    """The user allows TF32 and sums in bf16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = "tf32", True
    yield matmul
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = before


def test_library_gemms_do_not_follow_the_users_flags(loose_matmul, monkeypatch):
    seen, mm = [], torch.mm

    def spy(*args, **kwargs):
        seen.append((loose_matmul.fp32_precision, loose_matmul.allow_bf16_reduced_precision_reduction))
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", spy)
    x = torch.eye(16, device=DEVICE)
    out = torch.empty_like(x)
    gemm.product(x, x, out)
    assert torch.equal(out, x) and seen == [("ieee", False)]
    assert (loose_matmul.fp32_precision, loose_matmul.allow_bf16_reduced_precision_reduction) == ("tf32", True)
