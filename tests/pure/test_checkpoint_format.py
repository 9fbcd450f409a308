"""Files that others may have written: manifests, tags and shards are ours and whole, or refused."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint.folder import OwnedError, Owner
from ds_hydra.checkpoint.format import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    FileEntry,
    Manifest,
    SavedBucket,
    SavedGroup,
    SavedParam,
    SavedScalar,
    block_digest,
    check_client_state,
    check_tag,
    digest_of,
    dump,
    parse_json,
    rank_file,
    read_manifest,
    shards_of,
)
from ds_hydra.checkpoint.shard_file import ShardReader, Source, write_shard
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.plan.step_plan import load_plans
from ds_hydra.watchdog.host import Identity, started
from ds_hydra.zero_hetero import files
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError
from ds_hydra.zero_hetero.files import keep_file
from ds_hydra.zero_hetero.layout import even_layout

# --- The manifest refuses whatever was not written by us and left alone; a folder's tags are whole or absent.
MANIFEST = Manifest(
    tag="step_3",
    save_id="5f",
    step=3,
    num_ranks=2,
    buckets=(SavedBucket("layers.0", True, (SavedParam("a", (4, 3), 0, 2), SavedParam("b", (5,)))),),
    files=tuple(FileEntry(rank_file(rank), 5, "ab" * DIGEST_BYTES) for rank in range(2)),
    optimizer="AdamW",
    groups=(SavedGroup({"lr": 0.1, "betas": [0.9, 0.95]}, {"step": SavedScalar(3.0, "float32")}),),
    states=("exp_avg", "exp_avg_sq"),
    lr_scheduler={"last_batch_iteration": 3},
    data={"step": 3},
    counters={"global_samples": 9, "micro_steps": 3, "skipped_steps": 0},
    client_state={"best": 1.5, "names": ["x", "y"]},
)


def test_manifest_survives_json() -> None:
    assert read_manifest(MANIFEST.to_json(), "manifest.json") == MANIFEST


def test_any_flipped_bit_of_a_manifest_is_noticed() -> None:
    data = bytearray(MANIFEST.to_json().encode())
    for bit in random.Random(0).sample(range(8 * len(data)), 400):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match=r"DIR/manifest\.json"):
            read_manifest(bytes(data), "DIR/manifest.json")
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "damaged"),
        ("[]", "not the manifest"),
        ('{"format": "other"}', "not the manifest"),
        ("[" * 100_000, "damaged"),
        ("[" * 80 + "]" * 80, "nested deeper"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e9999}', "1e9999"),
        (MANIFEST.to_json().replace('"lr":0.1', '"lr":1e9999'), "damaged"),
        (MANIFEST.to_json().replace('"version":1', '"version":3'), "version 3"),
        (MANIFEST.to_json()[:-10], "damaged"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as error:
        read_manifest(text, "DIR/manifest.json")
    assert "DIR/manifest.json" in str(error.value)
    assert "tag" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_ranks": 3},
        {"num_ranks": 0},
        {"files": (FileEntry("../../etc/passwd", 5, "ab" * DIGEST_BYTES),) * 2},
        {"files": tuple(FileEntry(rank_file(rank), 2**33, "ab" * DIGEST_BYTES) for rank in range(2))},
        {"block_bytes": 0},
        {"step": -1},
        {"data": [1]},
        {"tag": "../x"},
        {"buckets": MANIFEST.buckets * 2},
        {"buckets": (replace(MANIFEST.buckets[0], params=(SavedParam("a", (4, 3), 1, 2),)),)},
        {"buckets": (replace(MANIFEST.buckets[0], params=(SavedParam("a", (2**61, 2)),)),)},
        {"data": {"step": 4}},
        {"step": 2**61, "data": {"step": 2**61}},
        {"counters": {}},
        {"counters": {**MANIFEST.counters, "global_samples": -1}},
        {"counters": {**MANIFEST.counters, "micro_steps": 1.5}},
        {"counters": {**MANIFEST.counters, "skipped_steps": 4}},
        {"groups": (SavedGroup({"params": []}),)},
        {"states": ("exp_avg", "exp_avg")},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict) -> None:
    """Also when its checksum is right: whoever wrote it may have meant harm."""
    with pytest.raises(CheckpointError):
        read_manifest(replace(MANIFEST, **change).to_json(), "manifest.json")


@pytest.mark.parametrize(
    "name", ["../../../../evil_rel", "/tmp/evil_abs", "a/b", "a\\b", "a\0b", ".hidden", "..", "", "x" * 256, "\ud800"]
)
@pytest.mark.parametrize("what", ["parameter", "bucket", "state", "number"])
def test_no_name_in_a_manifest_is_a_path(what: str, name: str) -> None:
    """Names become names of files where a checkpoint is converted."""
    changes: dict = {
        "parameter": {"buckets": (SavedBucket("layers.0", True, (SavedParam(name, (4, 3)),)),)},
        "bucket": {"buckets": (SavedBucket(name, True, MANIFEST.buckets[0].params),)},
        "state": {"states": (name,)},
        "number": {"groups": (SavedGroup({}, {name: SavedScalar(1.0)}),)},
    }
    with pytest.raises(CheckpointError, match=r"DIR/manifest\.json contradicts itself \(the name"):
        read_manifest(replace(MANIFEST, **changes[what]).to_json(), "DIR/manifest.json")


@pytest.mark.parametrize("tag", ["a", "step_1000", "global_step7", 12, "v1.2+x@y=3"])
def test_a_name_is_a_tag(tag: object) -> None:
    assert check_tag(tag) == str(tag)


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "../x", "a/b", "/etc", "a\\b", ".hidden", "a\0b", "a\nb", "x" * 129, "latest", "~root", "-rf"],
)
def test_a_path_is_no_tag(tag: str) -> None:
    with pytest.raises(CheckpointError, match="not a name"):
        check_tag(tag)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"x": float("nan")}, r"client_state\['x'\] is nan"),
        ({"x": [1, torch.tensor(float("inf"))]}, r"client_state\['x'\]\[1\] is inf"),
        ({"x": object()}, r"client_state\['x'\] is a object"),
        ({1: 2}, "client_state has the key 1"),
        ({"x": [{2: 3}]}, r"client_state\['x'\]\[0\] has the key 2"),
        ({"x": {1, 2}}, r"client_state\['x'\] is a set"),
        ({"a": {"best": torch.ones(3)}}, r"client_state\['a'\]\['best'\] is a Tensor of shape \(3,\)"),
        ({"x": np.ones((2, 2))}, r"client_state\['x'\] is a ndarray of shape \(2, 2\)"),
        ({"x": np.complex64(1)}, r"client_state\['x'\] is a complex"),
    ],
)
def test_client_state_that_json_has_not_is_named(state: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_client_state(state)


def test_numbers_of_tensors_and_numpy_come_back_as_numbers() -> None:
    state = {
        "best": torch.tensor(1.5), "half": torch.tensor(0.25, dtype=torch.bfloat16), "step": torch.tensor(3),
        "numpy": [np.float32(0.5), np.int64(7), np.bool_(True), np.array(2.5)], "kept": (1, None, "a", True, 2**60),
    }  # fmt: skip
    found = check_client_state(state)
    kept = [1, None, "a", True, 2**60]
    assert found == {"best": 1.5, "half": 0.25, "step": 3, "numpy": [0.5, 7, True, 2.5], "kept": kept}
    assert [type(one) for one in found["numpy"]] == [float, int, bool, float]


def test_client_state_that_contains_itself_is_refused() -> None:
    state: dict = {}
    state["self"] = state
    with pytest.raises(CheckpointError, match="client_state"):
        check_client_state(state)


@given(st.integers(0, 60), st.integers(1, 70), st.data())
def test_shards_are_those_of_the_even_layout(numel: int, num_ranks: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    some = data.draw(st.sets(st.integers(0, num_ranks - 1)))
    bucket = SavedBucket("b", True, (SavedParam("p", (numel,)),), tuple(sorted(some)))
    layout = even_layout(numel, num_ranks, bucket.owners)
    rebuilt: list[int] = []
    for rank, first, last in shards_of(bucket, num_ranks, start, stop):
        assert not some or rank in some
        begin = layout.pieces[rank][0].start
        rebuilt += range(begin + first, begin + last)
    assert rebuilt == list(range(start, stop))


def complete(folder: Path, tag: str, step: int, **more: Any) -> int:
    """Save a tag; the number of the save."""
    owner = Owner(folder, folders.highest)
    assert owner.take()
    temporary = folders.begin(owner, tag, "id")
    for rank in range(2):
        (temporary / rank_file(rank)).write_bytes(b"12345")
    number = owner.claim()
    manifest = replace(MANIFEST, tag=tag, step=step, data={"step": step}, number=number, **more)
    (temporary / "manifest.json").write_text(manifest.to_json())
    folders.publish(temporary, tag, latest=manifest.latest)
    owner.release()
    return number


def test_keep_last_takes_neither_what_latest_names_nor_what_was_named_nor_another_branch(tmp_path: Path) -> None:
    root = end = complete(tmp_path, "s0", 0, unnamed=True)
    numbers = {}
    for step in (1, 2, 3, 4):
        end = numbers[step] = complete(tmp_path, f"s{step}", step, unnamed=step != 2, follows=end)
    other = complete(tmp_path, "again", 1, unnamed=True, follows=root)  # the start was loaded once more
    assert [tag for _, tag in folders.complete_tags(tmp_path)] == ["again", "s0", "s4", "s3", "s2", "s1"]
    folders.set_latest(tmp_path / "latest", "s1")
    assert folders.prune(tmp_path, 1, numbers[4]) == ["s3", "s0"]
    assert folders.prune(tmp_path, 1, other) == []
    assert [tag for _, tag in folders.complete_tags(tmp_path)] == ["again", "s4", "s2", "s1"]


def owner(folder: Path, pid: int, now: list[float], *, host: str = "", started: str = "1") -> Owner:
    made = Owner(folder, folders.highest, Identity(host or f"host{pid}", pid, started), lambda: now[0])
    made._beat = lambda ended: None  # type: ignore[method-assign]
    return made


def test_a_folder_has_one_owner_until_it_stands_still(tmp_path: Path) -> None:
    now = [0.0]
    first, second, third = (owner(tmp_path, pid, now) for pid in (11, 22, 33))
    assert first.take()
    assert not second.take()
    now[0] += 29.0
    assert not second.take()
    assert first.claim() == 2
    with pytest.raises(OwnedError, match="in use: process 11 on host11 saves there and is alive"):
        second.take()
    assert not second.take()
    assert not third.take()
    now[0] += 31.0
    assert second.take()
    with pytest.raises(OwnedError, match="in use: process 22 on host22"):
        third.take()
    for _ in range(2):
        with pytest.raises(OwnedError, match="taken over by another job, process 22 on host22"):
            first.claim()
    first.release()
    assert second.claim() == 4
    second.release()
    assert third.take()
    assert [path.name for path in tmp_path.iterdir()] == [".owner-1"]


def test_an_owner_that_is_gone_or_of_the_same_job_is_followed_at_once(tmp_path: Path) -> None:
    now = [0.0]
    pid = os.fork()
    if pid == 0:
        signal.pause()
    since = started(pid)
    assert owner(tmp_path, pid, now, host="here", started=since).take()
    second = owner(tmp_path, 22, now, host="here")
    assert not second.take()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert second.take()
    os.waitpid(pid, 0)
    other = owner(tmp_path, pid, now, host="there", started=since)
    assert not other.take(), "the number is another host's"
    other.follow(second.text)  # as rank 0 of its job told it, before it was lost
    assert other.take()
    second.follow(other.text)
    assert not second.owns
    assert other.claim() == 4
    other.release()
    assert owner(tmp_path, pid, now, host="here", started=since).take()
    assert owner(tmp_path, 44, now, host="here").take(), "it never died, but its process is no more"


@pytest.mark.parametrize("content", ["", "[" * 3000, '{"host": 1, "pid": "x", "started": 2}', "x" * 9000])
def test_an_owner_that_does_not_say_who_it_is_is_waited_for(tmp_path: Path, content: str) -> None:
    now = [0.0]
    (tmp_path / ".owner-7").write_text(content)
    taker = owner(tmp_path, 11, now)
    assert not taker.take()
    now[0] += 31.0
    assert taker.take()
    assert taker.claim() == 9
    (tmp_path / ".owner-12").write_text("")
    with pytest.raises(OwnedError, match="by another job, another process"):
        taker.claim()


def test_numbers_go_on_from_those_of_the_checkpoints(tmp_path: Path) -> None:
    number = complete(tmp_path, "a", 1)
    late = owner(tmp_path, 11, [0.0])
    assert late.take()
    assert late.claim() == number + 2
    (tmp_path / f".owner-{number + 2}").unlink()
    assert late.claim() == number + 3, "a claim that somebody has removed is made anew"
    (tmp_path / f".owner-{number + 3}").unlink()
    for _ in range(3):
        number = complete(tmp_path, "a", 1)
    with pytest.raises(OwnedError, match="taken over"):  # by one that has come, saved and gone
        late.claim()


def test_a_folder_of_earlier_releases_is_read_as_ever(tmp_path: Path) -> None:
    """Without numbers the order is that of stage and step; the first save goes on from there, and removes nothing."""
    for tag, step, stage in (("a", 5, 0), ("b", 1, 1), ("c", 9, 0)):
        complete(tmp_path, tag, step, stage=stage)
        record = json.loads((tmp_path / tag / "manifest.json").read_text())
        for name in ("number", "follows", "latest", "unnamed"):
            del record["contents"][name]
        record["sha256"] = digest_of(record["contents"])
        (tmp_path / tag / "manifest.json").write_text(dump(record))
    assert [tag for _, tag in folders.complete_tags(tmp_path)] == ["b", "c", "a"]
    number = complete(tmp_path, "d", 2, unnamed=True)
    assert folders.prune(tmp_path, 1, number) == []
    assert [tag for _, tag in folders.complete_tags(tmp_path)] == ["d", "b", "c", "a"]


def test_a_tag_saved_again_is_there_at_every_moment(tmp_path: Path) -> None:
    complete(tmp_path, "a", 1)
    (tmp_path / "a").rename(tmp_path / ".old-a")  # a save was killed between its two renames
    folders.tidy(tmp_path)
    assert folders.complete_tags(tmp_path) == [(1, "a")]
    (tmp_path / "a").rename(tmp_path / ".old-a")  # who reads finds it there, and changes nothing
    assert folders.find_tag(tmp_path) == "a"
    assert folders.open_manifest(tmp_path, "a").step == 1
    assert not (tmp_path / "a").exists()
    complete(tmp_path, "a", 2)
    assert folders.complete_tags(tmp_path) == [(2, "a")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


@pytest.mark.parametrize(
    ("latest", "reason"), [("", "is empty"), ("b", "does not exist"), ("../a", "no tag"), ("\xff\0", "no tag")]
)
def test_a_broken_latest_names_the_newest_tag(tmp_path: Path, latest: str, reason: str) -> None:
    complete(tmp_path, "a", 1)
    (tmp_path / "latest").write_text(latest)
    with pytest.raises(CheckpointError, match=reason) as error:
        folders.find_tag(tmp_path)
    assert "latest" in str(error.value)
    assert "tag='a'" in str(error.value)


def test_without_latest_the_newest_that_it_was_to_name_is_found(tmp_path: Path) -> None:
    """A first save may have been interrupted just before it; beside damaged ones it stays an error."""
    complete(tmp_path, "a", 1)
    complete(tmp_path, "best", 2, latest=False)
    assert folders.find_tag(tmp_path) == "a"
    (tmp_path / "latest").unlink()
    assert folders.find_tag(tmp_path) == "a"
    (tmp_path / "a" / rank_file(0)).unlink()
    with pytest.raises(CheckpointError, match=r"latest is missing, though there are.*tag='best'"):
        folders.find_tag(tmp_path)


def test_nothing_saved_is_no_error(tmp_path: Path) -> None:
    assert folders.find_tag(tmp_path) is None
    assert folders.find_tag(tmp_path / "nowhere") is None
    (tmp_path / ".tmp-a-x").mkdir()
    assert folders.find_tag(tmp_path) is None


@given(st.data())
def test_a_damaged_folder_is_never_an_empty_one(data: st.DataObject) -> None:
    """Any files gone or cut short, `latest` too: as long as one is left of a checkpoint, there is something to say."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in range(2):
            complete(folder, f"s{step}", step)
        (folder / "events").mkdir()  # a folder that is none of ours
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            damage = data.draw(st.sampled_from(["none", "gone", "short"]), label=path.name)
            if damage == "gone":
                path.unlink()
            elif damage == "short":
                path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, 4))])
        left = [path for path in folder.rglob("*") if path.is_file()]
        if left:
            with suppress(CheckpointError):
                assert folders.find_tag(folder) is not None
        else:
            assert folders.find_tag(folder) is None


def test_every_tag_damaged_and_latest_gone_is_an_error(tmp_path: Path) -> None:
    complete(tmp_path, "a", 1)
    complete(tmp_path, "b", 2)
    (tmp_path / "latest").unlink()
    (tmp_path / "a" / "manifest.json").unlink()
    (tmp_path / "b" / rank_file(1)).write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"latest is missing.*a, b are damaged: restore one"):
        folders.find_tag(tmp_path)
    assert folders.broken_tags(tmp_path, ()) == ["a", "b"]


@pytest.mark.parametrize(
    ("damage", "reason"), [("missing", "is missing"), ("short", "truncated"), ("bare", "complete")]
)
def test_missing_and_truncated_files_are_named(tmp_path: Path, damage: str, reason: str) -> None:
    complete(tmp_path, "a", 1)
    complete(tmp_path, "b", 2)
    path = tmp_path / "b" / ("manifest.json" if damage == "bare" else rank_file(1))
    if damage == "short":
        path.write_bytes(b"123")
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=reason) as error:
        folders.open_manifest(tmp_path, "b")
    assert str(path) in str(error.value)
    assert "another tag: a" in str(error.value)


def test_digits_of_a_string_are_not_those_of_a_number() -> None:
    assert parse_json(json.dumps({"a": "7" * 400, "b": 12}), "x") == {"a": "7" * 400, "b": 12}
    with pytest.raises(CheckpointError, match="a number of 301 digits"):
        parse_json(json.dumps({"a": int("7" * 301)}), "x")


@pytest.mark.parametrize(
    ("files", "what", "remedy"),
    [
        (["zero/a.weight/fp32.pt", "mp_rank_00_model_states.pt"], "a universal checkpoint", "convert from-universal"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "ZeRO stage 1 or 2",
         "convert from-deepspeed .*load_module_only=True"),
        (["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "ZeRO stage 1 or 2",
         "convert from-deepspeed"),
        (["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "ZeRO stage 3",
         "convert from-deepspeed"),
        (["mp_rank_00_model_states.pt"], "DeepSpeed without ZeRO", "load_module_only=True"),
        (["layer_01-model_00-model_states.pt", "mp_rank_00_model_states.pt"], "DeepSpeed without ZeRO", "once more"),
        (["__0_0.distcp", ".metadata"], r"torch \(DCP\)", "dcp_to_torch"),
        (["model.safetensors", "optimizer.pt", "trainer_state.json"], "transformers' Trainer without", "load_16bit"),
        (["model-00001-of-00002.safetensors", "config.json"], "a folder of weights", "load_16bit_model"),
        (["pytorch_model.bin", "optimizer.bin"], "Trainer without DeepSpeed", "from_pretrained"),
        (["adapter_model.safetensors", "adapter_config.json"], "a folder of weights", "PeftModel.from_pretrained"),
    ],
)  # fmt: skip
def test_checkpoints_of_others_are_told_by_their_files(
    tmp_path: Path, files: list[str], what: str, remedy: str
) -> None:
    for name in files:
        path = tmp_path / "t" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(CheckpointError, match=f"{what}.*{remedy}"):
        folders.open_manifest(tmp_path, "t")
    with pytest.raises(CheckpointError, match=f"{what}.*{remedy}"):
        folders.find_tag(tmp_path / "t")
    (tmp_path / "latest").write_text("t")
    assert folders.find_tag(tmp_path) == "t"


# --- Shard files: ranges come back as they were written, and a header that contradicts itself is refused.
def test_ranges_across_blocks_come_back(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    numbers = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32)
    tensors = {"a": numbers, "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "none": torch.empty(0)}
    entry = write_shard(path, {name: Source.of(tensor) for name, tensor in tensors.items()}, {"save_id": "7"})
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(path).items())
    reader = ShardReader(path, entry, BLOCK_BYTES, "7")
    assert sorted(reader.names()) == sorted(tensors)
    for start, stop in ((0, 5), (BLOCK_BYTES // 4 - 40, BLOCK_BYTES // 2 + 3), (len(numbers) - 1, len(numbers))):
        part = torch.empty(stop - start)
        reader.read("a", start, part)
        assert torch.equal(part, numbers[start:stop])
    wide = torch.empty(2)
    reader.read("b", 0, wide)
    assert wide.tolist() == [1.5, -2.0]
    assert reader.read_all("none").numel() == 0
    with pytest.raises(CheckpointError, match="'a' has"):
        reader.read("a", len(numbers) - 1, torch.empty(2))
    reader.close()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes for 2 elements"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "bytes 4 to 12 are not in the file"),
        ({"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}, "bytes 4 to 0 are not in the file"),
        ({"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}, "F33"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        ([0, 8], "no object"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "no count"),
        ({"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}, "no count"),
        ({"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}, "no count"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "end at"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, value: Any, reason: str) -> None:
    """Its digests are right, so only the header itself can show that it is wrong."""
    path = tmp_path / "rank_00000.safetensors"
    text = json.dumps({"__metadata__": {"save_id": "7"}, "a": value}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    path.write_bytes(data)
    entry = FileEntry(path.name, len(data), block_digest(data).hex())
    with pytest.raises(CheckpointError, match=f"its header contradicts itself.*{reason}") as error:
        ShardReader(path, entry, BLOCK_BYTES, "7")
    assert str(path) in str(error.value)


# --- Files that strangers may have written are values or errors of ours with the file's name, never a crash.
TABLE: dict[str, Any] = {
    "format": "ds-hydra cost table", "version": 2, "source": "", "unit": "ms",
    "schemes": [{"scheme": "tp1", "a": 1e-6, "b": 1e-3, "c": 0.5, "max_length": 4096, "util_length": 512}],
}  # fmt: skip
WRONG = [
    b"\xff\xfe\x00x", b"\xc3", b"[" * 100_000, b'{"a":' * 70 + b"1" + b"}" * 70, b'{"step": NaN}', b'{"step": 1e999}',
    b'{"step": ' + b"9" * 400 + b"}", b'{"a": 1, "a": 2}', b"", b"\0",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=lambda text: repr(text[:12]))
def test_what_is_no_plan_and_no_table_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text or b"\n")
    with pytest.raises(PlanError, match=r"file\.json, line 1"):
        load_plans(path)
    with pytest.raises(ConfigError, match=r"file\.json"):
        read_table_file(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("a", 1e308), ("b", 1e308), ("c", -1.0), ("c", 10**299), ("max_length", 1e308), ("max_length", 2**60), ("b", "1")],
)
def test_figures_that_no_measurement_gives_are_refused(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "table.json"
    row = TABLE["schemes"][0]
    path.write_text(json.dumps({**TABLE, "schemes": [{**row, key: value}]}))
    with pytest.raises(ConfigError, match=rf"table\.json.*{key}"):
        read_table_file(path)
    path.write_text(json.dumps({**TABLE, "activations": {"1,1": {"layer": 1e308, "first": 1.0, "last": 1.0}}}))
    with pytest.raises(ConfigError, match=r"table\.json.*activations"):
        read_table_file(path)


def test_damaged_tables_are_refused_or_harmless(tmp_path: Path) -> None:
    draw, path, whole = random.Random(0), tmp_path / "table.json", json.dumps(TABLE).encode()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            data[at : at + draw.randint(0, 3)] = bytes(draw.choices(range(256), k=draw.randint(0, 3)))
        path.write_bytes(data)
        with suppress(ConfigError):
            read_table_file(path)


def test_a_kept_file_leaves_nothing_half_written(tmp_path: Path) -> None:
    def interrupted(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_file(tmp_path / "a", interrupted)
    assert not list(tmp_path.iterdir())
    killed, begun = tmp_path / "tmpkilled.partial", tmp_path / "tmpbegun.partial"
    for path in (killed, begun):
        path.write_bytes(b"half")
    os.utime(killed, (0.0, time.time() - 2 * files._LONGEST_S))
    keep_file(tmp_path / "a", lambda file: file.write(b"whole"))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "tmpbegun.partial"}
