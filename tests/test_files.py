"""Files written whole or not at all."""

import os
from pathlib import Path

import pytest

from rowmesh.errors import InputError
from rowmesh.files import check_target, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    for text in ("one", "another"):
        check_target(file, what="it", way_out="go")
        write_whole(file, text)
        assert file.read_text() == text
    assert os.listdir(tmp_path) == ["f.json"]


def test_what_is_no_file_is_neither_replaced_nor_lost(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # as a device would be
    os.mkfifo(pipe)
    for path, reason in (
        (pipe, "it is no regular file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "absent" / "f", "absent is no folder"),
    ):
        with pytest.raises(InputError, match=f"cannot write it to {path}: .*{reason}; go"):
            check_target(path, what="it", way_out="go")
        with pytest.raises(OSError, match=r"regular file|No such file"):
            write_whole(path, "text")
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]
