"""One model-written program run under limits, in whatever sandbox this machine permits."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import marshal
import os
import selectors
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INSIDE = ("jail", "wire", "code_judge")  # the modules that run inside, in order of import
KINDS = ("bwrap", "namespaces", "landlock")  # best first
START_SECONDS = 60  # for the sandbox itself to be ready on a busy machine; the program's clock starts then
_uids = itertools.count()


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    timeout: float  # seconds of wall clock, loading and all tests together
    memory: int  # bytes of address space
    file_size: int = 8 << 20  # bytes of output, and of any file
    scratch: int = 64 << 20  # bytes of all files together
    threads: int = 64  # it can start no process

    @property
    def seconds(self) -> int:
        """Seconds of CPU, over all threads: the timeout on two cores."""
        return int(2 * self.timeout) + 1


def run(job: dict, then: dict | None, limits: Limits, sandbox: bool = True) -> tuple[list, bool]:
    """The records that the judge wrote about one job, and whether the time ran out.

    ``job`` goes in before the program starts, ``then`` after (its process never sees it). Everything that was started
    has been killed on return, at most ``limits.timeout`` + 0.2 s after the program began.
    Raises RuntimeError where ``sandbox`` is
    true and there is none, or where the sandbox itself fails.
    """
    return _run(kind() if sandbox else "limits", job, then, limits)


@functools.cache
def kind() -> str:
    """The best sandbox that works here, tried once by running a program: bwrap, namespaces or landlock.

    None needs root. Landlock, for containers that forbid namespaces, bounds each file of the scratch folder but not
    their number, nor root's threads, and lets a program see whether a path outside exists.
    Raises RuntimeError, with what failed and what helps, where none works.
    """
    code, tests = {"code": "import textwrap\ndef f(): return textwrap.dedent(' a')"}, [["assert f() == 'a'", True]]
    failed = []
    for name in KINDS:
        if name == "bwrap" and not shutil.which("bwrap"):
            failed.append("bwrap is not installed")
            continue
        try:
            records, _ = _run(name, code, {"tests": tests, "names": ["f"], "modules": []}, Limits(10.0, 1 << 29))
        except (RuntimeError, OSError) as error:
            failed.append(f"{name}: {error}")
            continue
        if records == [[0, None]]:
            return name
        failed.append(f"{name}: a trial program gave {records}")
    raise RuntimeError(
        f"sandbox: got none that works ({'; '.join(failed)}), need bubblewrap (apt install bubblewrap), user "
        "namespaces or Landlock (Linux 6.2), or sandbox=False, which runs the programs with your rights on your files"
    )


def _run(how: str, job: dict, then: dict | None, limits: Limits) -> tuple[list, bool]:
    data = b"".join(_framed(json.dumps(part).encode()) for part in (job, then) if part)
    with _folder(how) as folder:
        command = _command(how, folder, limits)
        fixed = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "MALLOC_ARENA_MAX": "1"}  # an arena reserves 64 MiB
        process = subprocess.Popen(
            command,
            bufsize=0,
            cwd="/",
            env={**fixed, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        late = False
        with process:
            try:
                _wait_ready(process)
                said, _ = process.communicate(data, timeout=limits.timeout)
            except subprocess.TimeoutExpired:
                late = True
                process.kill()  # process 1 of the namespace, or what it was started by: the tree goes with it
                said, _ = process.communicate()
            finally:
                process.kill()
    lines = said.split(b"\n")[:-1]  # a killed judge may leave half a line
    return [json.loads(line) for line in lines], late


def _wait_ready(process: subprocess.Popen) -> None:
    with contextlib.suppress(BrokenPipeError):  # it says why on stderr
        process.stdin.write(_inside())
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        is_ready = selector.select(START_SECONDS) and process.stdout.readline() == b"ready\n"
    if not is_ready:
        process.kill()
        said = process.stderr.read().decode("utf-8", "replace").strip() or f"not ready after {START_SECONDS} s"
        raise RuntimeError(said.splitlines()[-1])


@contextlib.contextmanager
def _folder(how: str) -> Iterator[str]:
    """The scratch folder: of the sandbox's own memory, or a temporary one where the files of the machine are used."""
    if how in ("bwrap", "namespaces"):
        yield "/tmp"
    else:
        with tempfile.TemporaryDirectory(prefix="fastcollab-", ignore_cleanup_errors=True) as folder:
            yield folder


def _command(how: str, folder: str, limits: Limits) -> list[str]:
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    readonly, hidden = _paths()
    seen = [part for path in readonly for part in _without(path, hidden)] if how == "landlock" else []
    own = {
        "how": how,
        "seen": seen,
        "folder": folder,
        "readonly": readonly,
        "hidden": hidden,
        "uid": 61184 + next(_uids) % 4096,
    }
    fields = ("timeout", "scratch", "memory", "seconds", "file_size", "threads")
    setup = json.dumps({**own, **{name: getattr(limits, name) for name in fields}})
    inside = [python, "-s", "-S", "-X", "utf8", "-c", BOOT, setup]
    if how != "bwrap":
        return inside
    command = [str(shutil.which("bwrap")), "--die-with-parent", "--new-session", "--as-pid-1"]
    command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts")]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.getuid() == 0 else ["--unshare-user"]
    command += ["--perms", "1777", "--size", str(limits.scratch), "--tmpfs", "/tmp"]
    shown = [*readonly, python]
    for folder in sorted({str(p) for path in shown for p in Path(path).parents} - {"/", "/tmp"}):
        command += ["--perms", "0755", "--dir", folder]  # else made for their owner alone
    for path in shown:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    for path in hidden:
        command += ["--tmpfs", path, "--remount-ro", path]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", *inside]


@functools.cache
def _paths() -> tuple[list[str], list[str]]:
    """Paths that a program may read (the interpreter's library, system libraries), and folders in them that it may not.

    Installed packages are hidden: the answers to a benchmark are often shipped as one.
    """
    library = sysconfig.get_path("stdlib")
    wanted = [os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, sys.platlibdir), library]
    wanted = [os.path.realpath(path) for path in wanted if not os.path.realpath(path).startswith("/usr/lib")]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    readonly: list[str] = []
    for path in [*system, *wanted]:
        if os.path.exists(path) and not any(Path(path).is_relative_to(seen) for seen in readonly):
            readonly.append(path)
    packages = [os.path.join(library, "site-packages"), "/usr/lib/python3/dist-packages"]
    return readonly, [path for path in map(os.path.realpath, packages) if os.path.isdir(path)]


def _without(path: str, hidden: list[str]) -> list[str]:
    """``path``, or where it holds hidden folders the parts of it that do not; links lead to what has its own entry."""
    if os.path.islink(path) or path in hidden:
        return []
    if not any(Path(folder).is_relative_to(path) for folder in hidden):
        return [path]
    return [seen for name in os.listdir(path) for seen in _without(os.path.join(path, name), hidden)]


# source of ``python -c``: read the inside modules, whose files the sandbox does not show, from stdin, and start
BOOT = """
import marshal, os, sys, types
def read(size, data=b''):
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit('no code')
    return data
def module(name, code=''):
    sys.modules[name] = made = types.ModuleType(name)
    made.__path__ = []
    exec(code, made.__dict__)
    return made
module('fastcollab')
for name, code in marshal.loads(read(int.from_bytes(read(4), 'little'))):
    last = module('fastcollab.' + name, code)
last.start()
"""


@functools.cache
def _inside() -> bytes:
    files = [Path(__file__).with_name(f"{name}.py") for name in INSIDE]
    codes = [(p.stem, compile(p.read_text(encoding="utf-8"), p.name, "exec", dont_inherit=True)) for p in files]
    return _framed(marshal.dumps(codes))


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data
