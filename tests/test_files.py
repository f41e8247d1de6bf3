"""Tests of atomic output files."""

import json
import os

import pytest
from conftest import tiny_network

from dualrc.errors import DataError, OutputError
from dualrc.files import (
    check_writable,
    is_file,
    make_folder,
    read_text,
    replacing,
    replacing_folder,
    write_json,
    write_text,
)
from dualrc.model.checkpoint import save_weights


def test_a_new_file_appears(tmp_path):
    path = tmp_path / "out.txt"
    with replacing(path) as temporary:
        assert temporary.parent == tmp_path and temporary.suffix == ".txt"
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_others_may_read_the_file(tmp_path):
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    with replacing(tmp_path / "out") as temporary:
        temporary.write_text("")
    assert (tmp_path / "out").stat().st_mode == ordinary.stat().st_mode


@pytest.mark.skipif(os.name != "posix", reason="files have no modes here")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask_whoever_writes(tmp_path, mask):
    """Some libraries, such as safetensors, replace our file by their own with mode 0600."""
    before = os.umask(mask)
    try:
        save_weights(tiny_network(), tmp_path / "weights.safetensors")
        with replacing(tmp_path / "out") as temporary:
            temporary.unlink()
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
        write_json(tmp_path / "a.json", {})
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        assert modes == dict.fromkeys(("weights.safetensors", "out", "a.json"), 0o666 & ~mask)
        # A private file stays private.
        (tmp_path / "a.json").chmod(0o600)
        write_json(tmp_path / "a.json", {})
        assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, ValueError])
def test_a_failing_writer_leaves_the_old_content(tmp_path, error):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def write():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_clear_line(tmp_path):
    def write():
        with replacing(tmp_path / "out.txt") as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"Cannot write .*out\.txt \(No space left on device\); free some space"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "model"
    for text in ("one", "two"):
        with replacing_folder(folder) as new:
            (new / text).write_text(text)
        assert [path.name for path in folder.iterdir()] == [text]

    def fail():
        with replacing_folder(folder) as new:
            (new / "half").write_text("")
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"Cannot write .*model \(No space left on device\); free some space"):
        fail()
    assert list(tmp_path.rglob("*")) == [folder, folder / "two"]


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(OutputError, match="does not exist; create it"):
        check_writable(tmp_path / "no" / "file.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="does not exist"):
        check_writable(tmp_path / "file" / "below.txt")
    assert check_writable(str(tmp_path / "fine.txt")) == tmp_path / "fine.txt"
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere, so this is pretended
    with pytest.raises(OutputError, match="not writable"):
        check_writable(tmp_path / "fine.txt")


def test_a_name_too_long(tmp_path):
    with pytest.raises(OutputError, match="write elsewhere"), replacing(tmp_path / ("x" * 300)):
        pass
    assert not is_file(tmp_path / ("x" * 300))
    assert not is_file(tmp_path)


def test_text_that_is_read_and_written(tmp_path):
    write_text(tmp_path / "a.txt", "é ü\n")
    assert read_text(tmp_path / "a.txt") == "é ü\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmarked")  # as some editors begin a file
    assert read_text(tmp_path / "a.txt") == "marked"
    with pytest.raises(DataError, match="does not exist; check the path"):
        read_text(tmp_path / "no.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"Cannot read .* as text .*; repair it"):
        read_text(tmp_path / "a.txt", "repair it")
    with pytest.raises(DataError, match=r"Cannot read .* as text"):
        read_text(tmp_path)


def test_json_knows_paths(tmp_path):
    write_json(tmp_path / "a.json", {"é": tmp_path, "n": 1})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"é": str(tmp_path), "n": 1}


def test_folders_are_made_unless_a_file_is_there(tmp_path):
    assert make_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b" == make_folder(tmp_path / "a" / "b")
    write_text(tmp_path / "c", "")
    for path in (tmp_path / "c", tmp_path / "c" / "d", tmp_path / "\0"):
        with pytest.raises(OutputError, match=r"Cannot create the folder .*; choose another one"):
            make_folder(path)
