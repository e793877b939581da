"""Calls of an empty method of Ray's actors, to set beside `round_trips`; with the same arguments and the same output.

    python benchmarks/ray_calls.py PROCESSES THREADS WINDOW SECONDS

THREADS above 1 makes threaded actors: that many calls at once in each process. A round of calls is asked for and then
awaited as a whole, the fastest of the ways that were tried (others: `ray.wait` and ask again; two rounds in turn).
"""

import json
import os
import sys
from time import perf_counter, sleep

# Read when Ray is imported. Its workers are niced by 15 otherwise, and would lose to whatever else runs.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

import ray

START_S = 180.0
"""Seconds for all actors to answer their first call."""
ANSWER_S = 60.0
"""Seconds for a round of calls."""


class Actor:
    def nothing(self) -> None:
        """What a task does."""


def measure(processes: int, threads: int, window: int, seconds: float) -> dict[str, float]:
    """Seconds of start-up, and calls per second with one in flight, one for each thread, and `window` for each."""
    begin = perf_counter()
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        actor = ray.remote(num_cpus=0, max_concurrency=threads)(Actor)
        actors = [actor.remote() for _ in range(processes)]
        ray.get([a.nothing.remote() for a in actors], timeout=START_S)
        started = perf_counter() - begin
        sleep(1.0)  # let what starting has left to do settle
        workers = [a for a in actors for _ in range(threads)]
        one = rate_one_at_a_time(workers, seconds)
        each, pipelined = rate(workers, 1, seconds), rate(workers, window, seconds)
        return {"start_s": started, "one_in_flight": one, "one_at_each": each, "pipelined": pipelined}
    finally:
        ray.shutdown()


def rate_one_at_a_time(workers: list["ray.actor.ActorHandle"], seconds: float) -> float:
    """Calls per second where each is asked for when the one before has returned, the workers taking turns."""
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
    """Calls per second, after a quarter of the time to warm up."""
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
