"""A Ray actor that runs an agent, without Ray: it takes a ticket as bytes, and returns how the agent ended."""

import os
from pathlib import Path

from penstock.runtime.control.security import Ticket
from penstock.runtime.managers.ray_actor import AgentHolder

NOWHERE = "no folder"


def test_how_an_agent_has_ended_and_what_it_said_last_comes_back() -> None:
    status, said = AgentHolder().run(b"no ticket", {}, NOWHERE, 0.5)
    assert status == 2
    assert "not a key file" in said


def test_a_ticket_is_understood_and_none_of_it_is_said(tmp_path: Path) -> None:
    """The desk's host name does not exist; the agent waits half a second for it."""
    ticket = Ticket("job", "nobody.invalid:1", "k" * 40, "secret-token")
    ticket.write(tmp_path / "ticket.json")
    before = os.getcwd()
    status, said = AgentHolder().run((tmp_path / "ticket.json").read_bytes(), {}, NOWHERE, 0.5)
    assert status == 1
    assert "nobody.invalid" in said
    assert ticket.token not in said
    assert os.getcwd() == before
