"""Commands: found by name, quick to list, plain when they refuse; how jobs are launched; which releases they take."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ds_hydra import __version__
from ds_hydra.commands.__main__ import COMMANDS, main
from ds_hydra.commands.figures import CommandParser, shipped
from ds_hydra.commands.launch import as_ours, read_options
from ds_hydra.commands.launch import main as launch
from ds_hydra.commands.launch_node import Job, code_of, job_of
from ds_hydra.config.hydra_block import ElasticConfig, HydraConfig
from ds_hydra.config.versions import NEEDED, refuse_older
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.elastic.agent import Invitation
from ds_hydra.host.environment import INVITATION, JOINS, MEMBERS_FOLDER, MOST_RANKS, longest_wait_s, members_folder
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import save_plans
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.report.trace import trace_faults
from ds_hydra.zero_hetero.errors import ConfigError

# --- The commands that users call: found by name, quick to list, and plain when they refuse.
TOOLS = Path(__file__).resolve().parents[2] / "tools"
TINY = str(TOOLS.parent / "examples" / "llama_tiny.json")
SIMULATED = ("--cost-table", "a800-7b", "--lengths", "pretraining", "--tokens", "20000", "--context", "4096")


def figures_of(folder: Path, *command: str) -> dict[str, Any]:
    """What a command that ends well writes to `--json`."""
    file = folder / "figures.json"
    assert main([*command, "--json", str(file)]) == 0
    return dict(json.loads(file.read_text()))


def test_help_lists_every_command_without_importing_torch() -> None:
    code = (
        "import sys; from ds_hydra.commands.__main__ import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(f"  {name} " in listed for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert f"usage: ds-hydra {command}" in told
    assert not re.findall(r"--\w*_\w*", told), "options have one spelling, with dashes"


def test_options_are_read_as_they_were_spelled_before() -> None:
    parser = CommandParser()
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--own_way")
    for given in (["--gpus_per_node=8", "--gpus", "3"], ["--node_size", "8", "--ranks", "3"]):
        read = parser.parse_args([*given, "--own_way", "is"])
        assert (read.gpus_per_node, read.gpus, read.own_way) == (8, 3, "is")
    with pytest.raises(SystemExit):
        parser.parse_args(["--own-ways", "1"])


def test_strategies_are_named_by_one_option_in_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("simulate", "emulate", "preview", "check", "memory", "layout", "train-tiny"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert " --strategies TEXT" in capsys.readouterr().out.replace("STRATEGIES", "TEXT"), command
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "4*tp4", "--strategies", "8*tp2", *SIMULATED])
    assert "name one strategy" in capsys.readouterr().err


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "MISSING"], "cannot read the steps file"),
        (["convert", "to-universal", "MISSING", "OUT"], "holds no checkpoint"),
        (["check", "MISSING", "--strategies", "tp1"], "does not exist"),
        (["memory", "--model", "MISSING", "--gpus", "4"], "does not exist"),
        (["layout", "NAME", "--model", "MISSING", "--gpus", "4"], "does not exist"),
        (["layout", "proj.weight", "--model", TINY, "--gpus", "4"], "parameters have the name"),
        (["layout", "model.norm.weight", "--model", TINY, "--gpus", "4", "--strategies", "tp2"], "uses 2 ranks but"),
        (["profile", "--model", "MISSING"], "does not exist"),
        (["preview", "--cost-table", "MISSING", "--lengths", "pretraining", "--gpus", "8", "--tokens", "9",
          "--context", "9"], "cannot read the cost table"),
        (["emulate", "4*tp4", "--ranks", "0", *SIMULATED], "cluster of 0 ranks"),
        (["emulate", "4*tp4", "--ranks", "1000000", *SIMULATED], "ranks can be forked"),
        (["emulate", "4*tp4", "--ranks", "8", *SIMULATED], "uses 16 ranks but the job has 8"),
        (["emulate", "4*tp3", "--ranks", "12", *SIMULATED], "no entry for tp3"),
        (["emulate", "--ranks", "8", *SIMULATED], "nothing to run"),
        (["simulate", "4*tp4", "--cost-table", "a800-7b", "--gpus", "0"], "needs at least 1"),
        (["simulate", "4*tp3", *SIMULATED], "no entry for scheme tp3"),
        (["simulate", "4*tp4", *SIMULATED, "--gpus", "8"], "uses 16 ranks but the job has 8"),
        (["simulate", "4*tp4", *SIMULATED, "--between", "10,0"], "between nodes"),
        (["simulate", "4*tp4", "--cost-table", "a800-7b"], "give --lengths, --tokens, --context"),
        (["simulate", "4*tp4", "--cost-table", shipped("a800-7b")], "give --model"),
        (["simulate", "4*tp4", *SIMULATED, "--step", "7", "--trace", "x.json"], "there are the steps 0 to 0"),
        (["simulate", str(TOOLS / "aims.py"), *SIMULATED], "not a step plan"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([text.replace("MISSING", str(tmp_path / "missing")) for text in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ds-hydra {arguments[0]}: ")
    assert words in line


@pytest.mark.parametrize("arguments", [["simulate", "4*tp4", "--trace"], ["simulate", "4*tp4", "--json"],
                                       ["preview", "--plot"], ["report", "steps.jsonl", "--json"],
                                       ["profile", "--out"]])  # fmt: skip
def test_files_that_cannot_be_written_are_refused_before_the_work(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, words in ((tmp_path / "missing/x.json", "there is no folder"), (tmp_path, "it is a folder")):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, str(file)])
        assert f"cannot write {file}: {words}" in capsys.readouterr().err


def test_steps_are_simulated_from_a_strategy_and_from_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = tmp_path / "step.json", tmp_path / "step.png"
    drawn = ("--trace", str(trace), "--gantt", str(picture))
    simulated = figures_of(tmp_path, "simulate", "4*tp4", *SIMULATED, "--steps", "2", *drawn)["steps"]
    assert list(simulated) == ["0", "1"]
    said = capsys.readouterr().out
    assert "2 steps on 16 GPUs" in said
    assert "GiB" in said
    assert not trace_faults(json.loads(trace.read_text()))
    assert picture.read_bytes().startswith(b"\x89PNG")

    table = CostTable.load(shipped("a800-7b"))
    planner = Planner(table, [StrategyShape.parse("4*tp4")], PlannerOptions())
    plan = planner.plan(5, range(3), [400, 900, 2000])
    save_plans([plan], tmp_path / "plans.jsonl")
    assert main(["simulate", "4*tp4 then 2*tp8", *SIMULATED]) == 0
    recorded = figures_of(tmp_path, "simulate", str(tmp_path / "plans.jsonl"), "--cost-table", "a800-7b")
    ((number, found),) = recorded["steps"].items()
    assert number == "5"
    assert 1e3 * found["step_s"] > plan.predicted_ms


def test_a_config_says_in_which_types_gradients_are_held_and_travel(tmp_path: Path) -> None:
    def simulated(settings: dict[str, object]) -> tuple[float, float]:
        (config := tmp_path / "ds.json").write_text(json.dumps(settings))
        command = ("simulate", "4*tp4", *SIMULATED, "--deepspeed_config", str(config))
        (found,) = figures_of(tmp_path, *command)["steps"].values()
        return max(found["peak_bytes"]), found["step_s"]

    peak, seconds = simulated({})
    narrow, same = simulated({"data_types": {"grad_accum_dtype": "bf16"}})
    wide, longer = simulated({"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"})
    assert narrow < peak
    assert narrow <= wide, "pulls may need more scratch memory than pushes of either type"
    assert same == seconds < longer


def test_memory_of_gradients_on_their_way_is_counted(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 2**17}
    model.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4, **sizes}))

    def scratch(settings: dict[str, object]) -> float:
        config = tmp_path / "ds.json"
        narrow = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
        config.write_text(json.dumps({**narrow, **settings}))
        of_job = ("--model", str(model), "--gpus", "2", "--deepspeed_config", str(config), "--device_memory", "8")
        return max(float(row["scratch"]) for row in figures_of(tmp_path, "memory", *of_job)["rows"])

    assert scratch({"communication_data_type": "fp32"}) > scratch({})


def test_memory_ends_with_the_schemes_that_hold_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    def last(*tokens: str) -> str:
        assert main(["memory", "--model", TINY, "--gpus", "4", "--device-memory", "1", "--tokens", *tokens]) == 0
        rows = capsys.readouterr().out.splitlines()
        holding, missing = (sum(f" {fits} " in row for row in rows) for fits in ("yes", "no"))
        assert rows[-1].startswith(f"ds-hydra memory: {holding} of {holding + missing} kinds of replicas hold")
        return rows[-1]

    assert last("100").endswith('; next: write the layout 4*tp1, or "auto"')
    assert (
        "tp4 is the narrowest; shorter sequences run on narrower replicas beside it; next: write the layout tp4,"
        in (last("110000"))
    )
    assert last("9000000").split("; next: ")[-1] == "set hydra.activation_checkpointing, or use more GPUs"


def test_memory_shows_the_longest_sequence_by_each_choice_and_what_hosts_hold(tmp_path: Path) -> None:
    def longest(host: float) -> dict[str, object]:
        machine = ("--gpus", "4", "--device-memory", "1", "--host-memory", str(host), "--dtype", "bf16")
        found = figures_of(tmp_path, "memory", "--model", TINY, *machine)
        return next(row for row in found["longest"] if row["replica"] == "sp4")

    ample, scarce = longest(1000.0), longest(1.0)
    kept, attended, again, fetched = (
        int(str(ample[name])) for name in ("kept", "attention kept", "recomputed", "kept on host")
    )
    assert kept < attended < again < fetched
    assert again < int(str(scarce["kept on host"])) < fetched
    assert scarce["GiB of a host"] == "1"
    states, both = (int(str(ample[name])) for name in ("states there", "both there"))
    assert again < states
    assert max(states, fetched) < both
    assert int(str(scarce["both there"])) < int(str(scarce["kept on host"])), "states take a part of the host"


def test_memory_counts_states_where_the_config_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    rows: dict[str, dict[str, object]] = {}
    for name, optimizer, device in (("here", "AdamW", "none"), ("there", "AdamW", "cpu"), ("stays", "Muon", "cpu")):
        zero = {"offload_optimizer": {"device": device}}
        settings = {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}, "zero_optimization": zero}
        config.write_text(json.dumps(settings | {"hydra": {"tokens_per_step": 64}}))
        machine = ("--gpus", "2", "--device-memory", "1", "--host-memory", "1000")
        found = figures_of(tmp_path, "memory", "--model", TINY, *machine, "--deepspeed-config", str(config))
        rows[name] = next(row for row in found["rows"] if row["replica"] == "tp2")
        assert ("states there" in found["longest"][0]) is (name != "stays")
    assert (rows["there"]["fp32"], rows["there"]["optimizer"]) == ("0.00", "0.00")
    assert int(str(rows["there"]["max tokens"])) > int(str(rows["here"]["max tokens"]))
    assert "host" in rows["there"]
    assert "host" not in rows["here"]
    assert "host" not in rows["stays"]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ds-hydra {__version__}\n"


def test_each_layout_holds_a_parameter_once_in_each_pipeline(tmp_path: Path) -> None:
    given = ("layout", "layers.1.self_attn.o_proj.weight", "--model", TINY, "--gpus", "4", "--gpus-per-node", "2")
    held = figures_of(tmp_path, *given, "--strategies", "2*tp2", "4*tp1")["held"]

    def whole(*ranks: list[list[int]]) -> list[list[int]]:
        """Their intervals one after the other, joined."""
        pieces = sorted(piece for own in ranks for piece in own)
        assert all(one[1] == other[0] for one, other in pairwise(pieces)), "a gap, or a part twice"
        return [[pieces[0][0], pieces[-1][1]]]

    (all_of_it,) = whole(*held["masters"])
    assert all_of_it[0] == 0
    assert held["copy"] == [held["masters"][(rank - 2) % 4] for rank in range(4)]  # of a rank in the other node
    assert whole(*held["2*tp2"][:2]) == whole(*held["2*tp2"][2:]) == [all_of_it]
    assert held["2*tp2"][0] == [[0, all_of_it[1] // 2]]
    assert all(own == [all_of_it] for own in held["4*tp1"])


# --- `ds-hydra launch`: whose options are whose, what is started, and the exit code of a job.
@pytest.mark.parametrize(
    ("given", "respawn", "spares", "others"),
    [
        ("--num_gpus 2 a.py --x 1", 0, 0, "--x 1"),
        ("--respawn 3 --num_gpus 2 --spares=1 a.py --x 1", 3, 1, "--x 1"),
        ("--num_gpus 2 --spares 1 --respawn=3 a.py", 3, 1, ""),
        ("--num_gpus 2 a.py --respawn 3 --spares 2", 0, 0, "--respawn 3 --spares 2"),
        ("--respawn 1 a.py --respawn x", 1, 0, "--respawn x"),
    ],
)
def test_what_follows_the_script_is_the_scripts(given: str, respawn: int, spares: int, others: str) -> None:
    options = read_options(given.split())
    assert (options.respawn, options.spares, options.user_args) == (respawn, spares, others.split())


def test_a_number_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read_options(["--respawn", "often", "a.py"])
    assert left.value.code == 2
    assert "--respawn: a number of processes of each node is asked for, but it is 'often'" in capsys.readouterr().err


def test_deepspeeds_command_for_a_node_starts_ours_there() -> None:
    command = ["python", "-m", "deepspeed.launcher.launch", "--world_info=x", "a.py"]
    assert as_ours(command, ["--respawn=2"]) == [
        "python", "-m", "ds_hydra.commands.launch_node", "--respawn=2", "--world_info=x", "a.py",
    ]  # fmt: skip
    assert as_ours(["pkill -f ", "-m\\ deepspeed.launcher.launch\\ x"], ["--respawn=2"])[1].endswith("launch_node\\ x")


@pytest.mark.parametrize("words", [["--launcher", "openmpi", "a.py"], ["--autotuning", "run", "a.py"]])
def test_what_would_start_ranks_otherwise_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(words) == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ([0, 0], 0),
        ([-9, 0, 0], 0),  # lost, and the others went on
        ([-9, 75, 0], 0),
        ([0, 1], 1),  # failed when the job was over
        ([-9, 75, 75], 75),
        ([78, 78], 78),
        ([-9, -9], 137),
        ([], 1),
    ],
)
def test_the_exit_code_is_the_survivors(ended: list[int], code: int) -> None:
    assert code_of(ended) == code


def on_node(number: int) -> argparse.Namespace:
    """What DeepSpeed tells a node of two, with three places and two."""
    world = base64.urlsafe_b64encode(json.dumps({"a": [0, 1, 2], "b": [0, 1]}).encode()).decode()
    return argparse.Namespace(
        world_info=world, node_rank=number, master_addr="a", master_port=29500, no_python=False, module=False,
        no_local_rank=False, bind_cores_to_rank=False, bind_core_list=None, enable_each_rank_log="None",
        training_script="a.py", training_script_args=["--x"],
    )  # fmt: skip


def test_ranks_of_a_node_and_who_joins(tmp_path: Path) -> None:
    job: Job = job_of(on_node(1), tmp_path)
    assert job.command[-3:] == ("a.py", "--local_rank=%LOCAL_RANK%", "--x")
    second = job.of_rank(1)
    expected = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "a",
                "CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # fmt: skip
    assert expected.items() <= second.items()
    assert second[MEMBERS_FOLDER] == str(tmp_path)
    assert JOINS not in second
    joiner = job.of_joiner(1)
    assert {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", JOINS: "1"}.items() <= joiner.items()
    assert joiner["MASTER_PORT"] != second["MASTER_PORT"]


def test_the_last_places_of_each_node_are_spares(tmp_path: Path) -> None:
    jobs = [job_of(on_node(node), tmp_path, 1) for node in range(2)]
    assert [(job.first, job.num_local, job.num_ranks, job.spares) for job in jobs] == [(0, 2, 3, 1), (2, 1, 3, 1)]
    assert [job.of_joiner(1)[MOST_RANKS] for job in jobs] == ["3", "3"]
    assert jobs[1].of_joiner(1)["LOCAL_RANK"] == "1"
    with pytest.raises(ConfigError, match="--spares 2: node b has 2 places"):
        job_of(on_node(0), tmp_path, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda place: place.mkdir(0o700), ""),
        (lambda place: (place.mkdir(), place.chmod(0o777)), "mode 0777, and must be of user"),
        (lambda place: (place.mkdir(), place.chmod(0o770)), "mode 0770"),
        (lambda place: place.symlink_to("/tmp"), "it is a link and no folder"),
        (lambda place: place.touch(), "it is a file and no folder"),
        (lambda place: None, "No such file or directory. Make one of your own, `mkdir -m 700"),
    ],
)
def test_the_secret_of_a_job_lies_only_where_nobody_else_writes(
    make: Callable[[Path], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "members"
    make(place)
    monkeypatch.setenv(MEMBERS_FOLDER, str(place))
    if words:
        with pytest.raises(ConfigError, match=words):
            members_folder()
        return
    assert members_folder() == place
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (place / f"{INVITATION}.{os.getpid()}").symlink_to(victim)
    Invitation("secret", (), None, "run").write(place / INVITATION)
    assert victim.read_text() == "mine"
    assert oct((place / INVITATION).stat().st_mode)[-3:] == "600"
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="it belongs to user"):
        members_folder()


def test_only_an_elastic_job_that_has_begun_waits_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, plain = HydraConfig(1, elastic=ElasticConfig(), timeout_seconds=20), HydraConfig(1, timeout_seconds=20)
    assert [longest_wait_s(one, begun=False) for one in (elastic, plain)] == [300, 20]
    assert [longest_wait_s(one, begun=True) for one in (elastic, plain)] == [20, 20]
    monkeypatch.setenv(JOINS, "1")
    assert longest_wait_s(elastic, begun=False) == 20  # the others have begun


# --- Releases of other packages: the bounds are pyproject.toml's, and older ones are refused before they are
# imported.
ROOT = Path(__file__).parents[2]
OF = {one.package: one for one in NEEDED}


def test_the_table_is_what_pip_is_told() -> None:
    told = (ROOT / "pyproject.toml").read_text("utf-8")
    assert [one.requirement for one in NEEDED if f'"{one.requirement}"' not in told] == []


@pytest.mark.parametrize(
    ("package", "installed", "said"),
    [
        ("torch", "2.10.0+cu128", "older than 2.11"),
        ("torch", "2.10.0a0+b4e4ee81d3.nv25.12", "older than 2.11"),
        ("torch", "2.11.0a0+eb65b36914.nv26.2", ""),  # an image's
        ("torch", "2.11.0", ""),
        ("torch", "2.16.0.dev20261120", ""),  # nothing is known against it
        ("transformers", "4.57.6", "older than 5.5"),
        ("transformers", "5.5.0", ""),
        ("transformers", "5.6.0", "broken"),
        ("transformers", "5.6", "broken"),
        ("transformers", "5.6.0.dev0", "broken"),
        ("transformers", "5.6.1", ""),
        ("transformers", "5.10.4", ""),
        ("deepspeed", "0.18.5", "older than 0.18.6"),
        ("deepspeed", "0.18.10+3f1c2e", ""),
        ("accelerate", "1.12.0", "older than 1.13"),
        ("trl", "1.1.0", ""),
    ],
)  # fmt: skip
def test_what_is_said_of_a_release(package: str, installed: str, said: str) -> None:
    objection = OF[package].objection(installed)
    assert (said in objection and installed in objection) if said else objection == ""


def test_a_package_of_an_extra_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # as one that is not there
    monkeypatch.setattr("ds_hydra.config.versions.metadata.version", _missing)
    with pytest.raises(ConfigError, match=r"trl is not installed.*ds-hydra\[trl\].*pip install \"trl>=1\.1\""):
        refuse_older("trl")
    refuse_older("torch")  # importing it tells


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.drawn  # each imports all that a host needs
@pytest.mark.parametrize(
    ("imported", "older"),
    [
        ("ds_hydra.entry", {"transformers": "4.57.6", "deepspeed": "0.17.6"}),
        ("ds_hydra.engine.engine", {"torch": "2.10.0"}),
        ("ds_hydra.hugging_face", {"accelerate": "1.11.0"}),
        ("ds_hydra.hugging_face.sft", {"trl": "0.24.0"}),
        ("ds_hydra.hugging_face.scores", {"trl": "0.24.0"}),
        ("ds_hydra.testing", {"transformers": "5.4.0"}),
    ],
)
def test_older_releases_are_refused_at_import_with_the_command(
    imported: str, older: dict[str, str], tmp_path: Path
) -> None:
    """All in one refusal; what stands first on the path is what would be imported."""
    for package, version in older.items():
        folder = tmp_path / f"{package}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", f"import {imported}"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("ds_hydra.zero_hetero.errors.ConfigError: ds-hydra cannot run in this environment"), told
    assert all(f"{package} {version}" in told for package, version in older.items()), told
    assert told.endswith(" ".join(f'"{OF[one.package].requirement}"' for one in NEEDED if one.package in older))
