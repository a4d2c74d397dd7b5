"""The sampling operator: one law in every implementation, its filters against a naive version, its edge rows."""

from __future__ import annotations

import pytest
import torch

from fastcollab import ops

native = pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))
IMPLS = ["reference", pytest.param("native", marks=native)]


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, key=None, position=0, epoch=0, impl=None):
    """ops.sample with scalars or per-row lists."""
    n = len(logits)

    def full(value, dtype):
        value = torch.as_tensor(value)
        return value.to(dtype).expand(n).contiguous()

    args = (
        logits,
        full(temperature, torch.float32),
        full(top_k, torch.int32),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        torch.arange(n) * 7919 if key is None else full(key, torch.int64),
        full(position, torch.int32),
        full(epoch, torch.int32),
    )
    if impl is None:
        return ops.sample(*args)
    with ops.use_impl(impl):
        return ops.sample(*args)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 5, 64, 100, 3001])
def test_native_draws_what_the_reference_draws(vocab, dtype):
    """Every row has its own temperature and filters, greedy and plain rows among them, in one call."""
    rows = 600 if vocab < 1000 else 150
    g = torch.Generator().manual_seed(vocab)

    def pick(*values):
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=g)]

    logits = (torch.randn(rows, vocab, generator=g) * pick(0.1, 3.0, 30.0)[:, None]).to(dtype)
    logits[torch.rand(rows, vocab, generator=g) < 0.1] = -torch.inf
    logits[:, vocab // 2] = 0.5
    law = dict(
        temperature=pick(0.0, 0.3, 0.7, 1.0, 1.9),
        top_k=pick(0, 0, 1, 3, 50, 10_000),
        top_p=pick(1.0, 1.0, 0.95, 0.5, 1e-6, 0.999999),
        min_p=pick(0.0, 0.0, 0.02, 0.5, 1.0),
        key=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        position=torch.randint(0, 5000, (rows,), generator=g),
        epoch=pick(0, 1, 9),
    )
    ours, spec = draw(logits, **law, impl="native"), draw(logits, **law, impl="reference")
    assert torch.equal(ours[0], spec[0])
    for mine, theirs in zip(ours[1:], spec[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-7, atol=3e-7)
    temperature = torch.where(law["temperature"] == 0, 1.0, law["temperature"])[:, None]

    def logprob(x):
        return (x / temperature.to(x)).log_softmax(-1).gather(1, ours[0][:, None])[:, 0].double()

    truth = logprob(logits.double())
    error, allowed = (ours[1] - truth).abs().max(), (logprob(logits.float()) - truth).abs().max()
    assert error <= 2 * allowed + 3e-7


@pytest.mark.parametrize("impl", IMPLS)
def test_frequencies_follow_the_softmax(impl):
    rows = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, -torch.inf])
    id, logprob, kept = draw(logits.expand(rows, -1), temperature=0.8, key=torch.arange(rows), impl=impl)
    p = (logits / 0.8).softmax(0)
    count = torch.bincount(id, minlength=7)
    assert count[6] == 0
    chi2 = ((count - rows * p)[:6] ** 2 / (rows * p)[:6]).sum()
    assert chi2 < 20.5  # 5 degrees of freedom, p = 0.001
    torch.testing.assert_close(logprob, p.log()[id], rtol=1e-6, atol=1e-6)
    assert (kept == 1).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_draws_are_independent_over_positions_epochs_and_keys(impl):
    rows = 20_000
    logits = torch.zeros(rows, 2)
    a = draw(logits, key=11, position=torch.arange(rows), impl=impl)[0].double()
    assert abs(float(a.mean()) - 0.5) < 4 * 0.5 / rows**0.5
    for other in (
        draw(logits, key=11, position=torch.arange(rows) + 1, impl=impl)[0],
        draw(logits, key=11, position=torch.arange(rows), epoch=1, impl=impl)[0],
        draw(logits, key=12, position=torch.arange(rows), impl=impl)[0],
    ):
        assert abs(float(torch.corrcoef(torch.stack([a, other.double()]))[0, 1])) < 0.03
    assert torch.equal(a.long(), draw(logits, key=11, position=torch.arange(rows), impl=impl)[0])


def naive_kept(x, k, p, min_p):
    """Token ids kept and their mass, by the definition, one row in Python."""
    ranked = sorted(range(len(x)), key=lambda v: (-x[v], v))
    if k:
        ranked = ranked[:k]
    law = torch.tensor([x[v] for v in ranked]).double().softmax(0)
    probability = dict(zip(ranked, law.tolist(), strict=True))
    kept, mass = [], 0.0
    for v in ranked:
        if not kept or mass < p:
            kept.append(v)
            mass += probability[v]
    most = max(probability[v] for v in kept)
    kept = [v for v in kept if probability[v] >= min_p * most]
    whole = torch.tensor(x).double().softmax(0)
    return set(kept), float(whole[kept].sum())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("law", [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.7, 0.03), (3, 0.99, 0.3)], ids=str)
def test_filters_keep_what_the_definition_keeps(law, impl):
    g = torch.Generator().manual_seed(3)
    draws = 400
    for vocab in (11, 130):
        x = torch.randn(vocab, generator=g) * 1.5
        expected, mass = naive_kept(x.tolist(), *law)
        k, p, min_p = law
        id, _, kept = draw(x.expand(draws, -1), 1.0, k, p, min_p, key=torch.arange(draws), impl=impl)
        assert set(id.tolist()) <= expected
        torch.testing.assert_close(kept, torch.full_like(kept, mass), rtol=1e-6, atol=1e-6)
        inside = torch.full((vocab,), -torch.inf)
        inside[list(expected)] = x[list(expected)]
        assert torch.equal(id, draw(inside.expand(draws, -1), key=torch.arange(draws), impl=impl)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_ties(impl):
    flat = torch.zeros(300, 100)
    assert (draw(flat, temperature=0.0, impl=impl)[0] == 0).all()
    assert (draw(flat, top_k=1, impl=impl)[0] == 0).all()
    id, _, kept = draw(flat, top_k=3, impl=impl)  # equal values: the lowest ids stay
    assert set(id.tolist()) == {0, 1, 2} and torch.allclose(kept, torch.tensor(0.03))
    id, _, kept = draw(flat, top_p=0.25, impl=impl)  # 25 tokens reach a quarter exactly
    assert set(id.tolist()) == set(range(25)) and torch.allclose(kept, torch.tensor(0.25))
    assert (draw(flat, min_p=1.0, impl=impl)[2] == 1).all()
    peak = torch.tensor([[1.0, 3.0, 3.0, -torch.inf]])
    assert draw(peak, temperature=0.0, impl=impl)[0].item() == 1


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_beyond_the_reach_of_noise(impl):
    big = torch.tensor([[1e9, 3e9, 2e9], [1.0, 5e8, 5.5e8], [-1e9, -3e9, -9e8]])
    for law in ({}, {"top_k": 2}, {"temperature": 0.0}):
        assert draw(big, **law, impl=impl)[0].tolist() == [1, 2, 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_without_a_law_are_marked_and_alone(impl):
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    clean = draw(logits, impl=impl)
    logits[0, 69] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, 1:] = -torch.inf
    id, logprob, kept = draw(logits, top_k=[0, 4, 0, 4, 0], impl=impl)
    assert id[:3].tolist() == [-1, -1, -1] and logprob[:3].isnan().all() and kept[:3].isnan().all()
    assert (id[3], logprob[3], kept[3]) == (0, 0, 1)  # one token left
    assert (id[4], logprob[4]) == (clean[0][4], clean[1][4])
    assert draw(logits[:0], impl=impl)[0].shape == (0,)


@pytest.mark.parametrize("impl", IMPLS)
def test_greedy_ignores_filters_and_reports_temperature_one(impl):
    logits = torch.randn(40, 90, generator=torch.Generator().manual_seed(0))
    id, logprob, kept = draw(logits, temperature=0.0, top_k=3, top_p=0.1, min_p=0.9, impl=impl)
    assert torch.equal(id, logits.argmax(1)) and (kept == 1).all()
    torch.testing.assert_close(logprob, logits.log_softmax(1).amax(1))


@native
def test_a_row_is_the_same_alone_and_strided():
    wide = torch.randn(40, 2, 333, generator=torch.Generator().manual_seed(0)) * 3
    rows, keys = wide[:, 1], torch.arange(40) * 31
    whole = draw(rows, 0.9, [0, 5] * 20, key=keys)
    for r in range(40):
        alone = draw(rows[r : r + 1].contiguous(), 0.9, [0, 5][r % 2], key=keys[r])
        assert all(torch.equal(a, b[r : r + 1]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(temperature=-1.0), "temperature: got .*-1.*need"),
        (dict(temperature=torch.inf), "temperature: got .*inf.*need"),
        (dict(top_k=-2), "top_k: got .*-2.*need >= 0"),
        (dict(top_p=0.0), r"top_p: got .*0.*need in \(0, 1\]"),
        (dict(min_p=1.5), r"min_p: got .*1\.5.*need in \[0, 1\]"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_bad_settings(change, message, impl):
    with pytest.raises(ValueError, match=message):
        draw(torch.zeros(2, 4), **change, impl=impl)


@native
@pytest.mark.parametrize("vocab", [32_768, 151_936])
def test_large_vocabularies(vocab):
    """Tiles that can't win are skipped: the result must not show it."""
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(3, vocab, generator=g) * torch.tensor([[0.01], [2.0], [6.0]])
    for law in ({}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}):
        ours, spec = draw(logits, **law, impl="native"), draw(logits, **law, impl="reference")
        assert torch.equal(ours[0], spec[0])
        torch.testing.assert_close(ours[1], spec[1], rtol=3e-7, atol=3e-7)
