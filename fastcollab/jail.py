"""What stands between a model-written program and the machine: a private root, limits, a filter of system calls.

Runs inside the sandbox's own process, before the program does; standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
NEW_USER, NEW_REST = 0x10000000, 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # ns uts ipc pid net
MOUNT_SETATTR, LANDLOCK = 442, 444  # the same number on every architecture
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

# system calls that no judged program needs, by number on x86_64 and aarch64
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = """
fork 57 -  vfork 58 -  execve 59 221  execveat 322 281
ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  process_madvise 440 440  kcmp 312 272
tkill 200 130  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240
pidfd_open 434 434  pidfd_send_signal 424 424  pidfd_getfd 438 438
socket 41 198  io_uring_setup 425 425  io_uring_enter 426 426  io_uring_register 427 427
unshare 272 97  setns 308 268  mount 165 40  umount2 166 39  pivot_root 155 41  chroot 161 51
open_tree 428 428  move_mount 429 429  fsopen 430 430  fsmount 432 432  mount_setattr 442 442
add_key 248 217  request_key 249 218  keyctl 250 219  bpf 321 280  perf_event_open 298 241  userfaultfd 323 282
name_to_handle_at 303 264  open_by_handle_at 304 265
memfd_create 319 279  memfd_secret 447 447  shmget 29 194  msgget 68 186  semget 64 190  mq_open 240 180
chmod 90 -  fchmod 91 52  fchmodat 268 53  fchmodat2 452 452  chown 92 -  fchown 93 55  lchown 94 -  fchownat 260 54
utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88  setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7
"""
OWN_ONLY = "kill 62 129  tgkill 234 131"  # allowed on the program itself
ZERO_ONLY, ONE_NEVER = "prlimit64 302 261", "prctl 157 167"  # itself; all but PR_SET_PDEATHSIG
THREADS_ONLY, ABSENT = "clone 56 220", "clone3 435 435"


def call(name: str, *args) -> int:
    """A C function; OSError with its name where it returns -1."""
    value = getattr(libc, name)(*(os.fsencode(a) if isinstance(a, str) else a for a in args))
    if value == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return value


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enter(readonly: list[str], hidden: list[str], scratch: int) -> None:
    """Go on as process 1 of new namespaces whose files are ``readonly`` paths and a ``scratch``-byte /tmp.

    Without a network, without /proc; ``hidden`` folders of ``readonly`` are empty. Raises OSError where not permitted.
    """
    uid, gid = os.getuid(), os.getgid()
    die_with_parent()
    try:
        call("unshare", NEW_REST)
    except PermissionError:
        call("unshare", NEW_REST | NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    root = "/proc"  # a folder that hides no readonly path
    call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    os.mkdir(root + "/tmp")
    limits = f"size={scratch},nr_inodes=4096,mode=1777".encode()
    call("mount", "tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, limits)
    for path in readonly:
        _show(path, root + path)
    for path in hidden:
        call("mount", "tmpfs", root + path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, b"size=4k")
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", 2)  # MNT_DETACH: the old root goes
    _set_readonly("/", 0)
    os.chdir("/tmp")
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    die_with_parent()


def _show(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    call("mount", path, target, None, MS_BIND | MS_REC, None)
    _set_readonly(target, 0x8000)  # AT_RECURSIVE


def _set_readonly(path: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # RDONLY, NOSUID
    call("syscall", MOUNT_SETATTR, -100, path, flags, attributes, ctypes.c_size_t(len(attributes)))


def restrict_files(listed: list[str], readonly: list[str], scratch: str) -> None:
    """By Landlock (Linux 6.2), for this process and its children: list, read, or read and write these folders."""
    version = call("syscall", LANDLOCK, None, ctypes.c_size_t(0), 1)
    if version < 3:
        raise OSError(errno.ENOSYS, f"landlock: version {version}, which does not cover truncate")
    handled = (1 << 13) - 1 | 1 << 14  # all of version 1, and truncate
    rules = call("syscall", LANDLOCK, struct.pack("Q", handled), ctypes.c_size_t(8), 0)
    wanted = [*((p, 8) for p in listed if os.path.isdir(p)), *((p, 4 | 8) for p in readonly)]  # READ_DIR 8, READ_FILE 4
    for path, allowed in [*wanted, (scratch, handled & ~1), ("/dev/null", 2 | 4 | 1 << 14)]:
        parent = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            allowed &= 2 | 4 | 1 << 14
        call("syscall", LANDLOCK + 1, rules, 1, struct.pack("=Qi", allowed, parent), 0)
        os.close(parent)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("syscall", LANDLOCK + 2, rules, 0)
    os.close(rules)


def drop_rights(uid: int) -> None:
    """Become user ``uid`` where root may choose, give up every capability, and keep programs from looking in."""
    if os.getuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # root of a namespace with a single user
            pass
    if sys.platform == "linux":
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
        die_with_parent()  # a change of user clears it


def limit(**limits: int) -> None:
    """Resource limits by name (AS=bytes, CPU=seconds, ...), never above what is allowed here."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def confine(memory: int, seconds: int, file_size: int, threads: int) -> None:
    """Limit this process: bytes of memory, seconds of CPU, bytes per file, threads; on Linux no process, no network.

    A system call that no program needs fails with EPERM, in this process and its threads, for good.
    """
    none = dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE"), 0)
    limit(AS=memory, CPU=seconds, FSIZE=file_size, NPROC=threads, NOFILE=64, **none)
    if sys.platform == "linux":
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _filter_calls()


def _filter_calls() -> None:
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"seccomp: no table for {machine}, only for {' and '.join(MACHINES)}")

    def numbers(table: str) -> list[int]:
        found = table.split()[1 + list(MACHINES).index(machine) :: 3]
        return [int(n) for n in found if n != "-"]

    def equals(value: int, skip: int) -> tuple:
        return (0x15, 0, skip, value)  # else skip that many steps

    kill, allow, deny = (6, 0, 0, 0x80000000), (6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x00050000 | errno.EPERM)
    arch, number, first = (0x20, 0, 0, 4), (0x20, 0, 0, 0), (0x20, 0, 0, 16)  # loads: architecture, call, argument 0
    code = [arch, (0x15, 1, 0, MACHINES[machine]), kill, number, (0x35, 0, 1, 0x40000000), kill]  # no 32-bit calls
    for n in numbers(DENIED):
        code += [equals(n, 1), deny]
    for n in numbers(OWN_ONLY):
        code += [equals(n, 4), first, equals(os.getpid(), 1), allow, deny]
    for n in numbers(ZERO_ONLY):
        code += [equals(n, 4), first, equals(0, 1), allow, deny]
    for n in numbers(ONE_NEVER):
        code += [equals(n, 4), first, equals(1, 1), deny, allow]
    for n in numbers(THREADS_ONLY):
        code += [equals(n, 4), first, (0x45, 0, 1, 0x10000), allow, deny]  # CLONE_THREAD
    for n in numbers(ABSENT):
        code += [equals(n, 1), (6, 0, 0, 0x00050000 | errno.ENOSYS)]
    code.append(allow)
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    call("prctl", PR_SET_SECCOMP, 2, struct.pack("HP", len(code), ctypes.addressof(program)), 0, 0)
