"""Programs that attack the sandbox or the verdict: name -> (program, tests that pass only if the attack works)."""

WON = ["assert f() == 'won'"]
FOUR = ["assert f(2) == 4"]
NATIVE = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def attempt(body: str, before: str = "import os, sys") -> str:
    """f() returns 'won' if ``body`` runs through and its ``ok`` is true."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"{before}\ndef f():\n    ok = True\n{lines}\n    return 'won' if ok else 'lost'\n"


def forge(body: str) -> str:
    """A program without f of its own that runs ``body`` at load, then defines an f that knows nothing."""
    return f"import os, sys, builtins\n{body}\ndef f(*a): return None\n"


RESOURCES = {
    "fork bomb": (attempt("while True: os.fork()"), WON),
    "fork bomb in C": (attempt("while libc.fork() >= 0: pass\nok = False", NATIVE), WON),
    "vfork by number": (attempt("ok = libc.syscall(58) > 0", NATIVE), WON),
    "clone3 by number": (attempt("ok = libc.syscall(435, bytes(64), 64) > 0", NATIVE), WON),
    "thread bomb": (
        "import threading, time\ndef f():\n  threading.stack_size(65536)\n  for _ in range(5000):\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n  return 'won'",
        WON,
    ),
    "memory bomb": (attempt("x = [bytearray(1 << 20) for _ in range(4096)]"), WON),
    "memory bomb by mmap": (attempt("x = [mmap.mmap(-1, 1 << 28) for _ in range(16)]", "import mmap"), WON),
    "memory bomb by memfd": (attempt("ok = libc.syscall(319, b'x', 0) >= 0", NATIVE), WON),
    "memory bomb by shm": (attempt("ok = libc.shmget(0, 1 << 20, 0o1600) >= 0", NATIVE), WON),
    "huge int": (attempt("x = 10 ** 10 ** 10"), WON),
    "huge string": (attempt("x = 'x' * (1 << 40)"), WON),
    "endless loop": (attempt("while True: pass"), WON),
    "endless loop at load": ("while True: pass", WON),
    "endless sleep": (attempt("time.sleep(1000)", "import time"), WON),
    "endless loop in C": (attempt("re.match(r'(a+)+$', 'a' * 64 + 'b')", "import re"), WON),
    "endless iterator": ("import itertools\ndef f(): return itertools.count()", ["assert list(f()) == []"]),
    "endless callback": ("def f(g):\n  while True: g(1)", ["assert f(lambda x: x) == 4"]),
    "endless output": ("while True: print('x' * 100000)", [("", "x")]),
    "huge output": ("import os\nfor _ in range(1000): os.write(1, b'x' * 1000000)", [("", "x")]),
    "huge errors": ("import sys\nwhile True: sys.stderr.write('x' * 100000)", [("", "")]),
    "huge value": (attempt("return 'x' * (1 << 26)"), WON),
    "deep value": ("def f():\n  x = []\n  for _ in range(10**5): x = [x]\n  return x", ["assert f() == []"]),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x + 1)", FOUR),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __getattr__(s, n): return getattr(s, n + 'x')\n"
        "def f(x): return A().x",
        FOUR,
    ),
    "crash": (attempt("ctypes.string_at(0)", "import ctypes"), WON),
    "full disk": (
        attempt("for i in range(100):\n  with open(f'{i}', 'wb') as file: file.write(bytes(1 << 21))"),
        WON,
    ),
    "many files": (attempt("for i in range(10**5): open(f'{i}', 'w').close()"), WON),
    "huge file": (attempt("with open('x', 'wb') as f: f.write(bytes(1 << 25))"), WON),
    "many descriptors": (attempt("x = [os.dup(0) for _ in range(200)]"), WON),
    "higher limits": (attempt("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "import resource"), WON),
    "ignored signals": (
        "import signal\nfor s in range(1, 32):\n  try: signal.signal(s, lambda *a: None)\n  except OSError: pass\n"
        "def f():\n  while True: pass",
        WON,
    ),
    "alarms": (
        "import signal\nsignal.signal(14, lambda *a: signal.alarm(1))\nsignal.alarm(1)\ndef f():\n  while 1: pass",
        WON,
    ),
    "stopped": (attempt("os.kill(os.getpid(), 19)"), ["assert f() == 'never'"]),
}

ESCAPES = {
    "reads passwd": (attempt("open('/etc/passwd').read()"), WON),
    "reads the host's folder": (attempt("ok = os.path.exists(HERE) and os.listdir(HERE)"), WON),
    "reads installed packages": (
        attempt(
            "files = [os.path.join(d, n) for p in (PACKAGES, '/usr/lib/python3/dist-packages')\n"
            "         for d, _, names in os.walk(p) for n in names]\nok = files and open(files[0], 'rb')"
        ),
        WON,
    ),
    "reads its environment": (attempt("ok = 'FASTCOLLAB_SECRET' in os.environ"), WON),
    "reads its parent's environment": (attempt("open(f'/proc/{os.getppid()}/environ', 'rb').read()"), WON),
    "reads /proc/self": (attempt("open('/proc/self/maps').read()"), WON),
    "lists its descriptors": (attempt("ok = os.listdir('/proc/self/fd')"), WON),
    "follows a symlink": (attempt("os.symlink('/etc/passwd', 'p')\nopen('p').read()"), WON),
    "links a file": (attempt("os.link('/etc/passwd', 'p')"), WON),
    "climbs": (attempt("open('../' * 30 + 'etc/passwd').read()"), WON),
    "climbs out of a chroot": (attempt("os.mkdir('d')\nos.chroot('d')"), WON),
    "writes outside": (attempt("open(os.path.join(HERE, 'escaped'), 'w').write('x')"), WON),
    "writes the library": (attempt("open(os.__file__, 'a')"), WON),
    "writes to the root": (attempt("open('/escaped', 'w')"), WON),
    "removes the library": (attempt("os.unlink(os.__file__)"), WON),
    "changes modes": (attempt("os.chmod(HERE, 0o777)"), WON),
    "mounts": (attempt("ok = libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0", NATIVE), WON),
    "mounts proc": (attempt("ok = libc.mount(b'p', b'/tmp', b'proc', 0, None) == 0", NATIVE), WON),
    "new namespaces": (attempt("ok = libc.unshare(0x10000000) == 0", NATIVE), WON),
    "connects": (
        attempt("s = socket.socket()\ns.settimeout(5)\ns.connect(('1.1.1.1', 53))", "import socket"),
        WON,
    ),
    "listens": (attempt("socket.create_server(('127.0.0.1', 0))", "import socket"), WON),
    "asks a name": (attempt("socket.getaddrinfo('example.com', 80)", "import socket"), WON),
    "raw socket by number": (attempt("ok = libc.syscall(41, 2, 2, 0) >= 0", NATIVE), WON),
    "io_uring": (attempt("ok = libc.syscall(425, 8, bytes(256)) >= 0", NATIVE), WON),
    "keyring": (attempt("ok = libc.syscall(250, 0, -3, 1) >= 0", NATIVE), WON),
    "runs a shell": (attempt("ok = os.system('true') == 0"), WON),
    "becomes a shell": (attempt("os.execv('/bin/sh', ['sh', '-c', 'sleep 100'])"), WON),
    "subprocess": (attempt("subprocess.run([sys.executable, '-c', ''])", "import subprocess, sys"), WON),
    "multiprocessing": (
        attempt("p = multiprocessing.Process(target=print)\np.start()\np.join()", "import multiprocessing"),
        WON,
    ),
    "leaves a daemon": (
        attempt("if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    while True: pass"),
        WON,
    ),
    "leaves a thread": (
        "import os, threading\nos.setsid()\ndef g():\n  while True: pass\nthreading.Thread(target=g).start()\n"
        "def f(): return 'lost'",
        WON,
    ),
    "kills its parent": (attempt("os.kill(os.getppid(), 9)"), WON),
    "kills all": (attempt("os.kill(-1, 9)"), WON),
    "kills its group": (attempt("os.killpg(0, 15)"), WON),
    "stops its parent": (attempt("os.kill(os.getppid(), 19)"), WON),
    "signals its parent by number": (attempt("ok = libc.syscall(129, os.getppid(), 9, bytes(128)) == 0", NATIVE), WON),
    "traces its parent": (attempt("ok = libc.ptrace(16, os.getppid(), None, None) == 0", NATIVE), WON),
    "reads its parent's memory": (
        attempt("ok = libc.syscall(310, os.getppid(), bytes(16), 1, bytes(16), 1, 0) >= 0", NATIVE),
        WON,
    ),
    "limits its parent": (
        attempt("resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))", "import os, resource"),
        WON,
    ),
    "32-bit fork": (
        "import ctypes, mmap\ndef f():\n  m = mmap.mmap(-1, 4096, prot=7)\n"
        "  m.write(bytes.fromhex('b802000000cd80c3'))\n"
        "  at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "  return 'won' if ctypes.CFUNCTYPE(ctypes.c_int)(at)() > 0 else 'lost'",
        WON,
    ),
    "x32 fork": (attempt("ok = libc.syscall(0x40000000 + 57) > 0", NATIVE), WON),
    "becomes root": (attempt("os.setuid(0)\nos.setgid(0)\nos.unlink(os.__file__)"), WON),
}

EQUAL = "__eq__ = lambda *a: True\n __ne__ = lambda *a: False\n __hash__ = lambda s: 1\n __bool__ = lambda s: True"
COMPARES = f"class E:\n {EQUAL}\n __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\n"
WRITE = (
    "import json, os\ndef frame(m):\n  d = m if isinstance(m, bytes) else json.dumps(m).encode()\n"
    "  return len(d).to_bytes(4, 'little') + d\n"
    "def write(d):\n  for fd in range(1, 64):\n    try: os.write(fd, d)\n    except OSError: pass\n"
)
FORGERIES = {
    "__eq__": (f"{COMPARES}def f(x): return E()", FOUR),
    "__eq__ of an int": (f"class E(int):\n {EQUAL}\ndef f(x): return E(5)", FOUR),
    "__eq__ of a str": (f"class E(str):\n {EQUAL}\ndef f(x): return E('x')", ["assert f(2) == 'four'"]),
    "__eq__ in a list": (f"{COMPARES}def f(x): return [E()]", ["assert f(2) == [4]"]),
    "__eq__ of a list": (f"class E(list):\n {EQUAL}\ndef f(x): return E()", ["assert f(2) == [4]"]),
    "reflected __eq__": (f"{COMPARES}def f(x): return E()", ["assert 4 == f(2)"]),
    "__eq__ through a metaclass": (
        f"class M(type):\n {EQUAL}\nclass f(metaclass=M):\n  def __init__(s, x): pass",
        FOUR,
    ),
    "__ne__": (f"{COMPARES}def f(x): return E()", ["assert not f(2) != 4"]),
    "__lt__": (f"{COMPARES}def f(x): return E()", ["assert f(2) < 5"]),
    "__contains__": (f"{COMPARES}def f(x): return E()", ["assert 4 in f(2)"]),
    "membership": (f"{COMPARES}def f(x): return E()", ["assert f(2) in [4]"]),
    "hash and set": (f"{COMPARES}def f(x): return [E()]", ["assert set(f(2)) == {4}"]),
    "__bool__": (f"{COMPARES}def f(x): return E()", ["assert f(2)"]),
    "__bool__ in all": (f"{COMPARES}def f(x): return [E()]", ["assert all(f(2))"]),
    "__sub__ and __abs__": (
        "class E(float):\n  def __sub__(s, o): return s\n  def __abs__(s): return 0.0\ndef f(x): return E(9)",
        ["assert abs(f(2) - 4) < 1e-6"],
    ),
    "__class__": ("class E:\n  __class__ = int\ndef f(x): return E()", ["assert isinstance(f(2), int)"]),
    "__reduce__": ("import os\nclass E:\n  def __reduce__(s): return (int, (4,))\ndef f(x): return E()", FOUR),
    "exits": (forge("os._exit(0)"), FOUR),
    "exits when called": ("import os\ndef f(x): os._exit(0)", FOUR),
    "exits when called, caught": (
        "import os\ndef f(x): os._exit(0)",
        ["try:\n  f(2)\n  assert False\nexcept Exception: pass", "try:\n  f(2)\nexcept: pass"],
    ),
    "sys.exit": (forge("sys.exit(0)"), FOUR),
    "raises SystemExit": ("def f(x): raise SystemExit(0)", FOUR),
    "raises KeyboardInterrupt": ("def f(x): raise KeyboardInterrupt", FOUR),
    "patched AssertionError": (forge("builtins.AssertionError = type('A', (Exception,), {})"), FOUR),
    "patched exec and compile": (forge("builtins.exec = builtins.compile = lambda *a, **k: None"), FOUR),
    "patched isinstance": (forge("builtins.isinstance = lambda *a: True"), FOUR),
    "patched json": (forge("import json; json.dumps = lambda *a: '{\"value\": true}'"), FOUR),
    "patched judge": (
        forge(
            "for m in list(sys.modules.values()):\n  if 'fastcollab' in m.__name__:\n"
            "    for k in list(vars(m)): vars(m)[k] = None"
        ),
        FOUR,
    ),
    "patched wire": (
        forge("w = sys.modules['fastcollab.wire']; w.Remote.__eq__ = lambda *a: True; w.Peer.encode = lambda *a: True"),
        FOUR,
    ),
    "prints the verdict": (
        f"{WRITE}for i in range(9): print([i, None]); write(b'[0, null]\\n')\ndef f(x): return 5",
        FOUR,
    ),
    "writes answers ahead": (
        f"{WRITE}write(frame({{'value': None}}) + frame({{'value': True}}) * 9)\ndef f(x): 0",
        FOUR,
    ),
    "writes nonsense": (f"{WRITE}write(b'x' * 1000)\ndef f(x): 0", FOUR),
    "writes a deep message": (f"{WRITE}write(frame(b'[' * 10**6))\ndef f(x): 0", FOUR),
    "writes a strange message": (
        f"{WRITE}write(frame({{'value': {{'known': ['os', 'system', ['true']]}}}}) * 9)\ndef f(x): 0",
        ["assert f(2) == 0"],
    ),
    "asks for the judge's code": (
        "def f(g):\n  try: return g.__globals__\n  except Exception: pass\n  return g.__code__.co_consts[-1]",
        ["assert f(lambda: 4) == 4"],
    ),
    "searches its memory": (
        "import gc, sys\ndef f(x):\n  for o in gc.get_objects():\n    if isinstance(o, dict) and 'tests' in o:\n"
        "      if isinstance(o['tests'], list): return int(str(o['tests']).split('==')[1].split(\"'\")[0])",
        ["assert f(2) == 73", "assert f(3) == 74"],
    ),
    "searches its frames": (
        "import sys\nwanted = ' '.join(['==', '73'])\ndef f(x):\n  g = sys._getframe()\n  while g:\n"
        "    for v in g.f_locals.values():\n      if v != wanted and wanted in str(v): return 73\n    g = g.f_back",
        ["assert f(2) == 73"],
    ),
    "reads the tests' pipe": (
        "import os\nseen = b''\nfor fd in range(64):\n  try:\n    os.set_blocking(fd, False)\n"
        "    seen += os.read(fd, 65536)\n  except OSError: pass\ndef f(x): return 73 if b'73' in seen else 0",
        ["assert f(2) == 73"],
    ),
    "closes descriptors": (forge("os.closerange(0, 64)"), FOUR),
    "own set": ("def set(x): return 1\ndef f(x): return 0", ["assert set([f(2)]) == set([4])"]),
    "own sorted": (
        "import builtins\nbuiltins.sorted = lambda x: 1\ndef f(x): return [0]",
        ["assert sorted(f(2)) == sorted([4])"],
    ),
    "own math": ("class math:\n  isclose = lambda *a, **k: True\ndef f(x): return 5", ["assert math.isclose(f(2), 4)"]),
    "own module of the library": (
        "for name in ('statistics.py', '/tmp/statistics.py'):\n"
        "  open(name, 'w').write('def mean(x): return 4')\ndef f(x): return [5]",
        ["import statistics\nassert statistics.mean(f(2)) == 4"],
    ),
    "empties its argument": (
        "def f(x):\n  x.clear()\n  return x",
        ["data = [3, 1, 2]", "assert f(data) == sorted(data)"],
    ),
    "claims an exception": ("def f(x): raise AssertionError", FOUR),
    "claims a strange exception": (
        "class StopIteration(BaseException): pass\ndef f(x): raise StopIteration",
        ["assert [f(2)] == [4]"],
    ),
    "prints nothing": ("import os\nos._exit(0)", [("1\n", "4\n")]),
    "prints, then fails": ("print(4)\nraise SystemExit(3)", [("1\n", "4\n")]),
    "prints, then hangs": ("print(4, flush=True)\nwhile True: pass", [("1\n", "4\n")]),
    "looks for the expected output": (
        "import gc\nwanted = ''.join(['nee', 'dle '])\nfor o in gc.get_objects():\n"
        "  at = repr(o).find(wanted) if isinstance(o, (list, dict)) else -1\n"
        "  if at >= 0: print(repr(o)[at : at + 9]); break",
        [("1\n", "needle 73\n")],
    ),
    "rewrites its input": (
        "import os\nos.lseek(0, 0, 0)\nos.write(0, b'zyx')\nos.write(2, b'zyx')",
        [("1\n", "zyx\n")],
    ),
    "nothing": ("", FOUR),
    "no Python": ("I cannot solve this.", FOUR),
    "a null byte": ("def f(x): return 4\0", FOUR),
}
HOSTILE = {**RESOURCES, **ESCAPES, **FORGERIES}
