"""What is decided by the device, without one; and locks of operators that are compiled."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.file_baton import FileBaton

from ds_hydra.commands import profile
from ds_hydra.config.hydra_block import FaultsConfig, HydraConfig
from ds_hydra.engine.costs import least_memory, rank_memory
from ds_hydra.host import devices, launch
from ds_hydra.host.devices import Flags, before_devices_start, device_index
from ds_hydra.pipe.attention import backends
from ds_hydra.pipe.attention.backends import torch_varlen
from ds_hydra.pipe.dropout import _column_keys
from ds_hydra.pipe.models.draws import Keys
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.models.positions import _by_length
from ds_hydra.pipe.rows import Pack
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster


# --- What is decided by the device, without one: attention's choice, what is set before CUDA and NCCL start,
# torch's flags, a profile's process group, a layer list's buffers.
def test_layers_of_a_micro_batch_share_the_bounds_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied to the device once for a pack, not once for each layer or for each time that it is computed."""
    given: list[tuple[torch.Tensor, ...]] = []

    def kernel(q: Any, k: Any, v: Any, *bounds: Any, scale: float, window_size: Any, enable_gqa: bool = False) -> Any:
        given.append(bounds)
        return q

    monkeypatch.setattr(backends, "_torch_varlen", lambda: kernel)
    q = torch.zeros(10, 4, 8)
    for lengths in ((3, 5, 2), (3, 5, 2), (4, 6)):
        torch_varlen(q, q, q, backends.Segments.whole(lengths), 1.0, None, None)
    assert [bounds[0].tolist() for bounds in given] == [[0, 3, 8, 10], [0, 3, 8, 10], [0, 4, 10]]
    assert given[0][0] is given[0][1] is given[1][0]


class _StartedError(Exception):
    """Ends a profile when it has started its process group."""


@pytest.mark.parametrize(("device", "backend"), [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_a_launched_profile_starts_its_group_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    started: list[tuple[str, torch.device | None]] = []

    def start(name: str, *, device_id: torch.device | None = None) -> None:
        started.append((name, device_id))
        raise _StartedError

    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    session: Any = SimpleNamespace(request=SimpleNamespace(device=torch.device(device)))
    with pytest.raises(_StartedError):
        profile.measure(session, 1)
    assert started == [(backend, torch.device(device) if backend == "nccl" else None)]


class Shift(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.shift


def test_buffers_of_a_layer_list_go_where_the_stage_computes() -> None:
    module = nn.ModuleDict({"0": nn.Embedding(16, 8), "1": Shift()})
    module._layer_specs, module.loss_fn = list(module.values()), nn.CrossEntropyLoss()  # type: ignore[assignment]
    source = LayerList(module)
    assert source.layer(1, torch.device("meta")).shift.is_meta
    here = source.layer(1, torch.device("cpu"))
    assert torch.equal(here.shift, torch.ones(8))
    assert here.inner.weight.is_meta


VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
             "TORCH_DIST_USE_NCCL2", "CUBLAS_WORKSPACE_CONFIG")  # fmt: skip
OF_MEMORY = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the variables that CUDA and NCCL read, which come back afterwards; nothing is to abort later."""
    monkeypatch.setattr(devices, "abort_later", mock.Mock())
    for name in (*VARIABLES, *OF_MEMORY):
        monkeypatch.setenv(name, "")  # so that it is noted, and then removed in the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    return monkeypatch


def test_what_cuda_and_nccl_read_is_set_before_they_start(unset: pytest.MonkeyPatch) -> None:
    moments: list[dict[str, str | None]] = []

    def note(*args: Any, **kwargs: Any) -> None:
        moments.append({name: os.environ.get(name) for name in VARIABLES})

    def start(*args: Any, **kwargs: Any) -> None:
        note()
        raise _StartedError

    gpu = SimpleNamespace(communication_backend_name=lambda: "nccl", device_name=lambda: "cuda", set_device=note,
                          device_count=lambda: 2)  # fmt: skip
    unset.setattr(launch, "get_accelerator", lambda: gpu)
    unset.setattr(launch, "init_as_deepspeed", start)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        unset.setenv(name, "1")
    with pytest.raises(_StartedError):
        launch.init_distributed(HydraConfig(10, strategies=("2*tp1",), deterministic=True), port=1)
    assert moments == [dict(zip(VARIABLES, ("32", "0", "0", "0", ":4096:8"), strict=True))] * 2


@pytest.mark.parametrize(
    ("variables", "heartbeats", "found", "later"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, 1.0, ["8", "3", "0", "0", None],
         True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, 1.0, ["32", "0", "0", "0", None], False),
        ({}, 0.0, ["32", None, None, "0", None], False),  # then torch's watchdog is all there is
    ],
)  # fmt: skip
def test_what_the_user_has_set_stays(
    unset: pytest.MonkeyPatch, variables: dict[str, str], heartbeats: float, found: list[str | None], later: bool
) -> None:
    """And where torch's own watchdog may abort a rank, ours has the time to end it before."""
    for name, value in variables.items():
        unset.setenv(name, value)
    before_devices_start(HydraConfig(10, faults=FaultsConfig(heartbeats)), "nccl", 2)
    assert [os.environ.get(name) for name in VARIABLES] == found
    assert devices.abort_later.called is later  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "one queue.*Unset it"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "hydra.deterministic needs.*:4096:8.*unset"),
        ("TORCH_DIST_USE_NCCL2", "1", "TORCH_DIST_USE_NCCL2=1.*does not know.*set TORCH_DIST_USE_NCCL2=0"),
    ],
)
def test_what_would_stand_still_or_differ_is_refused(
    unset: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    unset.setenv(name, value)
    config = HydraConfig(10, deterministic=True)
    before_devices_start(config, "gloo", 2)
    assert [os.environ.get(other) for other in VARIABLES if other != name] == [None] * 4, "there is no NCCL"
    with pytest.raises(ConfigError, match=words):
        before_devices_start(config, "nccl", 2)


@pytest.mark.parametrize(("version", "started", "refused"), [("2.14.1", True, False), ("2.15.0", True, True),
                                                             ("2.15.0", False, False)])  # fmt: skip
def test_torchs_other_nccl_is_not_taken(
    unset: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, started: bool, refused: bool
) -> None:
    """From 2.15 on "nccl" names it: a script that has started it is refused."""
    unset.setattr(devices.torch, "__version__", type(torch.__version__)(version))
    unset.setattr(dist, "is_initialized", lambda: started)
    with caplog.at_level(logging.INFO, logger="ds_hydra"):
        if refused:
            with pytest.raises(ConfigError, match=f"torch {version} takes it"):
                before_devices_start(HydraConfig(10), "nccl", 2)
            return
        before_devices_start(HydraConfig(10), "nccl", 2)
    assert (os.environ.get("TORCH_DIST_USE_NCCL2") == "0") is not started
    assert ("first NCCL backend" in caplog.text) is (version == "2.15.0")
    assert devices.abort_later.called is started, "it has read what its own watchdog is to do"  # type: ignore[attr-defined]


MATMUL = torch.backends.cuda.matmul


def flags() -> tuple[bool, ...]:
    return (
        MATMUL.allow_bf16_reduced_precision_reduction,
        MATMUL.allow_fp16_reduced_precision_reduction,
        MATMUL.allow_bf16_reduced_precision_reduction_split_k,
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def test_flags_hold_until_the_last_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    before = flags()
    assert before == (True, True, True, False, True, True)
    cuda = torch.device("cuda", 0)
    one = Flags(HydraConfig(10), cuda)
    assert flags() == (False, False, True, False, True, False)
    other = Flags(HydraConfig(10, deterministic=True), cuda)
    one.close()
    one.close()  # as at exit, after destroy()
    assert flags() == (False, False, True, True, False, False)
    other.close()
    assert flags() == before
    on_cpu = Flags(HydraConfig(10), torch.device("cpu"))
    assert flags() == before
    on_cpu.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies to a GPU for which the host would wait: of memory that can be paged out, or not asked to go on."""
    found: list[str] = []
    pinned: list[torch.Tensor] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self.clone())
        return pinned[-1]

    def copied(self: torch.Tensor, device: Any, *, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking or not any(self is one for one in pinned):
            found.append(f"{tuple(self.shape)}")
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    return found


def test_the_host_waits_for_no_copy_of_a_micro_batch(waits: list[str]) -> None:
    cuda: Any = torch.device("cuda", 0)
    keys = Keys.of(Pack((3, 2)), cuda)
    assert keys.row.shape == (5,)
    _column_keys.__wrapped__(range(7), cuda)
    backends._bounds.__wrapped__(backends.Segments.whole((3, 2)), cuda)
    position_ids = mock.MagicMock(device=cuda)
    rows = iter((5, 6))  # as they are, and with one that lies beyond
    rotary: Any = SimpleNamespace(
        forward=lambda x, position_ids: (torch.zeros(1, next(rows), 2),),
        config=SimpleNamespace(rope_parameters={"original_max_position_embeddings": 2}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", lambda parts, dim: None)
        patch.setattr(torch, "full_like", lambda like, value: None)
        (table,) = _by_length(rotary, {None: "longrope"}, lambda: Pack((3, 2)))(None, position_ids)
    assert table.shape == (1, 5, 2)
    assert waits == []


def test_a_rank_plans_with_the_memory_that_is_left_of_its_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two devices of 80 GiB: of one 70 are free, 4 are this process's own already, and of the other 60 and 2."""
    whole, device = 80 * 2**30, torch.device("cuda", 0)
    held = {0: (70 * 2**30, 4 * 2**30), 1: (60 * 2**30, 2 * 2**30)}
    rank = 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (held[rank][0], whole))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held[rank][1])
    assert rank_memory(device, 8) == 74 * 2**30
    other = torch.tensor([[62.0 * 2**30]], dtype=torch.float64)
    channel = SimpleNamespace(rows=lambda mine: torch.cat([mine[None], other]))
    caplog.set_level("INFO", logger="ds_hydra")
    world: Any = SimpleNamespace(device=device, cluster=Cluster.of(2, 8), num_ranks=2, rank=0, channel=channel)
    assert least_memory(world) == (59 * 2**30, {}), "3 GiB are for the communicators"
    assert "of a device's 80.00 GiB rank 0 has 74.00 GiB, the rank that has least 62.00 GiB" in caplog.text


@pytest.mark.parametrize(
    ("given", "vllm", "expected", "words"),
    [
        ({}, "", "expandable_segments:True", ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"}, "",
         "expandable_segments:True,garbage_collection_threshold:0.8", ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "", None, "expandable_segments"),
        ({}, "0.19.1", None, "vLLM before 0.20.1"),
        ({}, "0.20.1rc1", "expandable_segments:True", ""),
        ({}, "0.21.0", "expandable_segments:True", ""),
    ],
)  # fmt: skip
def test_memory_of_devices_grows_in_place_unless_the_user_or_a_vllm_beside_says_otherwise(
    unset: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: dict[str, str], vllm: str, expected: str | None,
    words: str,
) -> None:  # fmt: skip
    for name, value in given.items():
        unset.setenv(name, value)
    if vllm:
        unset.setitem(sys.modules, "vllm", SimpleNamespace(__version__=vllm))  # type: ignore[arg-type]
    before_devices_start(HydraConfig(10, faults=FaultsConfig(0.0)), "nccl", 1)
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert words in caplog.text
    assert ("expandable_segments" in caplog.text or "vLLM" in caplog.text) is (words != "")


@pytest.mark.parametrize("several", [True, False])
def test_what_cuda_has_read_already_is_set_by_its_setter_or_told(
    unset: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, several: bool
) -> None:
    """`TrainingArguments` choose the device, before there is an engine."""
    given: list[str] = []
    unset.setattr(torch.cuda, "is_initialized", lambda: True)
    unset.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    before_devices_start(HydraConfig(10, faults=FaultsConfig(0.0)), "nccl", 2 if several else 1)
    assert given == ["expandable_segments:True"]
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=32" in caplog.text) is several
    caplog.clear()
    before_devices_start(HydraConfig(10, faults=FaultsConfig(0.0)), "nccl", 2)
    assert (len(given), caplog.text) == (1, ""), "both are in the environment now, as if they had been exported"


@pytest.mark.parametrize(("local", "visible", "number"), [(3, 8, 3), (3, 1, 0), (0, 1, 0), (3, 0, 3)])
def test_a_process_that_sees_one_device_takes_it(local: int, visible: int, number: int) -> None:
    assert device_index(local, visible) == number


def test_fewer_devices_than_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=3 .*sees 2 .*CUDA_VISIBLE_DEVICES=4,5.*start 2 processes"):
        device_index(3, 2)


# --- Locks of operators that are compiled: a live compilation is waited for, one that was interrupted is named.
LONG_AGO_S = 7200


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that was left two hours ago."""
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # to be put back
    monkeypatch.setattr(launch, "_QUIET_S", 0.2)
    monkeypatch.setattr(launch, "_LOOK_S", 0.1)
    launch.tell_locks()
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    path = folder / "lock"
    path.touch()
    for one in (path, folder):
        os.utime(one, (time.time() - LONG_AGO_S,) * 2)
    return path


def wait_for(lock: Path) -> None:
    FileBaton(str(lock), wait_seconds=0.05).wait()


def test_a_lock_that_was_left_behind_is_named_with_the_remedy(lock: Path) -> None:
    with pytest.raises(ConfigError, match=r"deepspeed_shm_comm is locked by .*no process of this host") as raised:
        wait_for(lock)
    assert str(raised.value).endswith(f"delete it: rm {lock}")
    assert "for 7200 s" in str(raised.value)
    assert lock.exists(), "whose it is, nobody can know"


def test_a_process_that_compiles_is_waited_for(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = f"import os, time; handle = os.open({str(lock)!r}, os.O_RDONLY); time.sleep(2); os.remove({str(lock)!r})"
    with subprocess.Popen([sys.executable, "-c", program]) as compiler:
        time.sleep(0.5)
        wait_for(lock)
        assert f"while process {compiler.pid} of this host compiles it" in capfd.readouterr().err


def test_a_young_lock_that_nobody_here_holds_is_told_and_waited_for(
    lock: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process of another host may compile in a folder that both see."""
    (lock.parent / "build.ninja").touch()
    threading.Timer(1.0, lock.unlink).start()
    wait_for(lock)
    told = capfd.readouterr().err
    assert told.count(f"delete it: rm {lock}") == 1
    assert told.startswith("[ds_hydra] waiting: ")


def test_a_wait_that_is_short_says_nothing(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threading.Timer(0.1, lock.unlink).start()
    wait_for(lock)
    assert capfd.readouterr().err == ""
