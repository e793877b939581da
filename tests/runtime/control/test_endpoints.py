"""Addresses: one interface, never all; a Unix socket whose path fits."""

import os
from pathlib import Path

import pytest

from penstock.runtime.cluster.endpoints import ipc_endpoint, socket_file, tcp_endpoint


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


@pytest.mark.parametrize("given", ["0.0.0.0:1", "*:1", "[::]:1", "tcp://0.0.0.0:1"])
def test_all_interfaces_at_once_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="every interface"):
        tcp_endpoint(given)
