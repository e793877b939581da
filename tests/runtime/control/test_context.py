"""One context for all clients of a process."""

import zmq

from penstock.runtime.control.sockets import SharedContext


def test_users_at_the_same_time_share_one_context() -> None:
    shared = SharedContext()
    first, second = shared.take(), shared.take()
    assert first is second
    shared.give()
    assert not second.closed
    shared.give()
    assert second.closed


def test_a_user_after_the_last_one_gets_a_new_context() -> None:
    shared = SharedContext()
    old = shared.take()
    shared.give()
    new = shared.take()
    assert not new.closed
    assert new is not old
    shared.give()


def test_the_last_user_waits_for_what_another_one_still_sends() -> None:
    shared, other = SharedContext(), zmq.Context[zmq.Socket[bytes]]()
    sink = other.socket(zmq.PULL)
    port = sink.bind_to_random_port("tcp://127.0.0.1")
    sockets = [shared.take().socket(zmq.PUSH) for _ in range(2)]
    for socket in sockets:
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(bytes(1 << 20))
        socket.close(linger=60_000)
        shared.give()
    assert [len(sink.recv()) for _ in sockets if sink.poll(60_000)] == [1 << 20] * 2
    other.destroy(linger=0)
