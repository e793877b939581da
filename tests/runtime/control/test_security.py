"""Secrets are private and new for each run; a server listens on one interface, never on all."""

import json
import os
import stat
from pathlib import Path

import pytest

from penstock.runtime.cluster.endpoints import ipc_endpoint, socket_file, tcp_endpoint
from penstock.runtime.control.security import Join, KeyFileError, Keys, ServerKeys

# Secrets are new for each run, private on disk, and never shown.


TCP = "tcp://127.0.0.1:0"


def test_each_run_has_its_own_token_and_each_host_its_own_keys(tmp_path: Path) -> None:
    one, two = (Keys.make("run1", TCP, ["a", "b"]) for _ in range(2))
    assert one.server.token != two.server.token
    pairs = [*one.hosts.values(), *two.hosts.values()]
    assert len({pair.secret for pair in pairs}) == 4
    assert one.server.allowed == {host: pair.public for host, pair in one.hosts.items()}
    join = one.join("a", "tcp://127.0.0.1:9", tmp_path)
    assert (join.server, join.public) == (one.server.public, one.hosts["a"].public)


def test_a_unix_socket_needs_no_keys(tmp_path: Path) -> None:
    keys = Keys.make("run1", "ipc:///x", ["a"])
    assert (keys.server.secret, keys.server.allowed, keys.join("a", "ipc:///x", tmp_path).secret) == ("", {}, "")


def test_several_hosts_have_keys_to_ask_each_other_for_values_even_where_the_controller_needs_none(
    tmp_path: Path,
) -> None:
    for endpoint in ("ipc:///x", TCP):
        keys = Keys.make("run1", endpoint, ["a", "b"])
        joins = {host: keys.join(host, endpoint, tmp_path, "10.0.0.1") for host in ("a", "b")}
        assert joins["a"].hosts == joins["b"].hosts == {host: pair.public for host, pair in keys.hosts.items()}
        assert joins["a"].hosts["a"] == joins["a"].public != joins["b"].public
        assert joins["b"].address == "10.0.0.1"
        assert keys.join("a", endpoint, tmp_path).address == "127.0.0.1"
    assert Keys.make("run1", "ipc:///x", ["a"]).join("a", "ipc:///x", tmp_path).hosts == {}


def test_files_are_read_back_equal_and_private(tmp_path: Path) -> None:
    keys = Keys.make("run1", TCP, ["a"])
    join = keys.join("a", "tcp://127.0.0.1:9", tmp_path)
    keys.server.write(tmp_path / "keys" / "controller.json")
    join.write(tmp_path / "keys" / "a.json")
    assert ServerKeys.read(tmp_path / "keys" / "controller.json") == keys.server
    assert Join.read(tmp_path / "keys" / "a.json") == join
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "keys", *(tmp_path / "keys").iterdir())]
    assert modes == [0o700, 0o600, 0o600]


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    door = Keys.make("run1", TCP, ["a"]).server
    door.write(tmp_path / "door.json")
    with pytest.raises(FileExistsError):
        door.write(tmp_path / "door.json")


def test_a_file_that_others_may_read_or_that_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "door.json"
    Keys.make("run1", TCP, ["a"]).server.write(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        ServerKeys.read(path)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="not a key file"):
        Join.read(path)
    for text in ("", "[]", "{}", '{"format": 1, "run": "x", "surprise": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a key file"):
            ServerKeys.read(path)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    keys = Keys.make("run1", TCP, ["a"])
    shown = repr(keys) + repr(keys.join("a", TCP, tmp_path))
    for secret in (keys.server.token, keys.server.secret, keys.hosts["a"].secret):
        assert secret not in shown


def test_whoever_gives_another_file_is_told_which_is_needed(tmp_path: Path) -> None:
    keys = Keys.make("run1", TCP, ["a"])
    path = tmp_path / "a.json"
    keys.server.write(path)
    needed = r"needed the join file that `penstock run --cluster` wrote for this host"
    with pytest.raises(KeyFileError, match=rf"a\.json: not a key file of Penstock \(.*`host`\); {needed}"):
        Join.read(path)
    keys.join("a", TCP, tmp_path).write(tmp_path / "b.json")
    with pytest.raises(KeyFileError, match=r"key file with address, again, folder.*host.*needed what the launcher"):
        ServerKeys.read(tmp_path / "b.json")
    (tmp_path / "b.json").write_text(json.dumps({**json.loads((tmp_path / "b.json").read_text()), "cores": 3}))
    with pytest.raises(KeyFileError, match=f"given a key file with cores; {needed}"):
        Join.read(tmp_path / "b.json")
    for there in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(KeyFileError, match=f"{there}: cannot be read: .*; {needed}"):
            Join.read(there)


# Addresses: one interface, never all; a Unix socket whose path fits.


def test_the_socket_is_in_the_run_folder() -> None:
    assert ipc_endpoint(Path("/runs/a")) == "ipc:///runs/a/control.sock"
    assert socket_file("ipc:///runs/a/control.sock") == Path("/runs/a/control.sock")
    assert socket_file("tcp://127.0.0.1:1") is None


def test_a_path_that_is_too_long_moves_to_a_private_folder(tmp_path: Path) -> None:
    one, two = (ipc_endpoint(tmp_path / ("x" * 120) / name, tmp_path) for name in "ab")
    assert one != two
    for endpoint in (one, two):
        file = socket_file(endpoint)
        assert file is not None
        assert file.parent == tmp_path / f"penstock-{os.geteuid()}"
        assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_enter_is_not_listened_in(tmp_path: Path) -> None:
    (tmp_path / f"penstock-{os.geteuid()}").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="0700"):
        ipc_endpoint(tmp_path / ("x" * 120), tmp_path)


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"penstock-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        ipc_endpoint(tmp_path / ("x" * 120), tmp_path)


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("tcp://10.0.0.1:0", "tcp://10.0.0.1:0"),
        ("localhost:*", "tcp://localhost:0"),
        ("[::1]:80", "tcp://[::1]:80"),
    ],
)
def test_an_address_and_a_port_make_an_endpoint(given: str, endpoint: str) -> None:
    assert tcp_endpoint(given) == endpoint


@pytest.mark.parametrize("given", ["", "5555", ":5555", "host", "host:", "host:99999", "host:-1", "host:٣"])
def test_anything_else_is_refused_with_an_example(given: str) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:0"):
        tcp_endpoint(given)


@pytest.mark.parametrize("given", ["fd77::1:5555", "::1:0", "tcp://fe80::1:2"])
def test_an_ipv6_address_needs_brackets(given: str) -> None:
    with pytest.raises(ValueError, match=r"\[.*\]:"):
        tcp_endpoint(given)


@pytest.mark.parametrize("given", ["0.0.0.0:1", "*:1", "[::]:1", "tcp://0.0.0.0:1"])
def test_all_interfaces_at_once_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="every interface"):
        tcp_endpoint(given)
