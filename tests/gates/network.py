"""Hosts with a network between them, on this machine. Each is a network namespace with an address of its own; its
processes have their own loopback, `/dev/shm`, host name and pids. Needs root, Linux and iproute2.
"""

import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

LIMIT_S = 20.0
"""Seconds for a command of iproute2."""

# The first process of a host. It prints what the command has left on the host, and fails if there is anything. After a
# command that was killed, it waits some seconds for the rest to go.
INIT = r"""
mount -t tmpfs tmpfs /dev/shm && hostname "$0" || exit 99
for folder in $HIDDEN; do mount -t tmpfs tmpfs "$folder" || exit 99; done
"$@"; status=$?
looks=1; [ $status -le 128 ] || looks=100
while [ $looks -gt 0 ]; do
    left=; looks=$((looks - 1))
    for process in /proc/[0-9]*; do
        words=$(tr '\0' ' ' 2>/dev/null < "$process/cmdline")  # of one that has ended, nothing
        [ "$process" = /proc/$$ ] || [ -z "$words" ] || left="$left left: $words"
    done
    for segment in /dev/shm/*; do [ ! -e "$segment" ] || left="$left left: $segment"; done
    [ -n "$left" ] || exit $status
    sleep 0.1
done
echo "$left" >&2
exit 98
"""


class Network:
    """Named hosts, joined by a switch; `address` has the IPv4 address of each, `ipv6` the IPv6 address in brackets. All
    are removed at the end."""

    def __init__(self, *hosts: str) -> None:
        self._token = secrets.token_hex(3)
        self.address = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, 1)}
        self.ipv6 = {host: f"[fd77::{number}]" for number, host in enumerate(hosts, 1)}

    def __enter__(self) -> "Network":
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def on(self, host: str, *, hidden: Sequence[Path] = ()) -> list[str]:
        """Return the words before a command that make it run on a host, where the `hidden` folders are empty. The exit
        status is 98 if it has left processes or segments there; stderr lists them."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace(host)}", "env", f"HIDDEN={' '.join(map(str, hidden))}"]
        apart = ["--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        return [*enter, "unshare", *apart, "sh", "-c", INIT, host]

    def cut(self, host: str) -> None:
        """Pull the host's cable."""
        _ip("-n", self.namespace("switch"), "link", "set", "dev", host, "down")

    def close(self, host: str, ports: str, sender: str = "") -> None:
        """Drop all packets to these TCP ports of a host ("7000", "1024-65534"), from one sender or from all, without an
        answer, as a firewall does."""
        rule = "-n", self.namespace(host), "rule"
        # The kernel's rule for local addresses is the first one. Move it, so that a rule can come before it.
        _ip(*rule, "add", "pref", "20", "lookup", "local")
        where = ["from", self.address[sender]] if sender else []
        _ip(*rule, "add", "pref", "10", *where, "iif", "eth0", "ipproto", "tcp", "dport", ports, "blackhole")
        _ip(*rule, "delete", "pref", "0")

    def listening(self, host: str) -> set[str]:
        """Return the addresses at which a process listens on a host, without ports."""
        said = _run("nsenter", f"--net=/run/netns/{self.namespace(host)}", "ss", "--no-header", "-ltun")
        return {line.split()[4].rpartition(":")[0] for line in said.splitlines()}

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return f"penstock-{self._token}-{host}"

    def _build(self) -> None:
        switch = self.namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch0", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch0", "up")
        for host, address in self.address.items():
            own = self.namespace(host)
            _ip("netns", "add", own)
            _ip("-n", switch, "link", "add", "name", host, "type", "veth", "peer", "name", "eth0", "netns", own)
            _ip("-n", switch, "link", "set", "dev", host, "master", "switch0", "up")
            _ip("-n", own, "address", "add", f"{address}/24", "dev", "eth0")
            # nodad: use the address at once, without asking whether another host has it.
            _ip("-n", own, "address", "add", f"{self.ipv6[host].strip('[]')}/64", "dev", "eth0", "nodad")
            for name in ("eth0", "lo"):
                _ip("-n", own, "link", "set", "dev", name, "up")

    def _remove(self) -> None:
        """Delete the namespaces, and with them their links."""
        for host in ("switch", *self.address):
            if Path(f"/run/netns/{self.namespace(host)}").exists():
                _ip("netns", "delete", self.namespace(host))


def why_not() -> str:
    """Return why such hosts are not possible here; "" if they are."""
    try:
        with Network("a") as network:
            _run(*network.on("a"), "true")
    except FileNotFoundError as error:
        return f"needs iproute2 and util-linux: no {error.filename}"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"needs root, and network namespaces with veth links: {error}"
    return ""


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:8])}: {done.stderr.strip()}")
    return done.stdout
