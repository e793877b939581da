"""Calls of an empty method of Ray's actors, to compare with `round_trips`; with the same arguments and output.

    python benchmarks/ray_calls.py PROCESSES THREADS WINDOW SECONDS

THREADS above 1 makes threaded actors, with that many calls at once in each process. All calls of a round are issued and
then awaited together, the fastest method of those tried (the others: a new call for each one that `ray.wait` returns;
two alternating rounds).
"""

import json
import os
import sys
from time import perf_counter, sleep

# Set before Ray is imported. Otherwise its workers have niceness 15 and yield to any other load.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

import ray

START_S = 180.0
"""Deadline in seconds for all actors to answer their first call."""
ANSWER_S = 60.0
"""Deadline in seconds for a round of calls."""


class Actor:
    def nothing(self) -> None:
        """What a task does: nothing."""


def measure(processes: int, threads: int, window: int, seconds: float) -> dict[str, float]:
    """Measure seconds of start-up, and calls per second with one in flight, one per thread, and `window` per thread."""
    begin = perf_counter()
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        actor = ray.remote(num_cpus=0, max_concurrency=threads)(Actor)
        actors = [actor.remote() for _ in range(processes)]
        ray.get([a.nothing.remote() for a in actors], timeout=START_S)
        started = perf_counter() - begin
        sleep(1.0)  # lets background work of the start finish
        workers = [a for a in actors for _ in range(threads)]
        one = rate_one_at_a_time(workers, seconds)
        each, pipelined = rate(workers, 1, seconds), rate(workers, window, seconds)
        return {"start_s": started, "one_in_flight": one, "one_at_each": each, "pipelined": pipelined}
    finally:
        ray.shutdown()


def rate_one_at_a_time(workers: list["ray.actor.ActorHandle"], seconds: float) -> float:
    """Measure calls per second with each call made when the previous one has returned, the workers taking turns."""
    _call_in_turn(workers, seconds / 4)
    begin = perf_counter()
    done = _call_in_turn(workers, seconds)
    return done / (perf_counter() - begin)


def _call_in_turn(workers: list["ray.actor.ActorHandle"], seconds: float) -> int:
    done, until = 0, perf_counter() + seconds
    while perf_counter() < until:
        ray.get(workers[done % len(workers)].nothing.remote(), timeout=ANSWER_S)
        done += 1
    return done


def rate(workers: list["ray.actor.ActorHandle"], window: int, seconds: float) -> float:
    """Measure calls per second, after a warm-up of a quarter of the time."""
    _rounds(workers, window, seconds / 4)
    begin = perf_counter()
    done = _rounds(workers, window, seconds)
    return done / (perf_counter() - begin)


def _rounds(workers: list["ray.actor.ActorHandle"], window: int, seconds: float) -> int:
    done, until = 0, perf_counter() + seconds
    while perf_counter() < until:
        ray.get([a.nothing.remote() for _ in range(window) for a in workers], timeout=ANSWER_S)
        done += window * len(workers)
    return done


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
