"""Steps and cuts by the bytes of generated ids, with random tokenisations of random texts (mintrl 6.5, 6.6)."""

from __future__ import annotations

import functools
import random
import re

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastcollab import tiny
from fastcollab.steps import _FENCED, Steps, blank_lines, code_fences

PIECES = ["So x = 5.", "数学は", "é", "naïve ", "🙂🙃", " Then", "1+9", "\n", "\n\n", ".\n\nNext", " \n \n", "\t"]
PIECES += ["  a", "```", "```py\n", "\r\n\r\n", "REVISE 2", "…\n\n数"]


@functools.cache
def byte_bpe(size: int = 420, seed: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens cross spaces, step borders and characters; <eos> is special, <think> is added."""
    rng = random.Random(seed)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<eos>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(["".join(rng.choices(PIECES, k=12)) for _ in range(300)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("数Ġ", normalized=False)])
    return tokenizer


@functools.cache
def metaspace_bpe() -> PreTrainedTokenizerFast:
    """As Llama-2's: a dummy space before the text, ▁ for spaces, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "\n", ".", "▁a", "▁a."]
    merges = [("▁", "a"), ("▁a", ".")]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    bpe = Tokenizer(model)
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", unk_token="<unk>")


@functools.cache
def by_bytes() -> dict[bytes, int]:
    return {b: i for i, b in enumerate(Steps(byte_bpe()).bytes) if b}


def tokenise(data: bytes, rng: random.Random) -> list[int]:
    """A random segmentation into ids of ``byte_bpe``, seldom the canonical one."""
    table, ids, at = by_bytes(), [], 0
    while at < len(data):
        n = rng.choice([n for n in range(1, 13) if data[at : at + n] in table and at + n <= len(data)])
        ids.append(table[data[at : at + n]])
        at += n
    return ids


def ids_of(*pieces: str) -> list[int]:
    """One id per piece, whatever the merges say: those of a vocabulary made of the pieces."""
    return list(range(1, len(pieces) + 1))


def steps_of(*pieces: str | bytes, boundary="text") -> Steps:
    """Steps of a vocabulary whose ids 1, 2, … write ``pieces``; 0 writes nothing, as an EOS does."""
    steps = Steps(byte_bpe(), boundary)
    steps.bytes = [b"", *(p if isinstance(p, bytes) else p.encode() for p in pieces)]
    return steps


def starts(*pieces: str | bytes, boundary="text", start=0, end=()) -> list[int]:
    return [s.start for s in steps_of(*pieces, boundary=boundary).split([*ids_of(*pieces), *end], start)]


def test_bytes_are_those_that_the_tokenizer_decodes():
    rng = random.Random(1)
    for tokenizer in (byte_bpe(), AutoTokenizer.from_pretrained(tiny.senior())):
        steps = Steps(tokenizer)
        for _ in range(200):
            ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 30))]
            assert steps.text(ids) == tokenizer.decode(ids, skip_special_tokens=True)
            assert steps.offsets(ids)[-1] == len(steps.written(ids))
    assert Steps(byte_bpe()).text(byte_bpe().convert_tokens_to_ids(["<think>", "<eos>", "数Ġ"])) == "<think>数Ġ"
    meta = metaspace_bpe()
    steps = Steps(meta)
    for _ in range(200):
        ids = [rng.randrange(len(meta)) for _ in range(rng.randrange(1, 30))]
        ids = [i for i in ids if not 2 <= i < 258]  # a stray byte is no text to compare
        text = steps.text(ids)
        assert meta.decode(ids, skip_special_tokens=True) == text.removeprefix(" ")
    assert steps.written([2 + 0xC3, 2 + 0xA9]).decode() == "é"


def test_where_steps_of_text_begin():
    """6.5: the first step begins at the chunk; whitespace is no step of its own."""
    assert starts("a", "\n\n", "b", "\n\n", "c") == [0, 2, 4]
    assert starts("a", "\n", "\n", "b", "\n", "c", "\n \t\n\n", "d") == [0, 3, 7]
    assert starts("\n\n", "a", "\n\n", "\n", "b", "\n\n", "\n") == [0, 4]
    assert starts("a", "\r\n\r\n", "b") == [0, 2]
    assert starts("\n\n", " ") == [0]
    steps = steps_of("a", "\n\n", "b")
    assert [s.text for s in steps.split([1, 2, 3, 2, 1])] == ["a\n\n", "b\n\n", "a"]


def test_a_cut_inside_a_token():
    """6.6: the straddling token stays if only whitespace lies beyond the boundary, else it goes."""
    assert starts("a", ".\n\n", "b") == [0, 2]
    assert starts("a", ".\n\n  ", "b") == [0, 2]
    assert starts("a", ".\n\nb", "c") == [0, 1]
    assert starts("a\n\nb\n\nc", "d") == [0, 0, 0]  # one token, three steps: each cut drops it
    assert starts("x", "a\n\nb\n\nc", "d") == [0, 1, 1]


def test_a_cut_never_splits_a_character():
    """6.6: it moves left to the edge of a code point, and never into what was accepted."""
    e = "é".encode()
    assert starts("a", e[:1], e[1:] + b"\n\nb", "c") == [0, 1]
    smile = "🙂".encode()
    assert starts("a", smile[:1], smile[1:2], smile[2:3], smile[3:] + b"\n\nb") == [0, 1]
    assert starts("a", smile[:1], smile[1:3], smile[3:] + b"\n\nb", "c", start=2) == [2, 2]
    stray = b"\x80" * 9  # no character: nothing to keep whole
    assert starts("a", stray, b"\x80\n\nb", "c") == [0, 2]
    assert starts("a", b"\xf0", "\n\n", "b") == [0, 3]  # a character that was broken off
    steps = steps_of("a", smile[:2], smile[2:])
    assert [steps.cut([1, 2, 3], n) for n in range(6)] == [0, 1, 1, 1, 1, 3]


def test_eos_belongs_to_the_last_step():
    """6.11: dropping the step drops the EOS; one that stands alone can be dropped as well."""
    assert starts("a", "\n\n", "b", end=[0]) == [0, 2]
    assert starts("a", "\n\n", end=[0]) == [0]
    steps = steps_of("a")
    assert steps.split([0]) == [(0, "")] and steps.split([1, 0], 1) == [(1, "")]


def test_a_chunk_is_split_in_its_context():
    """A separator may be written across the seam, a fence be open before it."""
    assert starts("a", "\n", "\n", "b", "\n\n", "c", start=2) == [2, 5]
    pieces = ("```py\n", "x\n\n", "y\n", "```\n", "z")
    assert starts(*pieces, boundary="code", start=1) == [1, 4]
    assert starts(*pieces, boundary="text", start=1) == [1, 2]


@pytest.mark.parametrize(
    "text, want",
    [
        ("Say\n```py\nx\n\ny\n```\nDone.\n\nEnd", ["Say\n", "```py\nx\n\ny\n```\n", "Done.\n\n", "End"]),
        ("~~~\na\n```\nb\n~~~\nc", ["~~~\na\n```\nb\n~~~\n", "c"]),
        ("a\n````\n```\n\n````\nb", ["a\n", "````\n```\n\n````\n", "b"]),
        ("a\n```py\nx\n\ny", ["a\n", "```py\nx\n\ny"]),  # still open
        ("use ```x``` so\n\nb", ["use ```x``` so\n\n", "b"]),
        ("```x```\na\n\nb", ["```x```\na\n\n", "b"]),
    ],
)
def test_where_steps_of_code_begin(text, want):
    ends = code_fences(text)
    inner = [at for at in ends if 0 < at < len(text)]
    assert [text[a:b] for a, b in zip([0, *inner], [*inner, len(text)], strict=True)] == want
    assert [s.text for s in steps_of(text, boundary="code").split([1])] == want


def test_boundaries_of_the_user():
    assert starts("a", "\n", "b", "\n", boundary=re.compile(r"\n")) == [0, 2]
    assert starts("数", ";", "é", ";", "b", boundary=lambda text: [2, 4, 2]) == [0, 2, 4]  # offsets are characters
    tokenizer = AutoTokenizer.from_pretrained(tiny.senior())
    steps = Steps(tokenizer, re.compile(r"\n"))
    ids = tokenizer("\n 1 + 0 = 1\n 1 + 9 = 10\n answer 15", add_special_tokens=False)["input_ids"]
    assert [s.text for s in steps.split(ids)] == ["\n 1 + 0 = 1\n", " 1 + 9 = 10\n", " answer 15"]
    assert [tokenizer.decode(ids[s.start]) for s in steps.split(ids)] == ["\n", " 1", " answer"]


def test_ends_step_says_when_a_chunk_may_end():
    steps = steps_of("a", "\n", "\n\n", " ", "b")
    assert [steps.ends_step(ids) for ids in ([1], [1, 2], [1, 2, 2], [1, 3, 4], [1, 3, 5], [])] == [0, 0, 1, 1, 0, 0]
    code = steps_of("```py\n", "x\n\n", "```\n", "a\n", boundary="code")
    assert [code.ends_step(range(1, n)) for n in range(2, 6)] == [0, 0, 1, 0]
    assert Steps(byte_bpe()).may_end.tolist() == [b"\n" in b for b in Steps(byte_bpe()).bytes]
    assert Steps(byte_bpe(), re.compile("x")).may_end.all()


@pytest.mark.parametrize(
    "boundary", ["text", "code", re.compile(r"\n"), lambda t: [m.end() for m in re.finditer("x|数", t)]]
)
def test_cuts_of_random_tokenisations(boundary):
    """Whatever the ids: steps cover the text, and what a cut keeps is whole characters up to the step, as many ids as
    that allows."""
    rng, steps, bent = random.Random(2), Steps(byte_bpe(), boundary), 0
    for trial in range(300):
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 14)))
        ids = tokenise(text.encode(), rng) + [0] * (trial % 2)
        start = rng.randrange(len(ids)) if trial % 3 == 0 else 0
        found, data, offsets = steps.split(ids, start), text.encode(), steps.offsets(ids)
        assert b"".join(s.text.encode() for s in found) == data[offsets[start] :] or start
        assert found[0].start == start and all(start <= s.start < len(ids) for s in found)
        assert [s.start for s in found] == sorted(s.start for s in found)
        begin = len(data) - len("".join(s.text for s in found).encode()) if not start else offsets[start]
        for s, before in zip(found[1:], found, strict=False):
            begin += len(before.text.encode()) if "\ufffd" not in before.text else 0
            if any("\ufffd" in x.text for x in found):
                continue  # the chunk itself began inside a character
            kept = data[: offsets[s.start]]
            kept.decode()
            if len(kept) > begin:
                assert not kept[begin:].strip()
            else:
                later = [t for t in range(s.start + 1, len(ids) + 1) if offsets[s.start] < offsets[t] <= begin]
                assert all(_inside(data, offsets[t]) for t in later)
            bent += len(kept) != begin
    assert bent or boundary == "code"


def _inside(data: bytes, at: int) -> bool:
    try:
        data[:at].decode()
    except UnicodeDecodeError:
        return True
    return False


def test_cuts_of_random_ids():
    """No text at all behind them: still in range, in order, and no ids lost."""
    rng, steps = random.Random(3), Steps(byte_bpe())
    for _ in range(300):
        ids = [rng.randrange(len(byte_bpe())) for _ in range(rng.randrange(1, 40))]
        found = [s.start for s in steps.split(ids)]
        assert found[0] == 0 and found == sorted(found) and found[-1] < len(ids)
        size = len(steps.written(ids))
        edges = [steps.cut(ids, at) for at in range(size + 1)]
        assert edges == sorted(edges) and all(0 <= e <= len(ids) for e in edges)


def test_bad_input_is_named():
    steps = Steps(byte_bpe())
    for call, message in [
        (lambda: Steps(byte_bpe(), "math"), "boundary: got 'math', need 'text', 'code', a compiled pattern"),
        (lambda: Steps(byte_bpe(), 3), "boundary: got 3, need"),
        (lambda: steps.split([1], 1), r"start: got 1, need in 0\.\.0"),
        (lambda: steps.split([]), "start: got 0, need"),
        (lambda: steps.split([1, 99999]), r"ids: got \[99999\], need in 0"),
        (lambda: steps.cut([1], -1), "at: got -1, need >= 0"),
        (lambda: Steps(byte_bpe(), lambda text: [99]).split([5]), r"boundary: got 99, need offsets in 0\.\."),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert blank_lines("a\nb") == []


def test_blank_lines_inside_fences_are_found_as_a_plain_loop_finds_them():
    rng = random.Random(4)
    for _ in range(3000):
        text = "".join(rng.choices(["```", "~~~", "\n", "\n\n", "a", " ", "````", "py\n"], k=rng.randrange(30)))
        blocks = list(_FENCED.finditer(text))
        outside = {at for at in blank_lines(text) if not any(m.start() < at <= m.end() for m in blocks)}
        edges = {m.start() for m in blocks} | {m.end() for m in blocks if m[2] is not None}
        assert code_fences(text) == sorted(outside | edges)


def test_a_vocabulary_is_read_once_until_it_changes():
    """An Intervene for each call of generate made it 1 s a call with 150,000 ids."""
    tokenizer = byte_bpe.__wrapped__(seed=5)
    first = Steps(tokenizer).bytes
    assert Steps(tokenizer, "code").bytes is first and Steps(byte_bpe()).bytes is not first
    tokenizer.add_tokens(["<new>"])
    assert Steps(tokenizer).bytes == [*first, b"<new>"]
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert Steps(tokenizer).bytes == [*first, b""]
