"""Pictures: boxes that hold their text, wires that pass no box, one well-formed file."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph import Graph, load, trace
from penstock.graph.ir import Argument, Input, Node, Output, Ref
from penstock.graph.svg import NOTE, TITLE, GraphLayout, Measured, Placed, svg

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")
NAMES = ("aipo", "actor_critic", "anchored", "evaluate")
SVG = "{http://www.w3.org/2000/svg}"


def graph_of(name: str) -> Graph:
    return trace(load(f"{PROGRAMS}:{name}"))


# How it is drawn ------------------------------------------------------------------------------------------


def crosses(a: tuple[float, float], b: tuple[float, float], box: Placed) -> bool:
    """True if a piece of wire runs through the inside of a box."""
    (left, right), (top, bottom) = sorted((a[0], b[0])), sorted((a[1], b[1]))
    inside_x = left < box.x + box.width - 1 and right > box.x + 1
    return inside_x and top < box.y + box.height - 1 and bottom > box.y + 1


def assert_clean(drawn: GraphLayout) -> None:
    boxes = list(drawn.placed.values())
    for one, two in combinations(boxes, 2):
        apart_x = one.x + one.width <= two.x or two.x + two.width <= one.x
        assert apart_x or one.y + one.height <= two.y or two.y + two.height <= one.y
    for placed in boxes:
        lane = drawn.lanes[placed.lane]
        assert lane.y < placed.y
        assert placed.y + placed.height < lane.y + lane.height
        assert placed.width >= max(len(placed.box.title) * TITLE, len(placed.box.note) * NOTE)
        assert placed.x + placed.width < drawn.width
    for wire in drawn.wires:
        for start, end in pairwise(wire.points):
            assert start[0] == end[0] or start[1] == end[1], "wires are right-angled"
            assert not any(crosses(start, end, box) for box in boxes), wire.link
            assert 0 <= start[0] <= drawn.width
            assert 0 <= start[1] <= drawn.height


Piece = tuple[tuple[float, float], tuple[float, float]]


def overlap(one: Piece, two: Piece) -> bool:
    """True if two right-angled pieces of wire lie on one another."""
    for along, across in ((0, 1), (1, 0)):
        (a, b), (c, d) = sorted((one[0][along], one[1][along])), sorted((two[0][along], two[1][along]))
        same = one[0][across] == one[1][across] == two[0][across] == two[1][across]
        if same and min(b, d) - max(a, c) > 1:
            return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_wires_of_different_values_never_lie_on_one_another(name: str) -> None:
    assert_apart(GraphLayout(graph_of(name)))


def assert_apart(drawn: GraphLayout) -> None:
    for one, two in combinations(drawn.wires, 2):
        if (one.link.tail, one.link.output) != (two.link.tail, two.link.output):
            pieces = [(a, b) for a in pairwise(one.points) for b in pairwise(two.points)]
            assert not any(overlap(a, b) for a, b in pieces), (one.link, two.link)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_of_programs_are_clean(name: str) -> None:
    assert_clean(GraphLayout(graph_of(name)))


def test_each_wire_ends_at_its_box_and_each_output_has_one_label() -> None:
    drawn = GraphLayout(graph_of("actor_critic"))
    for wire in drawn.wires:
        head, (x, y) = drawn.placed[wire.link.head], wire.points[-1]
        assert head.x <= x <= head.x + head.width
        assert head.y <= y <= head.y + head.height
    labels = [wire.label for wire in drawn.wires if wire.link.kind == "data" and wire.label]
    assert sorted(labels) == ["Advantages", "Prompts", "Rewards", "Rollouts", "Values"]
    assert sorted(w.label for w in drawn.wires if w.link.kind == "feedback") == ["critic, lag=2", "policy, lag=1"]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Programs of any shape: nodes read earlier nodes, weights, or the changing value itself."""
    count = draw(st.integers(1, 7))
    pools = [f"pool {i}" for i in range(draw(st.integers(1, 3)))]
    nodes = [
        Node("sync", "broadcast", (Input("value", "m:P", Ref("policy")),), (Output("out", "m:W"),),
             clock="update", construct="broadcast", lag=1)
    ]  # fmt: skip
    known = [Ref("prompts"), Ref("sync")]
    for i in range(count):
        refs: Sequence[Ref] = draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))
        inputs = tuple(Input(str(j), "m:X", ref) for j, ref in enumerate(refs))
        outputs = (Output("a", "m:First"), Output("b", "m:Second")) if draw(st.booleans()) else (Output("out", "m:X"),)
        nodes.append(Node(f"node{i}", "m:f", inputs, outputs, pool=draw(st.sampled_from(pools))))
        known += [Ref(f"node{i}", o.name) for o in outputs]
    last = (Input("policy", "m:P", Ref("policy")), Input("x", "m:X", known[-1]))
    nodes.append(
        Node("update", "m:u", last, (Output("out", "m:P"),), pool=draw(st.sampled_from(pools)), clock="update")
    )
    policy, prompts = (
        Argument("policy", "carried", "m:P", "", "trainer"),
        Argument("prompts", "source", "m:Q", "", pools[0]),
    )
    return Graph("any", "m:any", (policy, prompts), tuple(nodes), (("policy", Ref("update")),))


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_pictures_of_any_graph_are_clean(graph: Graph) -> None:
    assert_clean(GraphLayout(graph))
    assert_apart(GraphLayout(graph))
    ElementTree.fromstring(svg(graph))


# The file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_svg_is_one_well_formed_file_without_links(name: str) -> None:
    text = svg(graph_of(name))
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert "href" not in text
    assert "<script" not in text
    assert f"{PROGRAMS.parent}" not in text


def test_an_svg_shows_names_types_pools_and_lags() -> None:
    root = ElementTree.fromstring(svg(graph_of("aipo")))
    texts = ["".join(e.itertext()) for e in root.iter(f"{SVG}text")]
    for word in ("generate", "samples=8", "Rollouts", "generator", "policy, lag=1", "to a later update"):
        assert word in texts
    assert root.findtext(f"{SVG}title") == "aipo: Asynchronous importance-weighted policy optimisation."
    classes = [e.get("class") for e in root.iter(f"{SVG}path")]
    assert classes.count("wire feedback") == 3  # one of them in the legend


def test_a_page_shows_what_was_measured() -> None:
    found = Measured({"score": "2 ms"}, {"score": 0.5, "generate": 0.0}, {"score"}, {"scorer"})
    root = ElementTree.fromstring(svg(graph_of("aipo"), found))
    texts = ["".join(e.itertext()) for e in root.iter("text")]
    assert {"2 ms", "bounds", "scorerbounds the run"} < set(texts)
    assert "to a later update" not in texts
    assert [e.get("class") for e in root.iter("rect")].count("share") == 1


def test_names_are_escaped_and_long_summaries_cut() -> None:
    graph = graph_of("aipo").replace(name='a<b>&"c"', doc="long " * 80)
    root = ElementTree.fromstring(svg(graph))
    heading = next(e for e in root.iter(f"{SVG}text"))
    assert heading.text == 'a<b>&"c"'
    assert "".join(heading.itertext()).endswith("…")


def test_an_empty_graph_can_be_drawn() -> None:
    ElementTree.fromstring(svg(Graph("empty", "", (), (), ())))
