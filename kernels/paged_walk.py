"""Online softmax of a tile of queries over the keys of one row: the inner loop of paged attention."""

from __future__ import annotations

import triton
import triton.language as tl

POOL, BOTH, NEW = (tl.constexpr(i) for i in range(3))  # where a step finds its keys


@triton.jit
def _tanh(x):
    """tanh to fp32 rounding: a polynomial near 0, where 1 - exp(-2 |x|) cancels (Cephes' tanhf)."""
    z = x * x
    near = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = x + x * z * (near - 3.33332819422e-1)
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _load(page, fresh, in_pool, is_new, column, WIDTH: tl.constexpr, FROM: tl.constexpr, like):
    """[keys, width] from addresses per key, 0 where there is no key; new ones are rounded as the pool rounds them."""
    column_ok = column[None, :] < WIDTH
    if FROM != NEW:
        old = tl.load(page[:, None] + column[None, :], mask=in_pool[:, None] & column_ok, other=0.0)
    if FROM != POOL:
        new = tl.load(fresh[:, None] + column[None, :], mask=is_new[:, None] & column_ok, other=0.0)
        new = new.to(page.dtype.element_ty)
        old = tl.where(in_pool[:, None], old, new) if FROM == BOTH else new
    return old.to(like.dtype)


@triton.jit
def load_query(address, valid, first, PART: tl.constexpr, DK: tl.constexpr):
    column = first + tl.arange(0, PART)
    return tl.load(address[:, None] + column[None, :], mask=valid[:, None] & (column[None, :] < DK), other=0.0)


@triton.jit
def walk(
    query, address, valid, top, mass, acc, at, first, end, low, stop, old, begin, source, scale, softcap, window,
    DK: tl.constexpr, KP: tl.constexpr, PART: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    FROM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over key steps first .. end. Queries are at positions ``at``; base-2 logits. -> top, mass, acc."""
    table, k, v, k_pool, v_pool, k_token, v_token, k_block, k_slot, v_block, v_slot = source
    dv = tl.arange(0, acc.shape[1])
    for step in tl.range(first, end, num_stages=STAGES):
        position = step * KEYS + tl.arange(0, KEYS)
        in_pool = (position >= low) & (position < old)
        is_new = (position >= old) & (position < stop)
        if FROM == NEW:
            k_page, v_page = k_pool + position, v_pool + position  # only their type is used
        else:
            page = tl.load(table + position // PAGE, mask=in_pool, other=0).to(tl.int64)
            k_page = k_pool + page * k_block + (position % PAGE) * k_slot
            v_page = v_pool + page * v_block + (position % PAGE) * v_slot
        token = (begin + position - old).to(tl.int64)
        score = tl.zeros([query.shape[0], KEYS], tl.float32)
        for i in tl.static_range(KP // PART):
            if PART < KP:  # the query does not fit beside the keys
                query = load_query(address, valid, i * PART, PART, DK)
            dk = i * PART + tl.arange(0, PART)
            key = _load(k_page, k + token * k_token, in_pool, is_new, dk, DK, FROM, query)
            score = tl.dot(query, tl.trans(key), score, input_precision="ieee")
        score *= scale
        if SOFTCAP:
            score = softcap * _tanh(score)
        if WINDOW:
            score = tl.where(position[None, :] > at[:, None] - window, score, -float("inf"))
        if FROM != POOL:
            score = tl.where(position[None, :] <= at[:, None], score, -float("inf"))
        now = tl.maximum(top, tl.max(score, 1))
        base = tl.where(now == -float("inf"), 0.0, now)  # no key was visible yet
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weight, 1)
        value = _load(v_page, v + token * v_token, in_pool, is_new, dv, DV, FROM, query)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = now
    return top, mass, acc
