"""The status is said not too often, with what each pool is at."""

from typing import Any

from penstock.runtime.control.recorder import EVERY, QUIET, Status


def test_a_status_is_due_some_time_after_the_last() -> None:
    status = Status(lambda line: None, 100.0, {})
    assert status.due(100.0)
    status.tell(100.0, {})
    assert not status.due(100.0 + EVERY / 2)
    assert status.due(100.0 + EVERY * 2)
    assert not status.due(100.0 + EVERY * 2, QUIET)


def test_a_pool_is_at_what_its_replicas_are_at() -> None:
    said: list[dict[str, Any]] = []
    live = {"generator/1": 3}
    status = Status(said.append, 100.0, live)
    status.doing |= {"generator/0": "generate[4]", "generator/1": "generate[5]", "trainer/0": "data"}
    status.tell(102.0, {"stage": "train"})
    assert said == [
        {
            "kind": "status",
            "time": 2.0,
            "stage": "train",
            "pools": {
                "generator": {"doing": ["generate[4]", "generate[5]"], "version": 3},
                "trainer": {"doing": ["data"], "version": None},
            },
        }
    ]
