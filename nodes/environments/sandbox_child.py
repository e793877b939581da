"""The process of a tool: it sets limits, then runs code that a model wrote. Never imported.

Started as `python -I -S -c THIS CODE CPU_SECONDS MEMORY_MIB ALARM_SECONDS USER GUARD ERRORS`. CODE is the descriptor of
a file with the code; standard input is the code's own. USER is the user that root becomes (-1: the process keeps its
own). GUARD is 1 if no kernel namespace isolates files, network and processes: then an audit hook refuses them. The
hook stops accidents, not an attacker. With ERRORS 0 standard error is discarded.
"""

import ast
import builtins
import os
import resource
import signal
import sys
from typing import Any

REFUSED = ("os.", "socket.", "subprocess.", "shutil.", "ctypes.", "pty.", "resource.", "signal.", "syslog.", "fcntl.")
READS = ("open", "os.listdir", "os.scandir")
MODULES = ("ctypes", "_ctypes", "_posixsubprocess", "multiprocessing")
DEVICES = ("/dev/stdin", "/dev/null")
# No other limit counts the kernel's memory of a thread, and a thread made without the C library needs no memory of its
# own. This limit counts the threads of the user: in the sandbox those of the call. Before Linux 5.14, and always
# without the sandbox, it would count all threads of a user who is not root; without the sandbox it is not set.
THREADS = 4096


def lower(kind: int, soft: int, hard: int) -> None:
    """Set a limit of this process, which cannot be raised again. A hard limit that is lower already stays."""
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def limit(cpu_seconds: int, memory_mib: int, alarm_seconds: int, user: int) -> None:
    """Set hard limits of this process. The alarm ends it even if no process is left to kill it."""
    size = memory_mib << 20
    for kind, bounds in (
        (resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1)),
        (resource.RLIMIT_AS, (size, size)),
        (resource.RLIMIT_FSIZE, (0, 0)),
        (resource.RLIMIT_CORE, (0, 0)),
        # Pipes and sockets have memory of their own, which no other limit counts.
        (resource.RLIMIT_NOFILE, (64, 64)),
        (resource.RLIMIT_MEMLOCK, (0, 0)),
    ):
        lower(kind, *bounds)
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    signal.alarm(alarm_seconds)


def guard() -> None:
    """From now on refuse other processes, the network, and all files except reading the standard library's."""
    # Look up now what `refuse` calls: later the code could replace these functions.
    library = os.path.realpath(os.path.dirname(os.__file__)) + os.sep
    realpath, fsdecode = os.path.realpath, os.fsdecode
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in READS:
            path, flags = args[0], args[2] if event == "open" else 0
            known = isinstance(path, str | bytes) and (realpath(fsdecode(path)) + os.sep).startswith(library)
            if isinstance(path, int) or path in DEVICES or (known and not (flags or 0) & writing):
                return
        elif not event.startswith(REFUSED) and not (event == "import" and args[0] in MODULES):
            return
        what = f"{event} of {args[0]!r}" if event in (*READS, "import") else event
        raise PermissionError(f"{what} is not allowed here")

    sys.addaudithook(refuse)


def run(code: str) -> int:
    """Run code as a notebook does: if the last line is an expression, print its value, too. Return an exit status."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, "<call>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<call>", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<call>", "eval"), scope)
            if value is not None:
                print(repr(value))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code)
        return 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}".removesuffix(": "))
        return 1
    return 0


if __name__ == "__main__":
    _file, _cpu, _memory, _alarm, _user, _guarded, _errors = map(int, sys.argv[1:])
    with open(_file, encoding="utf-8", newline="") as _source:
        _code = _source.read()
    if not _errors:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # As in a program that is started normally; `-S` leaves these out.
    sys.argv = [""]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    limit(_cpu, _memory, _alarm, _user)
    if _guarded:
        guard()
    else:
        lower(resource.RLIMIT_NPROC, THREADS, THREADS)
    sys.exit(run(_code))
