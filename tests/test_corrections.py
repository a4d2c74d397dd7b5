"""Corrections: each rule of mintrl 6.7–6.18 by hand, and what holds for any text and any ids."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest
from test_steps import PIECES, byte_bpe, metaspace_bpe, tokenise
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from fastcollab import tiny
from fastcollab.corrections import MARKERS, REASONS, CorrectionRules, gives_answer
from fastcollab.steps import Steps

KEPT = tokenise(b"So x = 5.\n\n", random.Random(0))
ROOM = 1000
BACKEND = byte_bpe().backend_tokenizer.to_str()


def rules(boundary="text", max_tokens=60, tokenizer=None, **options) -> CorrectionRules:
    return CorrectionRules(Steps(tokenizer or byte_bpe(), boundary), max_tokens, **options)


def ids(text: str, seed: int = 0) -> list[int]:
    return tokenise(text.encode(), random.Random(seed))


def test_a_correction_is_encoded_on_its_own():
    """6.17: ids of the text alone, no re-tokenising across the seam; ids of the policy's own vocabulary as they are."""
    done = rules()("Then y = 1+9.\n\n", KEPT, ids("Then y = 2"), ROOM)
    assert done.reason is None and done.text == "Then y = 1+9.\n\n"
    assert list(done.ids) == byte_bpe().encode("Then y = 1+9.\n\n")
    own = ids("Then y = 1+9.", 3)
    assert own != byte_bpe().encode("Then y = 1+9.") and list(rules()(own, KEPT, [], ROOM).ids) == own


def test_longer_than_the_limit():
    """6.7: a hard stop, back to the last end of a step or sentence; without one all of the ids that are allowed."""
    text = "One is 3.14. Two is so.\n\nThree goes on and on"
    encoded = byte_bpe().encode(text)
    size = lambda part: len(byte_bpe().encode(part))  # noqa: E731
    for limit, want in [
        (len(encoded), text),
        (len(encoded) - 1, "One is 3.14. Two is so.\n\n"),
        (size("One is 3.14. Two"), "One is 3.14."),
    ]:
        done = rules(max_tokens=limit)(text, KEPT, [], ROOM)
        assert done.reason is None and done.text.strip() == want.strip() and len(done.ids) <= limit
        assert list(done.ids) == encoded[: len(done.ids)]
    done = rules(max_tokens=4)(text, KEPT, [], ROOM)
    assert list(done.ids) == encoded[:4] and done.reason is None  # "3." is no end
    table = {b: i for i, b in enumerate(Steps(byte_bpe()).bytes)}
    fused = [*ids("A is. B"), table[b".\n\nNext"]]  # the end that its last token holds lies beyond the limit
    assert rules(max_tokens=len(fused) - 1)(fused, KEPT, [], ROOM).text.strip() == "A is."
    for limit in range(1, 6):  # whole characters only
        done = rules(max_tokens=limit)("🤖🤖", KEPT, [], ROOM)
        assert (done.text, done.reason) in {("🤖", None), ("", "noop")} and limit >= len(done.ids)


@pytest.mark.parametrize("raw", ["", " \n\t", "<|im_end|>", " Then y = 2", "Then y", "Then y = 2 and more of"])
def test_a_correction_without_news_is_a_noop(raw):
    """6.8: empty, whitespace, or what the dropped text begins with."""
    done = rules()(raw, KEPT, ids("Then y = 2 and more of it\n\n", 1), ROOM)
    assert (done.ids, done.reason) == ((), "noop")
    assert rules()(ids(raw), KEPT, ids("Then y = 2 and more of it\n\n", 2), ROOM).reason == "noop"


def test_part_of_a_word_is_news():
    assert rules()("Then y = 2", KEPT, ids("Then y = 25"), ROOM).reason is None
    assert rules()(ids("Then y = 2", 1), KEPT, ids("Then y = 25", 2), ROOM).reason is None
    assert rules()(ids("Then y = 2"), KEPT, [*ids("Then y = 2"), *ids("5")], ROOM).reason == "noop"  # c[e : e + |h|]


@pytest.mark.parametrize(
    "raw",
    [
        "So y.<|im_end|>",
        "<|im_start|>assistant\nSo y.<|im_end|>\n<|im_start|>user\nREVISE 1",
        "<|start_header_id|>assistant<|end_header_id|>\n\nSo y.<|eot_id|>",
        "<s> So y.</s> So z.",
        "So y.<eos>more",
        "So y.<｜end▁of▁sentence｜>",
        "<start_of_turn>model\nSo y.<end_of_turn>",
        "So y.[/INST] and",
    ],
)
def test_markers_are_stripped(raw):
    """6.9: leading ones go; the first one behind the text ends it, for what follows is another turn."""
    assert rules()(raw, KEPT, [], ROOM).text.strip() == "So y."
    spelt = rules()(ids(raw), KEPT, [], ROOM)
    assert not MARKERS.search(spelt.text) and spelt.text.strip(" .<") in ("So y", "")
    assert rules()("<|im_end|>model it", KEPT, [], ROOM).text == "model it"
    stops = type(byte_bpe())(tokenizer_object=Tokenizer.from_str(BACKEND), eos_token="%END%")  # the policy's own
    assert rules(tokenizer=stops)("So y.%END%So z.", KEPT, [], ROOM).text == "So y."


def test_special_ids_are_stripped():
    """6.9: π_JI may never end the answer."""
    body = ids("So y.")
    assert list(rules()([0, *body, 0, *ids("more")], KEPT, [], ROOM).ids) == body
    assert rules()([0, 0], KEPT, [], ROOM).reason == "noop"
    stop = ids("!")[0]
    assert list(rules(stop_ids=(stop,))([*body, stop, *body], KEPT, [], ROOM).ids) == body


def test_an_eos_that_writes_text_is_stripped_too():
    """6.9: generation configs name ordinary ids as EOS (``eos_token_id: [2, 13]``); a text that holds one ended the
    answer, in the verifier's name."""
    encoded = byte_bpe().encode("Then y = 1+9.\n\nSo")
    stop = encoded[-1]
    done = rules(stop_ids=(stop,))("Then y = 1+9.\n\nSo", KEPT, [], ROOM)
    assert encoded.count(stop) == 1 and list(done.ids) == encoded[:-1] and done.reason is None
    assert rules(stop_ids=(encoded[0],))("Then y = 1+9.\n\nSo", KEPT, [], ROOM).reason == "noop"


def test_answers_given_away():
    """6.10, by default a box with the row's answer, in any form; or the user's own function."""
    row = {"answer": "1/2"}
    assert rules()("So it is \\boxed{\\frac12}.", KEPT, [], ROOM, row).reason == "leak"
    assert rules()("So it is \\boxed{3}.", KEPT, [], ROOM, row).reason is None
    assert rules()("So it is 1/2.", KEPT, [], ROOM, row).reason is None
    assert rules()("So it is \\boxed{3}.", KEPT, [], ROOM).reason is None
    assert gives_answer("\\boxed{7}", {"answer": 7}) and gives_answer("\\boxed{7}", {"answer": "so \\boxed{7.0}"})
    assert gives_answer("\\boxed{7}", {"gold": 7}, column="gold") and not gives_answer("\\boxed{7}", {"gold": 7})
    own = rules(leaks=lambda text, row: row["word"] in text)
    assert own("So Next", KEPT, [], ROOM, {"word": "Next"}).reason == "leak"
    assert own("So Then", KEPT, [], ROOM, {"word": "Next"}).reason is None


def test_room():
    """6.13: the correction and a reserve must fit."""
    n = len(byte_bpe().encode("So y."))
    assert rules(reserve=5)("So y.", KEPT, [], n + 5).reason is None
    assert rules(reserve=5)("So y.", KEPT, [], n + 4).reason == "room"


def test_between_vocabularies():
    """6.17: NFC where the tokenizer does not write the text back, else rejected; no id unknown, none special."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.senior())
    lines = rules(re.compile(r"\n"), tokenizer=tokenizer)
    kept = tokenizer.encode("\n 1 + 0 = 1\n", add_special_tokens=False)
    done = lines(" 1 + 9 = 10\n", kept, [], ROOM)
    assert done.text == " 1 + 9 = 10\n" and tokenizer.unk_token_id not in done.ids
    assert lines("Let us add", kept, [], ROOM).reason == "encoding"
    assert rules()("So \ud800y", KEPT, [], ROOM).reason == "encoding"
    line = tokenizer.encode(" 1 + 9", add_special_tokens=False)
    tabs = CorrectionRules(Steps(tokenizer, re.compile("\n"), separator="\t"), 9)  # which it cannot write
    assert tabs(line, line, [], ROOM).reason == tabs(" 1 + 9", line, [], ROOM).reason == "encoding"
    folding = metaspace_bpe()
    meta = rules(re.compile(r"\n"), tokenizer=folding)
    before = folding.encode("b.\n")
    for text in ("a. b", "é", "b"):  # no dummy space at the seam
        done = meta(text, before, [], ROOM)
        assert done.reason is None and done.text == text
    nfc = Tokenizer.from_str(BACKEND)
    nfc.normalizer = normalizers.NFC()
    composed = rules(tokenizer=type(byte_bpe())(tokenizer_object=nfc, eos_token="<eos>"))
    text = unicodedata.normalize("NFD", "naïve é")
    assert text != "naïve é" and composed(text, KEPT, [], ROOM).text == "naïve é"
    nfc.normalizer = normalizers.Lowercase()
    lower = rules(tokenizer=type(byte_bpe())(tokenizer_object=nfc, eos_token="<eos>"))
    assert lower("So Y", KEPT, [], ROOM).reason == "encoding"


@pytest.mark.parametrize(
    "boundary, kept, raw, want",
    [
        ("text", "So.\n\n", "\n\n Then", "Then"),  # the separator is there: left-trim
        ("text", "So.\n\n  ", " Then", "Then"),
        ("text", "So.", "Then", "\n\nThen"),  # none: exactly one
        ("text", "So.\n", " \n\nThen", "\nThen"),  # half of one
        ("text", "", "\nThen", "\nThen"),  # the opening: as it was written
        ("code", "```py\nx\n", "  a", "  a"),  # indentation is no separator
        ("code", "```py\nx\n", "\n\n  a", "  a"),
        ("code", "```py\nx", "  a", "\n  a"),
        (re.compile(r"\n"), "So\n", "\n\t\n 1+9\n", " 1+9\n"),
        (re.compile(r";"), "So;", "Then", "Then"),
    ],
)
def test_the_seam(boundary, kept, raw, want):
    """6.18, for text and for ids whose tokens end where the whitespace does."""
    assert rules(boundary)(raw, ids(kept), [], ROOM).text == want
    pieces = [ids(p) for p in re.split(r"(\s)", raw) if p]
    assert rules(boundary)([i for p in pieces for i in p], ids(kept), [], ROOM).text == want


def test_ids_that_fuse_whitespace_with_text_stay():
    """Nothing that another writer wrote as one token is encoded again."""
    table = {b: i for i, b in enumerate(Steps(byte_bpe()).bytes)}
    fused = table[b" Then"]
    assert rules()([table[b"\n"], fused], KEPT, [], ROOM).ids == (fused,)


def test_a_verifier_that_did_not_answer():
    assert rules()(None, KEPT, [], ROOM).reason == "unanswered"


def test_whatever_comes_in_what_comes_out_is_clean():
    rng = random.Random(4)
    noise = [*PIECES, "<|im_end|>", "<eos>", "\\boxed{7}", "e\u0301", "\ud83d"]
    seen = set()
    for trial in range(400):
        boundary = ["text", "code", re.compile(r"\n")][trial % 3]
        check = rules(boundary, max_tokens=rng.randrange(1, 20), reserve=rng.randrange(3))
        raw = "".join(rng.choices(noise, k=rng.randrange(6)))
        kept = ids("".join(rng.choices(PIECES, k=rng.randrange(4))), trial)
        dropped = ids("".join(rng.choices(PIECES, k=2)), trial)
        if trial % 2:
            raw = (
                [rng.randrange(len(byte_bpe())) for _ in range(rng.randrange(25))]
                if trial % 4 == 1
                else ids(raw.replace("\ud83d", ""))
            )
        room = rng.randrange(30)
        done = check(raw, kept, dropped, room, {"answer": "7"})
        seen.add(done.reason)
        assert (done.reason is None) == bool(done.ids) and done.reason in (None, *REASONS)
        if done.ids:
            assert 0 not in done.ids and len(done.ids) <= min(check.max_tokens, room - check.reserve)
            assert check.steps.text(done.ids) == done.text and done.text.strip() and not MARKERS.search(done.text)
            assert "boxed{7}" not in done.text and list(dropped[: len(done.ids)]) != list(done.ids)
            if isinstance(raw, str):
                assert done.text.strip() in unicodedata.normalize("NFC", raw) or done.text.strip() in raw
                assert not (kept and boundary == "text" and done.text.lstrip("\n")[0].isspace())
    assert seen >= {None, "noop", "leak", "room", "encoding"}


def test_bad_input_is_named():
    for call, message in [
        (lambda: rules(max_tokens=0), "max_tokens: got 0, need >= 1"),
        (lambda: rules(reserve=-1), "reserve: got -1, need >= 0"),
        (lambda: rules(leaks=None), "leaks: got None, need a function"),
        (lambda: rules()({"text": "a"}, [], [], ROOM), "correction: got {'text': 'a'}, need text, a list of ids"),
        (lambda: rules()([10**9], [], [], ROOM), r"ids: got \[1000000000\], need in 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
