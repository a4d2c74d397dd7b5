"""Values and calls over a pair of pipes between a trusted and an untrusted process; standard library only.

Plain values cross as data, of exactly the builtin types; anything else stays where it is and crosses as a number, a
``Remote`` on the other side. What arrives from an untrusted end is a claim of a value, never code, never an object.
"""

from __future__ import annotations

import builtins
import json
import os

MESSAGE = 8 << 20  # longest message between judge and program, bytes
SHOWN = 200  # characters of a value or an error in a reason
KNOWN = {  # plain enough to cross: (module, name) -> arguments that make an equal one
    ("collections", "deque"): lambda v: [list(v)],
    ("decimal", "Decimal"): lambda v: [str(v)],
    ("fractions", "Fraction"): lambda v: [v.numerator, v.denominator],
}


class ProgramGone(BaseException):
    """The program's process ended, or broke the protocol. A test's ``except Exception`` does not catch it."""


class Peer:
    """One end of the pipes between judge and program: asks for operations on the other side's objects, serves its own.

    ``operations`` is what this side permits the other to do to its objects.
    """

    def __init__(self, read: int, write: int, operations: dict) -> None:
        self.read, self.write, self.operations = read, write, operations
        self.kept: list = []  # own objects that the other side knows by number
        self.trace: list[str] = []  # what was called here, and what it gave
        self.gone: ProgramGone | None = None  # set once the other side failed, whatever a test caught
        self.copies_back = True  # whether lists, dicts and sets that were passed follow what the call did to them

    def encode(self, v):
        """JSON of a value: None, bool, str and list as such, {tag: body} for all else, subclasses as their base."""
        if v is None or isinstance(v, (bool, str)):
            return v
        if isinstance(v, int):
            return {"int": hex(v)}
        if isinstance(v, float):
            return {"float": float.hex(v)}
        if isinstance(v, list):
            return [self.encode(x) for x in v]
        if isinstance(v, dict):
            return {"dict": [[self.encode(k), self.encode(x)] for k, x in v.items()]}
        for kind in (tuple, set, frozenset):
            if isinstance(v, kind):
                return {kind.__name__: [self.encode(x) for x in v]}
        if isinstance(v, (bytes, bytearray)):
            return {"bytes" if isinstance(v, bytes) else "bytearray": v.hex()}
        if isinstance(v, complex):
            return {"complex": [v.real.hex(), v.imag.hex()]}
        if isinstance(v, Remote):
            return {"yours": object.__getattribute__(v, "_id")}
        known = (type(v).__module__, type(v).__name__)
        if known in KNOWN:
            return {"known": [*known, self.encode(KNOWN[known](v))]}
        if self.operations is CALLS and not callable(v):
            raise TypeError(f"a {type(v).__name__} of the test cannot be passed to the program: pass plain values")
        self.kept.append(v)
        return {"mine": [len(self.kept) - 1, getattr(v, "__name__", None) or type(v).__name__]}

    def decode(self, j):
        """The value of a message; every error in it is the sender's."""
        if j is None or isinstance(j, (bool, str)):
            return j
        if isinstance(j, list):
            return [self.decode(x) for x in j]
        ((tag, body),) = j.items()
        if tag == "int":
            return int(body, 16)
        if tag == "float":
            return float.fromhex(body)
        if tag == "dict":
            return {self.decode(k): self.decode(x) for k, x in body}
        if tag in ("tuple", "set", "frozenset"):
            return getattr(builtins, tag)(self.decode(x) for x in body)
        if tag in ("bytes", "bytearray"):
            return getattr(builtins, tag).fromhex(body)
        if tag == "complex":
            return complex(*map(float.fromhex, body))
        if tag == "mine":
            return Remote(self, *body)
        if tag == "yours":
            return self.kept[body]
        module, name, arguments = body
        if tag != "known" or (module, name) not in KNOWN:
            raise ValueError(f"unknown tag {tag!r}")
        return getattr(__import__(module), name)(*self.decode(arguments))

    def send(self, message: dict) -> None:
        data = json.dumps(message).encode()
        if len(data) > MESSAGE:
            raise ValueError(f"a value of {len(data)} bytes, above the limit of {MESSAGE}")
        data = len(data).to_bytes(4, "little") + data
        try:
            while data:
                data = data[os.write(self.write, data) :]
        except OSError:
            raise self._lost("the program ended") from None

    def receive(self) -> dict:
        try:
            size = int.from_bytes(read_exactly(self.read, 4), "little")
            if size <= MESSAGE:
                return json.loads(read_exactly(self.read, size))
        except EOFError:
            raise self._lost("the program ended") from None
        except (ValueError, RecursionError):
            pass
        raise self._lost("the program wrote to the judge's pipe")

    def _lost(self, why: str) -> ProgramGone:
        self.gone = ProgramGone(why)
        return self.gone

    def request(self, what: str, *args):
        """What the other side's operation returns; its exception is raised here as the builtin one that it is."""
        values = list(args)
        self.send({"do": what, "args": self.encode(values)})
        while True:
            try:
                m = self.receive()
                if "do" not in m:
                    answer = self.decode(m["value"] if "value" in m else m["error"])
                    changed = self.decode(m.get("changed"))
                    break
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
                raise self._lost(f"the program wrote to the judge's pipe ({type(error).__name__})") from None
            self.serve(m)
        if "error" in m:
            name, text = answer
            kind = getattr(builtins, str(name), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, UnicodeError):
                kind = RuntimeError
            raise kind(text)
        if changed is not None and what == "call" and self.copies_back:
            _copy_back(values[1], changed)
        return answer

    def serve(self, m: dict) -> None:
        """Do what the other side asked and send the answer."""
        try:
            values = self.decode(m["args"])
            answer = {"value": self.encode(self.operations[m["do"]](*values))}
            if m["do"] == "call" and self.encode(values[1]) != m["args"][1]:  # a list that it sorted in place
                answer["changed"] = self.encode(values[1])
            self.send(answer)
        except ProgramGone:
            raise
        except BaseException as error:
            self.send({"error": describe(error)})


def _copy_back(arguments: list, changed: list) -> None:
    for mine, new in zip(arguments, changed, strict=True):
        if isinstance(mine, (list, bytearray)):
            mine[:] = new
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(new)


def describe(error: BaseException) -> list[str]:
    kind = next((c for c in type(error).__mro__ if c.__module__ == "builtins"), Exception)
    text = str(error) if kind is type(error) else f"{type(error).__name__}: {error}"
    return [kind.__name__, text[: 2 * SHOWN]]


class Remote:
    """An object of the other side: it can be called, read and iterated there, never compared or taken as true here."""

    __slots__ = ("_peer", "_id", "_name")

    def __init__(self, peer: Peer, id: int, name: str) -> None:
        for slot, value in (("_peer", peer), ("_id", id), ("_name", name)):
            object.__setattr__(self, slot, value)

    def __call__(self, *args, **kwargs):
        peer = self._peer
        shown = ", ".join([*map(_short, args), *(f"{k}={_short(v)}" for k, v in kwargs.items())])
        try:
            value = peer.request("call", self, list(args), kwargs)
        except Exception as error:
            peer.trace.append(f"{self._name}({shown}) raised {type(error).__name__}: {error}")
            raise
        peer.trace.append(f"{self._name}({shown}) gave {_short(value)}")
        return value

    def __getattr__(self, name: str):
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value) -> None:
        self._peer.request("setattr", self, name, value)

    def __iter__(self):
        items = self._peer.request("iter", self)
        while True:
            try:
                yield self._peer.request("next", items)
            except StopIteration:
                return

    def __getitem__(self, key):
        return self._peer.request("getitem", self, key)

    def __len__(self) -> int:
        return self._peer.request("len", self)

    def __str__(self) -> str:
        return self._peer.request("str", self)

    def __repr__(self) -> str:
        return self._peer.request("repr", self)

    def _refuse(self, *_):
        raise TypeError(f"{self._name} is an object of the program, not a value: compare its plain values")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _refuse
    __hash__ = None


def _short(v) -> str:
    try:
        text = f"<{object.__getattribute__(v, '_name')}>" if isinstance(v, Remote) else repr(v)
    except ValueError:  # an int of more digits than Python prints
        text = f"<{type(v).__name__}>"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


CALLS = {"call": lambda f, args, kwargs=None: f(*args, **(kwargs or {}))}  # all that a program may do to the judge's


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
