import errno
import os
import stat

import pytest

from ratelimitd.buckets.appender import Appender

REAL_PWRITE = os.pwrite


def disk_full_after(monkeypatch, room):
    """Let pwrite write ``room`` more bytes, then none."""
    left = [room]

    def pwrite(fd, data, offset):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = REAL_PWRITE(fd, bytes(data[: left[0]]), offset)
        left[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


@pytest.fixture
def appender(path):
    made = Appender(path, b"head")
    yield made
    made.close()


def test_a_new_file_has_its_header_and_is_readable_by_its_owner_only(appender, path):
    assert path.read_bytes() == b"head"
    assert appender.size == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_file_is_overwritten(path):
    path.write_bytes(b"something longer than the header")
    Appender(path, b"head").close()
    assert path.read_bytes() == b"head"


def test_appends_follow_each_other(appender, path):
    appender.append(b"one")
    appender.append(b"two", durable=True)
    assert path.read_bytes() == b"headonetwo"
    assert appender.size == 10


def test_a_short_write_is_continued(appender, path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: REAL_PWRITE(fd, bytes(data[:2]), at))
    appender.append(b"abcdefg")
    assert path.read_bytes() == b"headabcdefg"


@pytest.mark.parametrize("room", range(6))
def test_a_failed_append_leaves_nothing_behind_and_the_next_one_works(
    appender, path, monkeypatch, room
):
    appender.append(b"one")
    disk_full_after(monkeypatch, room)
    with pytest.raises(OSError, match="No space"):
        appender.append(b"twotwo")
    assert path.read_bytes() == b"headone"
    assert appender.size == 7
    monkeypatch.setattr(os, "pwrite", REAL_PWRITE)
    appender.append(b"six")
    assert path.read_bytes() == b"headonesix"


def test_an_append_that_cannot_be_synced_is_not_kept(appender, path, monkeypatch):
    def fdatasync(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(OSError, match="Input/output"):
        appender.append(b"one", durable=True)
    assert (path.read_bytes(), appender.size) == (b"head", 4)


def test_a_partial_append_that_cannot_be_truncated_is_overwritten(appender, path, monkeypatch):
    def ftruncate(fd, size):
        raise OSError(errno.EIO, "Input/output error")

    disk_full_after(monkeypatch, 3)
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    with pytest.raises(OSError, match="No space"):
        appender.append(b"twotwo")
    monkeypatch.setattr(os, "pwrite", REAL_PWRITE)
    appender.append(b"s")
    appender.append(b"ix")
    assert path.read_bytes() == b"headsix"


def test_an_append_to_a_removed_file_fails(appender, path):
    assert not appender.removed
    path.unlink()
    assert appender.removed
    for durable in (False, True):
        with pytest.raises(FileNotFoundError, match="removed while it was in use"):
            appender.append(b"one", durable=durable)
    assert appender.size == 4


def test_a_header_that_does_not_fit_leaves_no_file(path, monkeypatch):
    disk_full_after(monkeypatch, 2)
    with pytest.raises(OSError, match="No space"):
        Appender(path, b"head")
    assert not path.exists()


def test_only_durable_appends_wait_for_the_disk(appender, path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append("data"))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    appender.append(b"one")
    assert synced == []
    appender.append(b"two", durable=True)
    assert synced == ["data", True]  # the file, then its name in the directory
    appender.append(b"six", durable=True)
    assert synced == ["data", True, "data"]


def test_a_published_file_is_renamed_after_its_content_is_on_disk(appender, path, monkeypatch):
    seen = []
    name = path.with_name("published")
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(name.exists()))
    appender.append(b"one")
    appender.publish(name)
    assert seen == [False, True]
    assert (name.read_bytes(), path.exists(), appender.path) == (b"headone", False, name)


def test_a_directory_that_cannot_be_synced_is_an_error_and_leaks_nothing(
    appender, monkeypatch, open_files
):
    def fsync(fd):
        raise OSError(errno.EIO, "Input/output error")

    before = open_files()
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        appender.append(b"one", durable=True)
    assert open_files() == before


def test_a_discarded_file_is_closed_and_removed(path, open_files):
    before = open_files()
    Appender(path, b"head").discard()
    assert not path.exists()
    assert open_files() == before
