"""The trusted side of one sandbox: runs a program in a child and judges it by the values that the child sends.

The program's process is forked before the tests are read, so no expected value is ever in its memory, and what it
sends is a claim of a value, as good as computing it. Runs inside the sandbox; standard library only.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import signal
import sys
import types

from fastcollab import jail
from fastcollab.wire import CALLS, SHOWN, Peer, ProgramGone, describe, read_exactly


def serve_program(code: str, read: int, write: int) -> None:
    """In the program's process: load ``code`` as module ``solution``, then do what the judge asks until it hangs up."""
    module = sys.modules["solution"] = types.ModuleType("solution")

    def get(name: str):
        if name not in module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return module.__dict__[name]

    own = {name: getattr(builtins, name) for name in ("getattr", "setattr", "iter", "next", "len", "str", "repr")}
    peer = Peer(read, write, {**CALLS, **own, "getitem": operator.getitem, "get": get})
    try:
        exec(compile(code, "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        peer.send({"error": describe(error)})
        return
    peer.send({"value": None})
    while True:
        peer.serve(peer.receive())


def judge_asserts(peer: Peer, job: dict, emit) -> None:
    """Run the tests here, with the program's names as ``Remote``; emit [index, None or why it failed] for each."""
    space: dict = {"__name__": "tests", **{name: __import__(name) for name in job["modules"]}}
    broken = None
    try:
        loaded = peer.receive()
        if "error" in loaded:
            broken = ": ".join(map(str, loaded["error"]))
        for name in job["names"] if not broken else ():
            try:
                space[name] = peer.request("get", name)
            except NameError:
                pass
    except (ProgramGone, Exception) as error:
        broken = str(error)
    for i, (test, is_assert) in enumerate(job["tests"]):
        peer.trace.clear()
        peer.copies_back = not is_assert
        why = broken and f"the program did not load: {broken}"
        if not why:
            try:
                exec(compile(test, "<test>", "exec"), space)
            except BaseException as error:
                why = "; ".join([*peer.trace[-4:], *_said(error, peer)]) or "false"
            if peer.gone and not why:  # a test that catches everything
                why = str(peer.gone)
        emit([i, why and why[: 8 * SHOWN]])


def _said(error: BaseException, peer: Peer) -> list[str]:
    text = ": ".join(describe(error)).removesuffix(": ")
    is_known = text == "AssertionError" or peer.trace and peer.trace[-1].endswith(f" raised {text}")
    return [] if is_known else [str(error) if isinstance(error, ProgramGone) else text]


class Become(BaseException):
    """Raised in a forked child to leave the judge's frames and run as a program of its own."""


def run_pairs(code: str, stdins: list[str], confine, output: int, emit) -> None:
    """Run ``code`` as a script once per stdin; ``emit(index, [stdout, or None, why it failed])``."""
    for i, text in enumerate(stdins):
        files = [_nameless_file() for _ in range(3)]
        os.write(files[0], text.encode("utf-8", "surrogatepass"))
        os.lseek(files[0], 0, os.SEEK_SET)
        pid = os.fork()
        if not pid:
            for standard, file in enumerate(files):
                os.dup2(file, standard)
            os.closerange(3, 64)
            confine()
            raise Become(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [os.pread(file, output, 0).decode("utf-8", "replace") for file in files[1:]]
        for file in files:
            os.close(file)
        last = (said[1].strip() or "no message").splitlines()[-1][: 2 * SHOWN]
        emit([i, [said[0], None] if status == 0 else [None, f"exit status {status}: {last}"]])


def _nameless_file() -> int:
    fd = os.open("judge", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink("judge")
    return fd


def main() -> None:
    """Enter the sandbox that argv[1] describes, say ready, read the program, then the tests; write a line a verdict."""
    setup = json.loads(sys.argv[1])
    sys.path[:] = [p for p in sys.path if p]  # never the scratch folder, where programs write
    if setup["how"] == "namespaces":
        jail.enter(setup["readonly"], setup["hidden"], setup["scratch"])
    elif setup["how"] != "bwrap":
        os.chdir(setup["folder"])
    if setup["how"] == "landlock":
        jail.restrict_files(setup["readonly"], setup["seen"], ".")
    has_root = setup["how"] in ("namespaces", "bwrap")  # of its own; in the machine's, a Python below /root needs root
    jail.drop_rights(setup["uid"] if has_root else os.getuid())
    jail.limit(AS=setup["memory"], CPU=setup["seconds"], CORE=0)
    for name in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(name, signal.SIG_IGN)

    def confine() -> None:
        for name in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
            signal.signal(name, signal.SIG_DFL)
        builtins.exit = builtins.quit = sys.exit
        sys.argv[:] = ["program.py"]
        jail.die_with_parent() if sys.platform == "linux" else None
        jail.confine(setup["memory"], setup["seconds"], setup["file_size"], setup["threads"])

    def emit(record: list) -> None:
        data = json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(records, data) :]

    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # where the parent cannot kill: bwrap drops root's right to
    signal.setitimer(signal.ITIMER_REAL, setup["timeout"] + 0.2)
    records, null = os.dup(1), os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.write(records, b"ready\n")
    job = json.loads(read_exactly(0, int.from_bytes(read_exactly(0, 4), "little")))
    if "stdins" in job:
        return run_pairs(job["code"], job["stdins"], confine, setup["file_size"], emit)
    to_program, to_judge = os.pipe(), os.pipe()
    if not os.fork():
        for fd, standard in ((null, 0), (null, 1), (null, 2), (to_judge[1], 4), (to_program[0], 3)):
            os.dup2(fd, standard)
        os.closerange(5, 64)
        confine()
        try:
            serve_program(job["code"], 3, 4)
        finally:
            os._exit(1)
    os.close(to_judge[1]), os.close(to_program[0])
    tests = json.loads(read_exactly(0, int.from_bytes(read_exactly(0, 4), "little")))
    judge_asserts(Peer(to_judge[0], to_program[1], CALLS), tests, emit)


def start() -> None:
    """``main``, and in a forked script the script itself, with nothing of the judge below it on the stack."""
    try:
        return main()
    except Become as program:
        code = program.args[0]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "program.py", "exec"), module.__dict__)
