"""Lanes as compact columns."""

import base64
import json
import zlib
from typing import Any

from penstock.runtime.record.timeline import place
from penstock.runtime.report.follow import Work
from penstock.runtime.report.schedule_data import Chart, Row, Strip, encode, thin


def work(index: int, start: int, end: int, node: str = "n", version: int = 0) -> Work:
    return Work("p/0", node, index, start * 1000, end * 1000, "group", version, cause=("m[#] was done", index + 5))


def decoded(chart: Chart, most: int = 10_000) -> Any:
    text, _ = encode(chart, most)
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_differences_add_up_to_the_bars() -> None:
    items = [work(4, 10, 30), work(2, 20, 25), work(9, 40, 41)]
    data = decoded(Chart([Row("p/0", "p", Strip(items))], [(0, 41_000)], end=41_000))
    columns = data["rows"][0]["real"]["main"]
    starts = [sum(columns["s"][: i + 1]) for i in range(3)]
    indices = [sum(columns["i"][: i + 1]) for i in range(3)]
    assert (starts, indices, columns["d"]) == ([10, 20, 40], [4, 2, 9], [20, 5, 1])
    assert columns["x"] == [5, 5, 5]
    assert columns["k"] == [0, 1, 0]
    assert (data["names"], data["causes"], data["ends"], data["end"]) == (
        [["n", "group"]], ["m[#] was done"], [[0, 41]], 41)  # fmt: skip


def test_bars_that_overlap_are_on_tracks_of_their_own() -> None:
    tracks, num = place([work(0, 0, 10), work(1, 2, 4), work(2, 4, 6), work(3, 5, 9), work(4, 10, 11)])
    assert (tracks, num) == ([0, 1, 1, 2, 0], 3)


def test_a_long_run_is_merged_in_its_middle_by_node_and_version() -> None:
    items = [work(i, 10 * i, 10 * i + 8, version=i // 50) for i in range(3000)]
    strip = Strip(list(items))
    gone = thin([strip], 300)
    assert len(strip.work) + gone == 3000
    assert len(strip.work) < 300
    counted = sum(getattr(w, "count", 1) for w in strip.work)
    assert counted == 3000
    assert strip.work[0].index == 0
    assert max(w.end for w in strip.work) == items[-1].end


def test_few_bars_stay_as_they_are() -> None:
    strip = Strip([work(i, i, i + 1) for i in range(10)])
    assert thin([strip], 10) == 0
    assert len(strip.work) == 10


def test_a_lanes_room_and_the_programs_tracks_do_not_depend_on_the_evaluation() -> None:
    program = [work(i, i, i + 10) for i in range(4)]
    evaluation = [work(i, 100, 200, node="evaluate.n") for i in range(50)]
    alone, both = (decoded(Chart([Row("p/0", "p", Strip(items), room=6)], []))["rows"][0] for items in
                   (program, program + evaluation))  # fmt: skip
    assert (alone["room"], alone["tracks"]) == (6, [4, 0])
    assert (both["room"], both["tracks"]) == (6, [4, 50])


def test_the_real_side_and_the_predicted_one_have_the_same_tracks() -> None:
    predicted = Strip([work(0, 0, 10), work(1, 5, 15), work(2, 6, 16)])
    row = decoded(Chart([Row("p/0", "p", Strip([work(0, 0, 10)]), predicted)], []))["rows"][0]
    assert (row["room"], row["tracks"]) == (3, [3, 0])
