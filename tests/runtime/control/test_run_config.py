"""A run's options: one dataclass from which flags, `config.json`, the ranks' setup and the scheduler's rules derive."""

import json
import sys
from dataclasses import MISSING, Field, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import load, trace
from penstock.graph.types import Context
from penstock.runtime.cli.flags import RunFlags, changes, with_changes
from penstock.runtime.cli.run import ResumeFlags
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import NODE_OPTIONS, OnResume, RunConfig, RunOptions, annotation, check_limits
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.compile import Rules

HOST = Cluster(hosts=(Host(name="local", cores=2),))


def defaults(cls: Any) -> dict[str, Any]:
    def default(field: "Field[Any]") -> Any:
        return field.default if field.default_factory is MISSING else field.default_factory()

    return {field.name: default(field) for field in fields(cls)}


def a_run(**options: Any) -> RunConfig:
    return RunConfig.make(trace(load("toy"), {}), None, HOST, RunOptions(**{"device": "cpu", **options}))


def test_every_option_is_a_flag_of_the_same_name_type_and_default() -> None:
    options, flags = ({f.name: (f.type, f.default) for f in fields(cls)} for cls in (RunOptions, RunFlags))
    assert options.items() <= flags.items()
    assert not {"cluster", "out", "config", "in_process", "plain", "json"} & options.keys()


def test_flags_give_the_options_that_they_were_given() -> None:
    assert RunFlags(slots=7, model="/m").options("/m") == RunOptions(slots=7, model="/m")
    assert RunFlags(model="new").options("new") == RunOptions()


def test_config_json_has_every_option(tmp_path: Path) -> None:
    config, folder = a_run(batch=3), RunFolder.create(tmp_path / "run")
    config.write(folder, {})
    folder.unlock()
    written = json.loads(folder.config.read_text())["flags"]
    assert written == json.loads(json.dumps(asdict(config.flags)))
    assert list(written) == list(defaults(RunOptions))
    assert RunConfig.load(folder) == config


def test_an_option_outside_of_its_limits_is_refused_by_the_flag_and_by_config_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--slots: given 0, needed at least 1"):
        check_limits(RunFlags(slots=0))
    folder = RunFolder.create(tmp_path / "run")
    replace(a_run(), flags=RunOptions(slots=0)).write(folder, {})
    folder.unlock()
    with pytest.raises(RecordError, match="slots"):
        RunConfig.load(folder)


def test_all_limits_that_are_broken_are_said_at_once() -> None:
    wrong = RunOptions(updates=-1, seed=2**63, deadline=0.0, startup_deadline=float("inf"))
    with pytest.raises(ValueError, match=r"^--updates: .*\n--seed: .*\n--deadline: .*\n--startup-deadline: .*$"):
        check_limits(wrong)
    check_limits(RunOptions())


def test_a_ranks_setup_has_the_options_that_nodes_see() -> None:
    given = {"batch": 3, "updates": 5, "max_tokens": 9, "seed": 11, "slots": 13, "dtype": "bfloat16"}
    given |= {"model": "/model", "data": "words"}
    assert set(NODE_OPTIONS) == given.keys()
    config = a_run(**given)
    for replica in config.plan.replicas:
        for context in config.setup(replica, 0, Path("run"), None).contexts.values():
            assert {name: getattr(context, name) for name in NODE_OPTIONS} == given


def test_what_a_context_and_the_rules_share_with_the_options_has_their_defaults() -> None:
    known = defaults(RunOptions)
    assert {name: defaults(Context)[name] for name in NODE_OPTIONS} == {name: known[name] for name in NODE_OPTIONS}
    shared = {name: value for name, value in defaults(Rules).items() if name in known and value is not MISSING}
    assert shared.items() <= known.items()
    assert set(shared) == {"versions", "retries", "on_failure", "drops", "failures"}


def test_rules_have_the_options_of_their_names() -> None:
    options: dict[str, Any] = {"batch": 2, "versions": "pinned", "retries": 3, "drops": 4, "failures": 5}
    assert a_run(updates=7, **options).rules(6) == Rules(**options, start=6, end=7)


def test_a_resume_takes_the_options_that_say_so_and_no_others() -> None:
    marked = {name for name in defaults(RunOptions) if annotation(RunOptions, name, OnResume)}
    assert marked == {"updates", "mesh"}
    assert {field.name for field in fields(ResumeFlags)} & defaults(RunOptions).keys() == set()
    flags: Any = with_changes(ResumeFlags)
    assert changes(flags("runs/r")) == {}
    assert changes(flags("runs/r", updates=0, mesh=("trainer=tp2",))) == {"updates": 0, "mesh": ("trainer=tp2",)}


def test_a_run_on_no_device_in_particular_says_on_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert RunOptions().device == "auto"
    assert a_run(device="auto").flags.device == "cpu"
